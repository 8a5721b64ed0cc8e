"""Compares Paceline with other frameworks: interleaved, repeated, as ratios and absolute rates.

python bench/run.py [--repeats 5] [--workloads mlp-300-100,...] [--sides ddp,allreduce,...]
                    [--workers 2] [--no-save]

Sides: `ddp` (plain PyTorch DDP), `apart` (processes that never communicate), `compute` (which do
not even update), Paceline's `allreduce` and `ps`; and, each in a separate environment from `make
peers`, `torchft`, `tf-ring` and `tf-ps` (TensorFlow's MultiWorkerMirrored and ParameterServer
strategies). A side that fails is recorded as failed; one without its environment is named and
skipped. `ddp-cl`, `allreduce-cl` and `ps-cl` are the same with images in channels-last memory
format, which TensorFlow always uses.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import paceline
from figures import draw
from results_store import keep
from workloads import WORKLOADS

HERE = Path(__file__).parent
THREADS = 1
PEERS = HERE.parent / ".peers"
RATIOS = (
    ("allreduce", "ddp"),
    ("allreduce", "torchft"),
    ("allreduce", "tf-ring"),
    ("allreduce", "apart"),
    ("ps", "tf-ps"),
    ("ps", "apart"),
    ("allreduce-cl", "ddp-cl"),
    ("allreduce-cl", "tf-ring"),
    ("ps-cl", "tf-ps"),
)
"""Reported ratios: the first over the second, of the same round."""


def run_script(python: Path | str, script: str, *words: object) -> float:
    command = [str(python), str(HERE / script), *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    if done.returncode:
        raise RuntimeError(done.stderr.strip().splitlines()[-1:] or "no output")
    return float(done.stdout.split()[-1])


def measure_paceline(strategy: str, name: str, workers: int, **changes: object) -> float:
    job = WORKLOADS[name].job(workers).model_copy(update=changes)
    with tempfile.TemporaryDirectory() as folder:
        result = paceline.train(job, strategy, workers, out=f"{folder}/run", threads=THREADS)
    return float(result["samples_per_s"])


def make_sides(workers: int) -> dict[str, Callable[[str], float]]:
    here, ddp = sys.executable, "plain_ddp.py"
    sides: dict[str, Callable[[str], float]] = {
        "ddp": lambda name: run_script(here, ddp, name, workers, THREADS),
        "apart": lambda name: run_script(here, ddp, name, workers, THREADS, "apart"),
        "compute": lambda name: run_script(here, ddp, name, workers, THREADS, "compute"),
        "allreduce": lambda name: measure_paceline("allreduce", name, workers),
        "ps": lambda name: measure_paceline("ps", name, workers),
        "ddp-cl": lambda name: run_script(here, ddp, name, workers, THREADS, "channels_last"),
        "allreduce-cl": lambda name: measure_paceline(
            "allreduce", name, workers, channels_last=True
        ),
        "ps-cl": lambda name: measure_paceline("ps", name, workers, channels_last=True),
    }
    fault_tolerant, tensorflow = (
        PEERS / name / "bin" / "python" for name in ("torchft", "tensorflow")
    )
    if fault_tolerant.exists():
        sides["torchft"] = lambda name: run_script(
            fault_tolerant, "peer_torchft.py", name, workers, THREADS
        )
    if tensorflow.exists():
        for kind in ("tf-ring", "tf-ps"):
            sides[kind] = lambda name, kind=kind: run_script(  # type: ignore[misc]
                tensorflow, "peer_tf.py", kind, name, workers, THREADS
            )
    return sides


def describe(values: list[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def measure(name: str, sides: dict[str, Callable[[str], float]], repeats: int) -> dict[str, Any]:
    found: dict[str, list[float | None]] = {side: [] for side in sides}
    failures: dict[str, str] = {}
    for repeat in range(repeats):
        # The first side alternates, so warming up or cooling down favors none.
        names = list(sides)[repeat % len(sides) :] + list(sides)[: repeat % len(sides)]
        for side in names:
            try:
                found[side].append(sides[side](name))
            except Exception as error:
                found[side].append(None)
                failures[side] = str(error)
        summary = ", ".join(
            f"{side} {values[-1]:,.0f}" if values[-1] is not None else f"{side} failed"
            for side, values in found.items()
        )
        print(f"{name} {repeat + 1}/{repeats}: {summary}", flush=True)
    rates = {
        side: describe([v for v in values if v is not None])
        for side, values in found.items()
        if any(v is not None for v in values)
    }
    ratios = {}
    for ours, theirs in RATIOS:
        pairs = zip(found.get(ours, []), found.get(theirs, []), strict=False)
        both = [a / b for a, b in pairs if a is not None and b is not None]
        if both:
            ratios[f"{ours} / {theirs}"] = describe(both)
    return {
        "workload": name,
        "batch_per_worker": WORKLOADS[name].batch_per_worker,
        "samples_per_s": rates,
        "ratios": ratios,
        "failed": failures,
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--workloads", default=",".join(WORKLOADS))
    parser.add_argument("--sides", default="ddp,apart,allreduce,ps,torchft,tf-ring,tf-ps")
    parser.add_argument("--label", default="peers", help="suffix of the result file name")
    parser.add_argument("--no-save", action="store_true")
    given = parser.parse_args()
    sides = make_sides(given.workers)
    for side in given.sides.split(","):
        if side not in sides:
            print(f"{side}: skipped, its environment is missing; run `make peers`")
    sides = {side: sides[side] for side in given.sides.split(",") if side in sides}
    rows = [measure(name, sides, given.repeats) for name in given.workloads.split(",")]
    print("\n| network | workers | side | samples/s (min to max) | compared with | ratio |")
    print("|---|---:|---|---:|---|---:|")
    for row in rows:
        for side, rate in row["samples_per_s"].items():
            span = f"{rate['median']:,.0f} ({rate['min']:,.0f} to {rate['max']:,.0f})"
            ratios = [
                (k.split(" / ")[1], r)
                for k, r in row["ratios"].items()
                if k.startswith(f"{side} / ")
            ]
            for peer, ratio in ratios:
                text = f"x{ratio['median']:.2f} ({ratio['min']:.2f} to {ratio['max']:.2f})"
                print(
                    f"| {row['workload']} | {given.workers} | {side} | {span} | {peer} | {text} |"
                )
            if not ratios:
                print(f"| {row['workload']} | {given.workers} | {side} | {span} | | |")
        for side, why in row["failed"].items():
            print(f"| {row['workload']} | {given.workers} | {side} | failed: {why} | | |")
    if not given.no_save:
        about = {"workers": given.workers, "threads_each": THREADS, "repeats": given.repeats}
        path = keep(f"{given.label}-{given.workers}-workers", {"about": about, "rows": rows})
        try:
            draw(path, path.with_suffix(".svg"))
        except ImportError:
            print("no picture: matplotlib is missing (make check installs it)")


if __name__ == "__main__":
    main()
