"""Measures peak memory (PSS) of workers and servers next to DDP's.

python bench/memory.py [--workers 2] [--repeats 3] [--save]

PSS divides a page among the processes that map it, so shared memory counts once in total. It is
read five times per second during training, from outside. A server's base is its memory with a
network of 10,000 numbers; the rest is reported in multiples of its shard of the weights.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

import psutil

import paceline
from results_store import keep
from workloads import WORKLOADS, Workload

HERE = Path(__file__).parent
EVERY_S = 0.2
NETWORKS = ("resnet20", "mlp-wide")
TINY = Workload("mlp-128", (1, 8, 8), 32, 1500)


class Watch:
    """Peaks of all descendants of a process, by depth."""

    def __init__(self, root: int) -> None:
        self._root = psutil.Process(root)
        self._peaks: dict[tuple[int, int], int] = {}
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look)

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _look(self) -> None:
        while not self._over.wait(EVERY_S):
            level, depth = [self._root], 0
            while level:
                depth += 1
                below = []
                for process in level:
                    below += _children(process)
                for process in below:
                    key = (depth, process.pid)
                    self._peaks[key] = max(self._peaks.get(key, 0), read_pss(process.pid))
                level = below

    def peaks(self, depth: int) -> list[int]:
        """Returns the peaks at a depth, largest first."""
        return sorted((v for (d, _), v in self._peaks.items() if d == depth), reverse=True)


def _children(process: psutil.Process) -> list[psutil.Process]:
    try:
        return process.children()
    except psutil.Error:
        return []


def read_pss(pid: int) -> int:
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0  # it has just ended
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:")), 0)


def watch_ddp(workload: Workload, workers: int) -> list[int]:
    words = [sys.executable, str(HERE / "plain_ddp.py"), workload.name, str(workers), "1"]
    process = subprocess.Popen(words, stdout=subprocess.DEVNULL)
    with Watch(process.pid) as watch:
        process.wait(600)
    if process.returncode:
        raise RuntimeError(f"DDP ended with {process.returncode}")
    return watch.peaks(1)[:workers]


def watch_paceline(workload: Workload, strategy: str, workers: int) -> tuple[list[int], list[int]]:
    """Returns the peaks of workers, and of servers, which are children of workers."""
    with tempfile.TemporaryDirectory() as folder, Watch(psutil.Process().pid) as watch:
        paceline.train(workload.job(workers), strategy, workers, out=f"{folder}/run", threads=1)
    return watch.peaks(1)[:workers], watch.peaks(2)


def measure(name: str, workers: int, repeats: int, base: float) -> dict[str, Any]:
    workload = WORKLOADS[name]
    found: dict[str, list[float]] = {"ddp": [], "allreduce": [], "ps": [], "server": []}
    for repeat in range(repeats):
        found["ddp"].append(max(watch_ddp(workload, workers)))
        found["allreduce"].append(max(watch_paceline(workload, "allreduce", workers)[0]))
        members, servers = watch_paceline(workload, "ps", workers)
        found["ps"].append(max(members))
        found["server"].append(max(servers))
        summary = ", ".join(f"{side} {values[-1] / 1e6:,.0f} MB" for side, values in found.items())
        print(f"{name} {repeat + 1}/{repeats}: {summary}", flush=True)
    medians = {side: statistics.median(values) for side, values in found.items()}
    shard = weight_bytes(name)
    return {
        "workload": name,
        "weight_bytes": shard,
        "peak_pss_bytes": found,
        "allreduce / ddp": medians["allreduce"] / medians["ddp"],
        "ps / ddp": medians["ps"] / medians["ddp"],
        "server above its base, in shards": (medians["server"] - base) / shard,
    }


def weight_bytes(name: str) -> int:
    from paceline.worker.job_builder import build_model, load_job_data

    job = WORKLOADS[name].job(1)
    return sum(
        p.numel() * p.element_size() for p in build_model(job, load_job_data(job)).parameters()
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--workloads", default=",".join(NETWORKS))
    parser.add_argument("--save", action="store_true")
    given = parser.parse_args()
    base = float(max(watch_paceline(TINY, "ps", given.workers)[1]))
    print(f"a server with next to nothing: {base / 1e6:,.0f} MB")
    rows = [
        measure(name, given.workers, given.repeats, base) for name in given.workloads.split(",")
    ]
    for row in rows:
        summary = ", ".join(f"{key} x{row[key]:.2f}" for key in ("allreduce / ddp", "ps / ddp"))
        shards = row["server above its base, in shards"]
        print(f"{row['workload']}: {summary}, server {shards:.2f} shards above its base")
    if given.save:
        about = {"workers": given.workers, "repeats": given.repeats}
        keep("memory", {"about": about, "server_base_bytes": base, "rows": rows})


if __name__ == "__main__":
    main()
