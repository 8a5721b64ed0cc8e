"""Compares allreduce(shares=8), which is bit-identical for any number of workers, with allreduce.

    python bench/fixed_shares.py --repeats 3

Each pair of runs trains the same job, in alternating order, on 1, 2 and 4 workers of this machine
with one thread each. Prints a Markdown table of medians of samples per second (training only), and
whether all runs with fixed shares ended with the same model file. Writes a dated result.
"""

from __future__ import annotations

import argparse
import hashlib
import statistics
import tempfile
from pathlib import Path
from typing import Any

import paceline
from results_store import keep

STRATEGIES = ("allreduce", "allreduce(shares=8)")
CASES: dict[str, dict[str, Any]] = {
    "mlp-300-100, batch 128": {"model": "mlp-300-100", "batch": 128, "epochs": 6},
    "mlp-300-100, batch 512": {"model": "mlp-300-100", "batch": 512, "epochs": 12},
    "cnn-small, batch 128": {"model": "cnn-small", "batch": 128, "epochs": 2},
    "resnet8, batch 128": {"model": "resnet8", "batch": 128, "epochs": 1},
}
WORKERS = (1, 2, 4)


def measure(case: dict[str, Any], strategy: str, workers: int) -> tuple[float, str]:
    job = paceline.Job(data="digits", seed=1, **case)
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "run"
        result = paceline.train(job, strategy, workers, out=out, threads=1)
        digest = hashlib.sha256((out / "model.safetensors").read_bytes()).hexdigest()
    return result["samples_per_s"] or 0.0, digest


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for name, case in CASES.items():
        digests = set()
        for workers in WORKERS:
            rates: dict[str, list[float]] = {strategy: [] for strategy in STRATEGIES}
            for repeat in range(options.repeats):
                for strategy in STRATEGIES[:: 1 if repeat % 2 else -1]:
                    rate, digest = measure(case, strategy, workers)
                    rates[strategy].append(rate)
                    if "shares" in strategy:
                        digests.add(digest)
            plain, fixed = (statistics.median(rates[strategy]) for strategy in STRATEGIES)
            row = {"case": name, "workers": workers, "plain": plain, "fixed": fixed}
            rows.append({**row, "ratio": plain / fixed, "rates": rates, "models": len(digests)})
            print(f"{name}, {workers} workers: x {plain / fixed:.2f} in time", flush=True)
    print(
        "\n| Job | Workers | `allreduce` | `allreduce(shares=8)` | Time ratio | Different models |"
    )
    print("|---|---:|---:|---:|---:|---:|")
    for row in rows:
        print(
            f"| {row['case']} | {row['workers']} | {row['plain']:,.0f} | {row['fixed']:,.0f} "
            f"| {row['ratio']:.2f} | {row['models'] - 1} |"
        )
    keep("fixed-shares", {"strategies": STRATEGIES, "rows": rows})


if __name__ == "__main__":
    main()
