#!/usr/bin/env python3
"""Predicted next to actual time to an accuracy, in the scenarios of `bench/regret.py`.

    python bench/plan_accuracy.py predict --data-dir DIR
    python bench/regret.py --data-dir DIR
    python bench/plan_accuracy.py compare

`predict` trains every scenario with all-reduce ("the job has run before"), and writes down what
the planner then expects of every strategy: from each of these runs alone, and from all of them.
`regret.py` then runs every strategy with other seeds, and `compare` prints the errors. The target
is the validation accuracy that the earlier runs ended at, minus three standard errors of one
validation: closer to its end a curve rises by less than seeds differ, so that chance decides when
it reaches an accuracy. Actual times are those of the mean curve over seeds, as in `regret.py`.
Startup is not part of a simulated run, and is set to 0.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
from collections import defaultdict
from functools import partial
from multiprocessing import Pool
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
STANDARD_ERRORS = 3.0
"""Distance of the target from the end of the earlier runs."""
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
    target = target_accuracy(scenario.name, mean_curve(earlier)[-1][1], STANDARD_ERRORS)
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


def run_earlier(data_dir: Path | None, which: tuple[str, int]) -> Row:
    scenario = next(s for s in scenarios() if s.name == which[0])
    return run(scenario, "allreduce", which[1], data_dir)


def predict(out: Path, data_dir: Path | None) -> None:
    rows = read_rows(out)
    known = {(r["scenario"], r["seed"]) for r in rows if r["kind"] == "earlier"}
    rows = [r for r in rows if r["kind"] == "earlier"]
    todo = [
        (scenario.name, seed)
        for scenario in scenarios()
        for seed in EARLIER_SEEDS
        if (scenario.name, seed) not in known
    ]
    with Pool(initializer=torch.set_num_threads, initargs=(1,)) as processes:
        for row in processes.imap(partial(run_earlier, data_dir), todo):
            rows.append({"kind": "earlier", **row})
            with out.open("a") as file:
                file.write(json.dumps(rows[-1]) + "\n")
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
    parser.add_argument("command", choices=("predict", "compare"))
    parser.add_argument("--data-dir", type=Path)
    parser.add_argument("--out", type=Path, default=RESULTS / "plan_accuracy.jsonl")
    parser.add_argument("--actual", type=Path, default=RESULTS / "regret.jsonl")
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.command == "predict":
        predict(args.out, args.data_dir)
    else:
        compare(args.out, args.actual)


if __name__ == "__main__":
    main()
