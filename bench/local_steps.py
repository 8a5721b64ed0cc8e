#!/usr/bin/env python3
"""Progress per sample of local steps, fitted to the runs of regret.py.

    python bench/local_steps.py

The measured value of a scenario is the number of samples after which all-reduce reaches the target
of regret.py, divided by that of `local_sgd(h=4)`; 0 if it never does. Scenarios near the limit of
stability and held-out scenarios do not take part in the fit of `SPREAD` and `SPREAD_EXPONENT` in
`paceline.specs.strategy`.
"""

from __future__ import annotations

import argparse
import json
import math
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
from scipy.optimize import least_squares

from paceline.strategies.registry import parse_strategy
from regret import Row, mean_curve, target_accuracy, time_to
from scenarios import scenarios

STRATEGY = "local_sgd(h=4)"


def epoch_curve(rows: list[Row]) -> list[tuple[float, float]]:
    """Fraction of the run and mean validation accuracy after each epoch."""
    points = mean_curve(rows)
    return [((i + 1) / len(points), accuracy) for i, (_, accuracy) in enumerate(points)]


def measure(rows: list[Row]) -> dict[str, float]:
    """Returns the measured value of every scenario."""
    by_strategy: dict[tuple[str, str], list[Row]] = defaultdict(list)
    for row in rows:
        by_strategy[row["scenario"], row["strategy"]].append(row)
    found = {}
    for scenario in scenarios():
        synchronous = epoch_curve(by_strategy[scenario.name, "allreduce"])
        local = epoch_curve(by_strategy[scenario.name, STRATEGY])
        if synchronous and local:
            target = target_accuracy(scenario.name, synchronous[-1][1])
            found[scenario.name] = time_to(synchronous, target) / time_to(local, target)
    return found


def fit(distances: list[float], values: list[float]) -> tuple[float, float]:
    """Returns spread and exponent of `1 / (1 + (distance / spread) ** exponent)`."""

    def error(parameters: Any) -> Any:
        spread, exponent = np.exp(parameters)
        return 1 / (1 + (np.array(distances) / spread) ** exponent) - np.array(values)

    spread, exponent = np.exp(least_squares(error, [math.log(20), math.log(2)]).x)
    return float(spread), float(exponent)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rows", type=Path, default=Path("bench/results/regret.jsonl"))
    args = parser.parse_args()
    found = measure([json.loads(line) for line in args.rows.read_text().splitlines()])
    local = parse_strategy(STRATEGY)
    table, distances, values = [], [], []
    for scenario in scenarios():
        if scenario.name not in found or scenario.near_limit:
            continue
        workers = len(scenario.pool.hosts)
        distance = (local.steps_between_syncs - 1) * (workers - 1)
        if not scenario.held_out:
            distances.append(distance)
            values.append(found[scenario.name])
        table.append((distance, scenario.name, found[scenario.name], local.efficiency(workers)))
    print("| scenario | (h - 1) (n - 1) | measured | formula |\n|---|---:|---:|---:|")
    for distance, name, value, formula in sorted(table):
        print(f"| {name} | {distance} | {value:.2f} | {formula:.2f} |")
    print("\nfit: spread {:.1f}, exponent {:.2f}".format(*fit(distances, values)))


if __name__ == "__main__":
    main()
