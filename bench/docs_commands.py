#!/usr/bin/env python3
"""Runs the commands of README.md and docs/, and the files in examples/, in a temporary directory.

    python bench/docs_commands.py --data-dir DIR --out bench/results/docs_commands.jsonl
    python bench/docs_commands.py --out bench/results/docs_commands.jsonl --table

Commands in code blocks run page by page, as they are written, in a directory with examples/, job
files, scripts, pools, and recorded runs under the names that the pages use. Clusters, stores and
machines behind the addresses of the pages are started here (docs_services.py). `REPLACED` states
what is put in the place of names that stand for something of the reader, and `SHORTENED` how
studies of hours are cut. `--only docs/tune.md` runs only some pages. Rows are appended one by one;
a further call repeats only what failed, is new or changed, prints the failures and exits with 1 if
there are any.
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

sys.path.insert(0, str(Path(__file__).parent))
from docs_services import NotHere, Services

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
COMMAND_LINE = re.compile(r"^[ #$]*(paceline [a-z].*)$")
VARIABLE_LINE = re.compile(r"^ *([A-Z]\w*)='([^']*)'$")
LIMIT_S = 1200.0
SERVE_S = 20.0
"""A command that serves or follows until it is interrupted runs this long."""
PACELINE = [sys.executable, "-m", "paceline"]
DATA_DIR = r"(?<=--data-dir )(DIR|data)\b"

REPLACED = {
    r"^paceline dashboard runs$": r"\g<0> --port 0",
    r"-o pool\.yaml": "-o converted.yaml",
    r"\b(?:SCRIPT|mnist\.py|train\.py|script\.py)\b": "examples/custom_loop.py",
    r"\btrain_keras\.py\b": "examples/keras_digits.py",
    r"--matrix FILE": "--matrix matrix.yaml",
    r"--out OUT\b": "--out runs/out",
    r"--(pool|cluster) POOL\b": r"--\1 pool.yaml",
    r"^paceline report DIR\.\.\.": "paceline report runs/first",
    r"-- --epochs 3 --name 'first try'": "-- --epochs 3",
    r"--pool pool\.yaml(?=.*--select gpus?\b)": "--pool gpus.yaml",
    r"--select a,b\b": "--select s1,s2",
    r"; \.\.\.": "",
}
"""Parts of commands that stand for something of the reader, and what is used for them here."""

SHORTENED = {
    r"'val_acc>=0.95' --learn 3": "'val_acc>=0.8' --learn 1 --epochs 2",
    r"^(?=.*--data-dir)(.*)--epochs \d+": r"\1--epochs 1",
    r"^(?=.*--data-dir)(.*)--seeds \d+": r"\1--seeds 1",
    r"^(paceline (?:train|compare)(?!.*--matrix)(?=.*--data-dir).*)$": r"\1 --limit 2000",
    r"^(paceline train .*(?:hdfs|s3)://.*)$": r"\1 --epochs 1",
    r"^(paceline train .*s3://.*)--model resnet20": r"\1--model cnn-small",
    r"--scale full(?!.*--twin)": "--scale small",
    r"--matrix study-shards": "--matrix study-shards --scale small",
}
"""Parts of commands that would take hours."""

EXPECTED = {r"--epoch 3\b": 2, r"--batch 0\b": 2, r"--fault 'kill": 1}
"""Exit status of commands that show an error."""

DETACHED = "train --epochs 100 --workers 2 --detach --out {path}"
SETUP = {
    r"^paceline (attach|stop|resume) runs/long": DETACHED,
    r"^paceline resume": "train --workers 2 --epochs 3 --fault 'kill worker=1 at=30%' --out {path}",
    r"hdfs://\S*/\*\.parquet": "data convert mnist {path} --files 4 --force",
    r"s3://": "data convert cifar10 {path} --files 2 --force",
    r"": "train --model mlp-128 --data digits --epochs 1 --workers 2 --out {path} --quiet",
}
"""Commands that make what a command reads: the first whose pattern is found in it."""
MADE = re.compile(r"(?<![\w/])runs/[\w-]+|(?:hdfs|s3)://[^\s']+(?=/\*\.parquet)")
"""Runs and data sets, which are made if they do not exist."""

FILES = {
    "job.py": "from paceline import Job\n\n\ndef job():\n    return Job(epochs=2, batch=64)\n",
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
"""A command for each example file; scripts/ are run by bench/scripts.py."""


@dataclass(frozen=True)
class DocCommand:
    page: str
    text: str

    @property
    def replaced(self) -> str:
        text = self.text
        for what, by in [*REPLACED.items(), *SHORTENED.items()]:
            text = re.sub(what, by, text)
        return text

    @property
    def expected_status(self) -> int:
        return next((n for what, n in EXPECTED.items() if re.search(what, self.text)), 0)

    @property
    def serves(self) -> bool:
        return self.text.startswith(("paceline dashboard", "paceline attach"))

    @property
    def identity(self) -> str:
        return hashlib.sha256(f"{self.page} {self.replaced}".encode()).hexdigest()[:12]


def find_commands(path: Path) -> Iterator[DocCommand]:
    """Yields the commands in code blocks, fenced or indented, without those with placeholders."""
    text = path.read_text(encoding="utf-8").replace("\\\n", " ")
    fenced, page = False, str(path.relative_to(ROOT))
    variables: dict[str, str] = {}
    for line in text.splitlines():
        if line.startswith("```"):
            fenced = not fenced
        elif not fenced and not line.startswith("    "):
            continue
        elif given := VARIABLE_LINE.match(line):
            variables[given[1]] = given[2]
        elif match := COMMAND_LINE.match(line):
            words = match[1]
            for name, value in variables.items():
                words = words.replace(f'"${name}"', shlex.quote(value)).replace(f"${name}", value)
            parts = shlex.split(words, comments=True)
            # A line of a diagram or of an error message is not a command.
            is_call = len(parts) > 1 and not re.search(r" {3,}\S", words.split("#")[0][:40])
            if is_call and "..." not in parts:
                yield DocCommand(page, shlex.join(parts))


class Runner:
    """Runs commands in a directory; `data` has the published files of named datasets."""

    def __init__(self, work: Path, services: Services, data: Path | None) -> None:
        self._work, self._services = work, services
        self._data = data
        self._made: set[str] = set()
        shutil.copytree(ROOT / "examples", work / "examples")
        shutil.copytree(ROOT / "examples", work / "p", ignore=shutil.ignore_patterns("scripts"))
        for name, text in FILES.items():
            (work / name).write_text(text, encoding="utf-8")

    def run(self, command: DocCommand) -> dict[str, Any]:
        """Returns status and seconds, and the output of a failure; raises NotHere."""
        text = command.replaced
        needs_data = re.search(rf"{DATA_DIR}|--data cifar10|(hdfs|s3)://", text)
        if needs_data and self._data is None:
            raise NotHere("needs --data-dir with published datasets")
        text, environment = self._services.open(re.sub(DATA_DIR, str(self._data), text))
        environment |= {} if self._data is None else {"PACELINE_DATA": str(self._data)}
        parts = shlex.split(text)[1:]
        outs = {parts[i + 1] for i, word in enumerate(parts[:-1]) if word in ("--out", "-o")}
        for path in outs if "--resume" not in parts else ():
            # Pages use the same names for different runs.
            shutil.rmtree(self._work / path, ignore_errors=True)
        self._set_up(text, outs if "--resume" not in parts else set(), environment)
        began = time.monotonic()
        status, output = self._execute(parts, environment, serves=command.serves)
        status -= command.expected_status
        row = {"seconds": round(time.monotonic() - began, 1), "status": status}
        return row | ({"output": output[-1500:]} if status else {})

    def _set_up(self, text: str, outs: set[str], environment: dict[str, str]) -> None:
        """Makes the runs and datasets that a command reads."""
        named = MADE.findall(text) or (["runs/first"] if " runs " in f"{text} " else [])
        for path in dict.fromkeys(named):
            if path in outs or path in self._made or (self._work / path).exists():
                continue
            made = next(how for what, how in SETUP.items() if re.search(what, text))
            self._execute(shlex.split(made.format(path=path)), environment)
            self._made.add(path)

    def _execute(
        self, parts: list[str], environment: dict[str, str], *, serves: bool = False
    ) -> tuple[int, str]:
        """Returns the exit status and the output; -1 after the time limit."""
        is_python = parts[0] == "python"
        process = subprocess.Popen(
            [sys.executable, *parts[1:]] if is_python else [*PACELINE, *parts],
            cwd=self._work,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            text=True,
            start_new_session=True,
            env={**os.environ, **environment},
        )
        try:
            output, _ = process.communicate(timeout=SERVE_S if serves else LIMIT_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGINT if serves else signal.SIGKILL)
            output, _ = process.communicate(timeout=30)
            return (0 if serves and output else -1), output
        finally:
            if process.poll() is None:  # The bench itself is interrupted.
                os.killpg(process.pid, signal.SIGTERM)
                process.wait(30)
        return process.returncode, output


def list_commands() -> list[DocCommand]:
    found = [command for page in PAGES for command in find_commands(page)]
    found += [DocCommand(f"examples/{name}", f"paceline {c}") for name, c in EXAMPLES.items()]
    found.append(DocCommand("examples/python_api.py", "paceline python examples/python_api.py"))
    return list(dict.fromkeys(found))


def read_rows(path: Path) -> dict[str, dict[str, Any]]:
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    return {row["id"]: row for row in map(json.loads, lines)}


def print_table(commands: list[DocCommand], rows: dict[str, dict[str, Any]]) -> None:
    """Prints what ran, by page, and what did not, with the reason."""
    print("| page | commands | run | failed | to run | not runnable here |")
    print("|---|---:|---:|---:|---:|---|")
    for page in dict.fromkeys(command.page for command in commands):
        listed = [command.identity for command in commands if command.page == page]
        own = [rows[name] for name in listed if name in rows]
        ran = [row for row in own if "not_run" not in row]
        reasons = "; ".join(dict.fromkeys(row["not_run"] for row in own if "not_run" in row))
        failed = sum(row["status"] != 0 for row in ran)
        left = len(listed) - len(own)
        print(f"| {page} | {len(listed)} | {len(ran)} | {failed} | {left} | {reasons} |")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--data-dir", type=Path, help="published files of named datasets")
    parser.add_argument("--only", nargs="*", default=[], help="pages")
    parser.add_argument("--table", action="store_true", help="print the recorded rows, run nothing")
    options = parser.parse_args()
    known = read_rows(options.out)
    commands = list_commands()
    # Rows of commands that have been changed or removed are dropped.
    rows = {c.identity: known[c.identity] for c in commands if c.identity in known}
    if options.table:
        print_table(commands, rows)
        return 0
    data = options.data_dir.resolve() if options.data_dir is not None else None
    # A shell starts programs in the background with SIGINT ignored, and their children inherit it.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with tempfile.TemporaryDirectory() as work, tempfile.TemporaryDirectory() as place:
        services = Services(Path(place), Path(work))
        runner = Runner(Path(work), services, data)
        try:
            for command in commands:
                done = rows.get(command.identity, {"status": 1})
                if (options.only and command.page not in options.only) or done["status"] == 0:
                    continue
                row: dict[str, Any] = {
                    "id": command.identity, "page": command.page, "command": command.text
                }  # fmt: skip
                if command.replaced != command.text:
                    row["run_as"] = command.replaced
                try:
                    row |= runner.run(command)
                except NotHere as error:
                    row |= {"status": 0, "not_run": str(error)}
                rows[command.identity] = row
                print(json.dumps(row), flush=True)
                text = "".join(json.dumps(r) + "\n" for r in rows.values())
                options.out.write_text(text, encoding="utf-8")
        finally:
            services.close()
    failed = [row for row in rows.values() if row["status"] != 0]
    ran = sum("not_run" not in row for row in rows.values())
    print(
        f"{len(commands)} commands: {ran} run, {len(rows) - ran} not runnable here, "
        f"{len(commands) - len(rows)} not yet run, {len(failed)} failed"
    )
    for row in failed:
        print(f"{row['page']}: {row['command']}\n{row['output']}\n")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
