#!/usr/bin/env python3
"""Predicted next to actual time to an accuracy, in the scenarios of `bench/regret.py`.

    python bench/plan_accuracy.py predict --data-dir DIR
    python bench/plan_accuracy.py run --data-dir DIR
    python bench/plan_accuracy.py compare [--actual bench/results/regret.jsonl]

`predict` trains every scenario with all-reduce ("the job has run before"), and writes down what the
planner then expects of every strategy: from each of these runs alone, and from all of them. `run`
then runs every strategy with a seed that nothing has used. `compare` prints errors against these
runs, or against those of `regret.py`, which use other seeds as well. The target is the validation
accuracy that the earlier runs ended at, minus the standard error of one validation; actual times
are those of the mean curve over seeds, as in `regret.py`. Startup is not part of a simulated run,
and is set to 0.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import torch

from paceline.plan.cost_model import Workload
from paceline.plan.estimate import estimate
from paceline.plan.learning_curve import AccuracyGoal, LearningCurve
from paceline.plan.pool_arrays import PoolArrays
from paceline.strategies.registry import parse_strategy
from paceline.twin.workload import workload_of_job
from regret import Row, mean_curve, run, target_accuracy, time_to
from scenarios import Scenario, make_job, scenarios

STRATEGIES = (
    "allreduce",
    "allreduce(balance=auto)",
    "ps",
    "grouped(size=2)",
    "local_sgd(h=4)",
    "allreduce(codec=int8)",
    "auto",
)
EARLIER_SEEDS = (11, 12, 13)
FRESH_SEED = 21
RESULTS = Path("bench/results")


def read_rows(path: Path) -> list[Row]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def predict_scenario(scenario: Scenario, work: Workload, earlier: list[Row]) -> list[Row]:
    """Predicts every strategy from the curves of these runs."""
    pool = scenario.pool.model_copy(
        update={
            "hosts": tuple(h.model_copy(update={"startup_s": 0.0}) for h in scenario.pool.hosts)
        }
    )
    arrays = PoolArrays(pool, work)
    target = target_accuracy(scenario.name, mean_curve(earlier)[-1][1])
    runs = tuple(
        tuple(((place + 1) * work.samples, acc) for place, (_, acc) in enumerate(r["validations"]))
        for r in earlier
    )
    arrays.goal = AccuracyGoal(target, LearningCurve(runs, work.evaluated["val"]))
    rows = []
    for text in STRATEGIES:
        found = estimate(arrays, np.arange(len(pool.hosts)), parse_strategy(text))
        low, high = found.seconds_interval
        rows.append(
            {
                "kind": "predicted",
                "scenario": scenario.name,
                "strategy": text,
                "earlier": [r["seed"] for r in earlier],
                "target": target,
                "seconds": found.seconds,
                "low": low,
                "high": high,
                "step_s": found.step_s,
                "written": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
            }
        )
    return rows


def predict(out: Path, data_dir: Path | None) -> None:
    rows = read_rows(out)
    known = {(r["scenario"], r["seed"]) for r in rows if r["kind"] == "earlier"}
    rows = [r for r in rows if r["kind"] == "earlier"]
    for scenario in scenarios():
        for seed in EARLIER_SEEDS:
            if (scenario.name, seed) in known:
                continue
            rows.append({"kind": "earlier", **run(scenario, "allreduce", seed, data_dir)})
            with out.open("a") as file:
                file.write(json.dumps(rows[-1]) + "\n")
            print(f"{scenario.name} seed {seed}: {rows[-1]['status']}", flush=True)
    predictions: list[Row] = []
    for scenario in scenarios():
        earlier = [r for r in rows if r["scenario"] == scenario.name and r["status"] == "done"]
        work = workload_of_job(make_job(scenario, EARLIER_SEEDS[0], data_dir))
        for some in (*([one] for one in earlier), earlier):
            predictions += predict_scenario(scenario, work, some)
    out.write_text("".join(json.dumps(r) + "\n" for r in (*rows, *predictions)))


def compare(out: Path, actual: Path) -> None:
    runs: dict[tuple[str, str], list[Row]] = defaultdict(list)
    for row in read_rows(actual):
        runs[row["scenario"], row["strategy"]].append(row)
    compared = []
    for row in read_rows(out):
        key = row["scenario"], row["strategy"]
        if row["kind"] == "predicted" and key in runs:
            seconds = time_to(mean_curve(runs[key]), row["target"])
            compared.append({**row, "actual": seconds})
    for title, count in (("one earlier run, each in turn", 1), ("three earlier runs", 3)):
        print(f"\n{title}\n")
        print_table([r for r in compared if len(r["earlier"]) == count])


def run_fresh(path: Path, data_dir: Path | None) -> None:
    known = {(r["scenario"], r["strategy"]) for r in read_rows(path)}
    for text in STRATEGIES:
        for scenario in scenarios():
            if (scenario.name, text) not in known:
                row = run(scenario, text, FRESH_SEED, data_dir)
                with path.open("a") as file:
                    file.write(json.dumps(row) + "\n")


def print_table(rows: list[dict[str, Any]]) -> None:
    print("| strategy | predictions | not reached (expected) | median error | bias | held | open |")
    print("|---|---:|---:|---:|---:|---:|---:|")
    for text in (*STRATEGIES, "all"):
        some = [r for r in rows if text in (r["strategy"], "all")]
        if some:
            print(f"| {text if text == 'all' else f'`{text}`'} | {describe(some)} |")


def describe(rows: list[dict[str, Any]]) -> str:
    """Errors, infinite if only one of prediction and run reaches the target; and intervals."""
    errors = []
    for row in rows:
        missed = math.isinf(row["actual"])
        if math.isinf(row["seconds"]):
            errors.append(0.0 if missed else math.inf)
        else:
            errors.append(-math.inf if missed else row["seconds"] / row["actual"] - 1)
    held = sum(r["low"] <= r["actual"] <= r["high"] for r in rows)
    lost = sum(math.isinf(r["actual"]) for r in rows)
    expected = sum(math.isinf(r["seconds"]) for r in rows)
    median = statistics.median(map(abs, errors))
    return (
        f"{len(rows)} | {lost} ({expected}) | {100 * median:.0f}% | "
        f"{100 * statistics.median(errors):+.0f}% | {held} of {len(rows)} | "
        f"{sum(math.isinf(r['high']) for r in rows)}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("command", choices=("predict", "run", "compare"))
    parser.add_argument("--data-dir", type=Path)
    parser.add_argument("--out", type=Path, default=RESULTS / "plan_accuracy.jsonl")
    parser.add_argument("--actual", type=Path, default=RESULTS / "plan_accuracy_runs.jsonl")
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.command == "predict":
        predict(args.out, args.data_dir)
    elif args.command == "run":
        run_fresh(args.actual, args.data_dir)
    else:
        compare(args.out, args.actual)


if __name__ == "__main__":
    main()
