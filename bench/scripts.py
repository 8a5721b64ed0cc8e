#!/usr/bin/env python3
"""The scripts in examples/scripts with TensorFlow alone, and unchanged under `paceline launch`.

    PYTHON bench/scripts.py --out bench/results/scripts.jsonl [--seeds 3] [--only mirrored]
    PYTHON bench/scripts.py --out bench/results/scripts.jsonl --ssh --seeds 1

PYTHON has `paceline[tensorflow]` and tf_keras (.peers/tensorflow/bin/python after `make peers`).
TensorFlow alone runs the scripts with Keras 2, as the studies did: fit() of Keras 3 fails with
strategies of several processes. It has as many replicas as Paceline has workers: two processes, two
logical devices, or two workers with a server and a chief. With `--ssh`, Paceline trains on three
machines: network namespaces with their own SSH servers, as in the tests (requires root). Rows are
appended to the output file one by one; a further call continues where the last one ended and prints
the table.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from network_namespaces import Lab, make_lab, why_not

ROOT = Path(__file__).resolve().parents[1]
SCRIPTS = ROOT / "examples" / "scripts"
REFERENCE = "TensorFlow"
STRATEGIES = ("allreduce", "ps", "switch(allreduce, ps, at=50%)")
WORKERS = 2
LIMIT_S = 600.0
KINDS = {
    "tfds_one_machine": "plain",
    "multi_worker_auto_shard_off": "workers",
    "mirrored": "devices",
    "manual_tf_config": "by hand",
    "records_by_file": "workers",
    "datasets_from_function": "workers",
    "augmented_residual": "plain",
    "central_storage": "plain",
    "parameter_server": "servers",
    "cluster_coordinator": "servers",
    "unseeded_split": "devices",
}
"""Scripts, and how TensorFlow runs them."""
TWO_DEVICES = f"""
import runpy, sys
import tensorflow as tf
cpu = tf.config.list_physical_devices("CPU")[0]
devices = [tf.config.LogicalDeviceConfiguration()] * {WORKERS}
tf.config.set_logical_device_configuration(cpu, devices)
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.create_server(("", 0))) for _ in range(count)]
        return [s.getsockname()[1] for s in sockets]


def free_pair() -> int:
    """Returns the first of two consecutive ports that are free."""
    while True:
        (port,) = free_ports(1)
        with contextlib.suppress(OSError, OverflowError), socket.create_server(("", port + 1)):
            return port


def run_reference(script: Path, kind: str, args: list[str]) -> str:
    """Runs the script with TensorFlow alone and returns the output of the process that trains."""
    roles = {"workers": {"worker": WORKERS}, "servers": {"chief": 1, "worker": WORKERS, "ps": 1}}
    tasks: list[tuple[list[str], dict[str, str]]] = []
    if kind in roles:
        counts = roles[kind]
        ports = iter(free_ports(sum(counts.values())))
        cluster = {
            role: [f"localhost:{next(ports)}" for _ in range(n)] for role, n in counts.items()
        }
        for role, hosts in cluster.items():
            for index in range(len(hosts)):
                config = {"cluster": cluster, "task": {"type": role, "index": index}}
                tasks.append(([str(script), *args], {"TF_CONFIG": json.dumps(config)}))
    elif kind == "by hand":
        port = free_pair()
        tasks = [([str(script), *args, str(i), str(port)], {}) for i in range(WORKERS)]
    elif kind == "devices":
        tasks = [(["-c", TWO_DEVICES, str(script), *args], {})]
    else:
        tasks = [([str(script), *args], {})]
    plain = {k: v for k, v in os.environ.items() if k not in ("TF_CONFIG", "KERAS_BACKEND")}
    plain |= {"TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": "", "TF_USE_LEGACY_KERAS": "1"}
    with tempfile.TemporaryFile("w+") as log:
        running = [
            subprocess.Popen(
                [sys.executable, *task],
                env=plain | variables,
                stdout=log if number == 0 else subprocess.DEVNULL,
                stderr=subprocess.STDOUT if number == 0 else subprocess.DEVNULL,
            )
            for number, (task, variables) in enumerate(tasks)
        ]
        try:
            running[0].wait(LIMIT_S)
        finally:
            for process in running:
                process.kill()  # Servers of TensorFlow never end by themselves.
                process.wait()
        log.seek(0)
        return log.read()


def run_paceline(script: Path, strategy: str, args: list[str], out: Path, lab: Lab | None) -> str:
    command = [sys.executable, "-m", "paceline", "launch", str(script), "--strategy", strategy]
    environment = dict(os.environ)
    if lab is None:
        command += ["--workers", str(WORKERS)]
    else:
        pool = lab.write_pool(lab.folder / "pool.yaml", all={"python": sys.executable})
        command += ["--pool", str(pool), "--project", str(SCRIPTS), "--threads", "1"]
        environment["HOME"] = str(lab.home)
        environment.pop("SSH_AUTH_SOCK", None)
    command += ["--out", str(out), "--force", "--", *args]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=LIMIT_S, env=environment, cwd=SCRIPTS
    )
    left = lab.find_left() if lab is not None else []
    return done.stdout + done.stderr + "".join(f"left running: {line}\n" for line in left)


def measure(
    name: str, arm: str, seed: int, data: Path, work: Path, lab: Lab | None
) -> dict[str, Any]:
    script, args, started = SCRIPTS / f"{name}.py", [str(data), str(seed)], time.monotonic()
    if arm == REFERENCE:
        text = run_reference(script, KINDS[name], args)
    else:
        text = run_paceline(script, arm, args, work / "run", lab)
    found = re.findall(r"(?:^|\] )accuracy ([0-9.]+)", text, re.MULTILINE)
    if "left running:" in text:
        raise SystemExit(f"{name} under {arm} left processes behind:\n{text[-4000:]}")
    if not found or len(set(found)) > 1:
        raise SystemExit(f"{name} under {arm}: no single accuracy in the output:\n{text[-4000:]}")
    row: dict[str, Any] = {"script": name, "arm": arm, "seed": seed, "accuracy": float(found[0])}
    if lab is not None:
        row["machines"] = len(lab.machines)
    return {**row, "seconds": round(time.monotonic() - started, 1)}


def print_table(rows: list[dict[str, Any]]) -> None:
    arms = (REFERENCE, *STRATEGIES)
    print("| Script | " + " | ".join(a if a == REFERENCE else f"`{a}`" for a in arms) + " |")
    print("|---" * (len(arms) + 1) + "|")
    for name in KINDS:
        cells = []
        for arm in arms:
            found = [100 * r["accuracy"] for r in rows if (r["script"], r["arm"]) == (name, arm)]
            spread = f" ± {statistics.stdev(found):.1f}" if len(found) > 1 else ""
            cells.append(f"{statistics.mean(found):.1f}{spread}" if found else "")
        print(f"| `{name}.py` | " + " | ".join(cells) + " |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--only", nargs="*", default=list(KINDS))
    parser.add_argument("--ssh", action="store_true", help="three machines, not local workers")
    options = parser.parse_args()
    if options.ssh and (reason := why_not()):
        raise SystemExit(f"three machines cannot be made here: {reason}")
    rows = []
    if options.out.exists():
        rows = [json.loads(line) for line in options.out.read_text().splitlines()]
    done = {(r["script"], r["arm"], r["seed"]) for r in rows if ("machines" in r) == options.ssh}
    arms = STRATEGIES if options.ssh else (REFERENCE, *STRATEGIES)
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        data = folder / "data"
        digits = ROOT / "src" / "paceline" / "data" / "digits.npz"
        write = [sys.executable, str(SCRIPTS / "write_data.py"), str(digits), str(data)]
        subprocess.run(write, check=True, capture_output=True, timeout=LIMIT_S)
        lab = stack.enter_context(make_lab(folder / "lab")) if options.ssh else None
        for seed in range(options.seeds):
            for name in options.only:
                for arm in arms:
                    if (name, arm, seed) in done:
                        continue
                    row = measure(name, arm, seed, data, folder, lab)
                    print(json.dumps(row), flush=True)
                    rows.append(row)
                    with options.out.open("a") as file:
                        file.write(json.dumps(row) + "\n")
    print_table([r for r in rows if r["arm"] == REFERENCE or ("machines" in r) == options.ssh])


if __name__ == "__main__":
    main()
