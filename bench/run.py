"""Paceline beside plain PyTorch DDP: interleaved, repeated, as ratios with absolutes beside.

python bench/run.py [--repeats 5] [--workloads mlp-300-100,resnet20] [--no-save]
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import paceline
from paceline.launch.run import usable_cores, versions
from workloads import WORKLOADS

HERE = Path(__file__).parent
WORKERS = 2
THREADS = 1


def measure_ddp(name: str) -> float:
    command = [sys.executable, str(HERE / "plain_ddp.py"), name, str(WORKERS), str(THREADS)]
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=600)
    return float(done.stdout.split()[-1])


def measure_paceline(name: str) -> float:
    with tempfile.TemporaryDirectory() as folder:
        result = paceline.train(
            WORKLOADS[name].job(WORKERS), "allreduce", WORKERS, out=f"{folder}/run", threads=THREADS
        )
    return float(result["samples_per_s"])


def describe(values: list[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--workloads", default=",".join(WORKLOADS))
    parser.add_argument("--no-save", action="store_true")
    options = parser.parse_args()
    rows = []
    for name in options.workloads.split(","):
        ddp: list[float] = []
        ours: list[float] = []
        for repeat in range(options.repeats):
            # Whoever goes first alternates: a machine that warms up or cools down favours nobody.
            sides = [(ddp, measure_ddp), (ours, measure_paceline)]
            for values, measure in sides if repeat % 2 == 0 else sides[::-1]:
                values.append(measure(name))
            print(
                f"{name} {repeat + 1}/{options.repeats}: DDP {ddp[-1]:.0f}, Paceline {ours[-1]:.0f}"
            )
        ratios = [b / a for a, b in zip(ddp, ours, strict=True)]
        rows.append(
            {
                "workload": name,
                "batch_per_worker": WORKLOADS[name].batch_per_worker,
                "ddp_samples_per_s": describe(ddp),
                "paceline_samples_per_s": describe(ours),
                "paceline_over_ddp": describe(ratios),
            }
        )
        print(
            f"{name}: Paceline {statistics.median(ours):.0f} samples/s, DDP "
            f"{statistics.median(ddp):.0f}: x{statistics.median(ratios):.3f} "
            f"({min(ratios):.3f} to {max(ratios):.3f})"
        )
    if not options.no_save:
        path = HERE / "results" / f"{time.strftime('%Y-%m-%d')}-allreduce-beside-ddp.json"
        machine = {"cores": usable_cores(), "processor": platform.processor() or platform.machine()}
        about = {"workers": WORKERS, "threads_each": THREADS, "repeats": options.repeats}
        body = {"about": about, "machine": machine, "versions": versions(), "rows": rows}
        path.write_text(json.dumps(body, indent=2) + "\n")
        print(f"written: {path}")


if __name__ == "__main__":
    main()
