"""Measures what surviving losses costs when nothing fails: allreduce with --min-workers 1 and all.

python bench/elastic.py [--pairs 7] [--workers 2] [--strategy allreduce]

Runs of both kinds alternate on this machine, and each pair starts with the other kind. Prints the
median samples per second of each, and the median of the ratios of the pairs with its quartiles.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from pathlib import Path

from paceline.job import refer_to_job
from paceline.launch.run import run_training
from paceline.launch.run_options import RunOptions
from paceline.strategies.registry import parse_strategy
from synthetic_job import write_job

CASES = {
    "mlp-300-100": ((1, 28, 28), 256, 1500),
    "resnet20": ((3, 32, 32), 64, 40),
    "mlp-wide": ((1, 28, 28), 64, 60),
}
"""Shape of the input, global batch and steps."""


def measure(model: str, folder: Path, strategy: str, workers: int, least: int | None) -> float:
    """Returns the samples per second of a run."""
    shape, batch, steps = CASES[model]
    job = write_job(folder / f"{model.replace('-', '_')}.py", model, shape, batch, steps)
    options = RunOptions(
        out=folder / "run", workers=workers, threads=1, min_workers=least, force=True
    )
    result = run_training(refer_to_job(job, {}), parse_strategy(strategy), options)
    return float(result["samples_per_s"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--pairs", type=int, default=7)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--strategy", default="allreduce")
    parser.add_argument("--models", default=",".join(CASES))
    args = parser.parse_args()
    print("| network | all, samples/s | 1, samples/s | ratio | quartiles |")
    print("|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as place:
        for model in args.models.split(","):
            found: dict[int | None, list[float]] = {None: [], 1: []}
            for pair in range(args.pairs):
                for least in (None, 1) if pair % 2 else (1, None):
                    speed = measure(model, Path(place), args.strategy, args.workers, least)
                    found[least].append(speed)
            ratios = [b / a for a, b in zip(found[None], found[1], strict=True)]
            low, middle, high = statistics.quantiles(ratios, n=4)
            print(
                f"| `{model}` | {statistics.median(found[None]):,.0f} | "
                f"{statistics.median(found[1]):,.0f} | {middle:.3f} | {low:.3f} to {high:.3f} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
