#!/usr/bin/env python3
"""Runs the commands of README.md and docs/, and the files in examples/, in a temporary directory.

    python bench/docs_commands.py --out bench/results/docs_commands.jsonl [--only docs/tune.md]

Commands in code blocks run as they are written, page by page, in a directory with examples/, job
files, scripts, pools of this machine and recorded runs under the names that the pages use.
`REPLACED` states what is put in the place of names that stand for something of the reader, and
`NOT_HERE` which commands need something that this machine does not have, and what tests them
instead. Rows are appended one by one; a further call repeats only what failed, is new or changed,
prints the failures and exits with 1 if there are any.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
COMMAND_LINE = re.compile(r"^[ #$]*(paceline [a-z].*)$")
LIMIT_S = 600.0
SERVE_S = 20.0
"""A command that serves until it is interrupted runs this long."""
PACELINE = [sys.executable, "-m", "paceline"]

NOT_HERE = {
    r"--engine ray": "needs a Ray cluster at that address; tests/test_ray.py starts one",
    r"--engine spark": "needs a Spark cluster and HDFS at that address; tests/test_spark.py",
    r"hdfs://": "needs HDFS at that address; tests/test_train_from_url.py starts one",
    r"s3://": "needs a bucket at that address; tests/test_stores.py starts an S3 server",
    r"^paceline pool keys": "installs keys on other machines; tests/test_pool.py",
    r"^paceline data get": "downloads; tests/test_download.py does so from a local server",
    r"--select (gpu|gpus)\b": "needs machines with GPUs; tests/test_launch_ssh.py selects them",
    r"nine\.yaml": "needs nine machines; tests/test_train_ssh.py places servers on machines",
    r"--data-dir|--data cifar10": "needs downloaded data sets; tests/test_data_real.py reads them",
    r"--matrix published-switch": "takes an hour on two cores; tests/test_matrix.py expands it",
}
"""Commands that are not run here, by a pattern, and the reason."""

REPLACED = {
    r"^paceline dashboard runs$": r"\g<0> --port 0",
    r"-o pool\.yaml": "-o converted.yaml",
    r"\b(?:SCRIPT|mnist\.py|train\.py|script\.py)\b": "examples/custom_loop.py",
    r"\btrain_keras\.py\b": "examples/keras_digits.py",
    r"--matrix FILE": "--matrix matrix.yaml",
    r"--out OUT\b": "--out runs/out",
    r"--(pool|cluster) POOL\b": r"--\1 pool.yaml",
    r"^paceline report DIR\.\.\.": "paceline report runs/first",
    r'-- --epochs 3 --name "first try"': "-- --epochs 3",
    r"--select a,b\b": "--select localhost",
    r"'val_acc>=0.95' --learn 3": "'val_acc>=0.8' --learn 1 --epochs 2",
}
"""Parts of commands that stand for something of the reader, and what is used for them here."""

MISTAKES = (r"--epoch 3", r"--batch 0")
"""Commands of pages that show an error: their exit status is 2."""

SETUP: dict[str, list[str]] = {
    r"runs/(first|a|b|compare|python|matrix|spirals|pool)(?=[ /\n]|$)": [
        "train --model mlp-128 --data digits --epochs 1 --workers 2 --out {path} --quiet"
    ],
}
"""Commands that make what a page assumes to exist, if it does not, by a pattern of its name."""

FILES = {
    "job.py": "from paceline import Job\n\n\ndef job():\n    return Job(epochs=2, batch=64)\n",
    "pool.yaml": "hosts:\n  - {host: localhost, workers: 2}\n",
    "run.yaml": "model: cnn-small\nstrategy: ps(sync=ssp(3), servers=2)\nworkers: 4\nbatch: 64\n",
    "matrix.yaml": (
        "job: {epochs: 1}\nmodels: [mlp-128]\ndata: [digits]\nstrategies: [allreduce, ps]\n"
    ),
    "blueprint.json": '{"connections": [{"IP": "10.0.0.1", "GPUS": 4, "energy_efficient": "no"}]}',
}
EXAMPLES = {
    "custom_loop.py": "launch examples/custom_loop.py --strategy allreduce --workers 2",
    "job.py": "train examples/job.py --workers 2 --out runs/example-job",
    "job.yaml": "train examples/job.yaml --workers 2 --out runs/example-yaml",
    "keras_digits.py": "launch examples/keras_digits.py --strategy allreduce --workers 2",
    "published-pool.yaml": "pool show examples/published-pool.yaml",
    "published-pool.history.jsonl": "plan --pool examples/published-pool.yaml --epochs 2",
}
"""A command for each example file; `python_api.py` is run by Python, and scripts/ by
bench/scripts.py."""
NOT_COMMANDS = ("scripts", "python_api.py")


@dataclass(frozen=True)
class DocCommand:
    page: str
    text: str

    @property
    def reason(self) -> str | None:
        """Why it does not run here; None if it does."""
        return next((why for what, why in NOT_HERE.items() if re.search(what, self.text)), None)

    @property
    def replaced(self) -> str:
        text = self.text
        for what, by in REPLACED.items():
            text = re.sub(what, by, text)
        return text

    @property
    def expected_status(self) -> int:
        return 2 if any(re.search(f"{what}\\b", self.text) for what in MISTAKES) else 0

    @property
    def serves(self) -> bool:
        return self.text.startswith("paceline dashboard")


def find_commands(path: Path) -> Iterator[DocCommand]:
    """Yields the commands in code blocks, fenced or indented, without those with placeholders."""
    text = path.read_text(encoding="utf-8").replace("\\\n", " ")
    fenced, page = False, str(path.relative_to(ROOT))
    for line in text.splitlines():
        if line.startswith("```"):
            fenced = not fenced
        elif (fenced or line.startswith("    ")) and (match := COMMAND_LINE.match(line)):
            parts = shlex.split(match[1], comments=True)
            # A line of a diagram or of an error message is not a command.
            is_call = len(parts) > 1 and not re.search(r" {3,}\S", match[1].split("#")[0][:40])
            if is_call and "..." not in parts and parts[0] == "paceline":
                yield DocCommand(page, shlex.join(parts))


def prepare(work: Path) -> None:
    shutil.copytree(ROOT / "examples", work / "examples")
    shutil.copytree(ROOT / "examples", work / "p", ignore=shutil.ignore_patterns("scripts"))
    for name, text in FILES.items():
        (work / name).write_text(text, encoding="utf-8")


def set_up(work: Path, text: str) -> None:
    """Makes recorded runs that a command reads."""
    parts = shlex.split(text)
    outs = {parts[i + 1] for i, word in enumerate(parts[:-1]) if word in ("--out", "-o")}
    for pattern, commands in SETUP.items():
        for match in re.finditer(pattern, text):
            path = match[0].rstrip("/")
            if path in outs or (work / path).exists():
                continue
            for command in commands:
                subprocess.run(
                    [*PACELINE, *shlex.split(command.format(path=path))],
                    cwd=work,
                    check=True,
                    capture_output=True,
                    timeout=LIMIT_S,
                )


def run(command: DocCommand, work: Path) -> dict[str, Any]:
    text = command.replaced
    set_up(work, text)
    parts = shlex.split(text)[1:]
    for i, word in enumerate(parts[:-1]):
        if word == "--out" and "--resume" not in parts:
            # Pages use the same names for different runs.
            shutil.rmtree(work / parts[i + 1], ignore_errors=True)
    began = time.monotonic()
    process = subprocess.Popen(
        [*PACELINE, *parts],
        cwd=work,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        stdin=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=SERVE_S if command.serves else LIMIT_S)
        status = process.returncode
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGINT if command.serves else signal.SIGKILL)
        output, _ = process.communicate(timeout=30)
        status = 0 if command.serves and "http://" in output else -1
    status -= command.expected_status
    row = {"seconds": round(time.monotonic() - began, 1), "status": status}
    return row | ({"output": output[-1500:]} if status else {})


def run_python(name: str, work: Path) -> dict[str, Any]:
    began = time.monotonic()
    done = subprocess.run(
        [sys.executable, f"examples/{name}"],
        cwd=work,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    row = {"seconds": round(time.monotonic() - began, 1), "status": done.returncode}
    return row | ({"output": (done.stdout + done.stderr)[-1500:]} if done.returncode else {})


def list_commands() -> list[DocCommand]:
    found = [command for page in PAGES for command in find_commands(page)]
    found += [DocCommand(f"examples/{name}", f"paceline {c}") for name, c in EXAMPLES.items()]
    return list(dict.fromkeys(found))


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--only", nargs="*", default=[], help="pages")
    options = parser.parse_args()
    rows: dict[str, dict[str, Any]] = {}
    if options.out.exists():
        lines = options.out.read_text(encoding="utf-8").splitlines()
        rows = {row["id"]: row for row in map(json.loads, lines)}
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        prepare(work)
        todo = [*list_commands(), DocCommand("examples/python_api.py", "python")]
        todo = [c for c in todo if not options.only or c.page in options.only]
        for command in todo:
            name = hashlib.sha256(f"{command.page} {command.replaced}".encode()).hexdigest()[:12]
            if rows.get(name, {}).get("status") == 0:
                continue
            row: dict[str, Any] = {"id": name, "page": command.page, "command": command.text}
            if command.reason is not None:
                row |= {"status": 0, "not_run": command.reason}
            elif command.text == "python":
                row |= run_python("python_api.py", work)
            else:
                row |= run(command, work)
            rows[name] = row
            print(json.dumps(row), flush=True)
            options.out.write_text(
                "".join(json.dumps(r) + "\n" for r in rows.values()), encoding="utf-8"
            )
    failed = [row for row in rows.values() if row["status"] != 0]
    ran = sum("not_run" not in row for row in rows.values())
    print(f"{ran} commands run, {len(rows) - ran} declared as not runnable, {len(failed)} failed")
    for row in failed:
        print(f"{row['page']}: {row['command']}\n{row['output']}\n")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
