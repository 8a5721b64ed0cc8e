#!/usr/bin/env python3
"""`auto` next to every fixed strategy, in the simulator with real gradients.

    python bench/regret.py --data-dir DIR --out bench/results/regret.jsonl [--seeds 3]
    python bench/regret.py --data-dir DIR --real --out bench/results/regret_real.jsonl

With `--real`, scenarios run on local processes; the machine must be idle otherwise.
Rows are appended to the output file one by one; a further call continues where the last one ended
and prints the table. Regret is the time to the validation accuracy that all-reduce ends at, divided
by that of the best fixed strategy in hindsight. Times and accuracies of every epoch are means over
seeds, and the accuracy is one standard error of a validation below all-reduce's, because runs of
equal quality reach the mean itself or not by chance. Times between validations are interpolated.
Strategies that never reach it count as never.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from scipy.special import stdtr

from paceline.errors import PacelineError
from paceline.launch.run import run_training
from paceline.launch.run_options import RunOptions
from paceline.specs.slowdown import InjectedSlowdown
from paceline.strategies.registry import parse_strategy
from paceline.twin.run import TwinOptions, run_twin
from scenarios import RealScenario, Scenario, make_job, real_scenarios, scenarios

STRATEGIES = (
    "auto",
    "allreduce",
    "allreduce(balance=auto)",
    "allreduce(codec=int8)",
    "ps",
    "grouped(size=2)",
    "local_sgd(h=4)",
)
Row = dict[str, Any]


def run(scenario: Scenario | RealScenario, strategy: str, seed: int, data_dir: Path | None) -> Row:
    row: Row = {"scenario": scenario.name, "strategy": strategy, "seed": seed}
    job, spec = make_job(scenario, seed, data_dir), parse_strategy(strategy)
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "run"
        try:
            if isinstance(scenario, Scenario):
                result = run_twin(job, spec, TwinOptions(out=out, pool=scenario.pool, threads=1))
            else:
                result = run_training(job, spec, real_options(scenario, out))
        except PacelineError as error:
            return {**row, "status": "failed", "error": str(error)}
    return {
        **row,
        "status": result["status"],
        "test_acc": result["test_acc"],
        "val_loss": result["val_loss"],
        "virtual_s": result["seconds"],
        "validations": [(h["seconds"], h["val_acc"]) for h in result["history"]],
        "changes": [[s["from"], s["to"], s["cause"]] for s in result["switches"]],
        "real_s": round(time.perf_counter() - began, 2),
    }


def real_options(scenario: RealScenario, out: Path) -> RunOptions:
    slow = [InjectedSlowdown(w, factor=f) for w, f in enumerate(scenario.factors) if f > 1]
    slow += [
        InjectedSlowdown(w, factor=factor, begin=begin, end=end)
        for w, (begin, end, factor) in scenario.periods.items()
    ]
    return RunOptions(
        out=out, workers=len(scenario.factors), threads=1, slowdowns=tuple(slow), force=True
    )


def mean_curve(rows: Iterable[Row]) -> list[tuple[float, float]]:
    """Seconds and validation accuracy after each epoch, as means over runs that ended."""
    done = [row["validations"] for row in rows if row["status"] == "done"]
    return [
        (statistics.mean(s for s, _ in points), statistics.mean(a for _, a in points))
        for points in zip(*done, strict=False)
    ]


def time_to(curve: list[tuple[float, float]], target: float) -> float:
    """Virtual seconds until the best validation accuracy so far reaches the target."""
    best, before_s = 0.0, 0.0
    for seconds, accuracy in curve:
        if accuracy >= target:
            share = (target - best) / (accuracy - best) if accuracy > best else 0.0
            return before_s + share * (seconds - before_s)
        best, before_s = max(best, accuracy), seconds
    return math.inf


def target_accuracy(name: str, accuracy: float, errors: float = 1.0) -> float:
    """The accuracy minus some standard errors of one validation."""
    every = [*scenarios(), *real_scenarios()]
    data = next(scenario.data for scenario in every if scenario.name == name)
    rows = 200 if data == "digits" else 2000
    return accuracy - errors * math.sqrt(accuracy * (1 - accuracy) / rows)


def summarize(name: str, rows: list[Row]) -> dict[str, Any] | None:
    by_strategy: dict[str, dict[int, Row]] = defaultdict(dict)
    for row in rows:
        by_strategy[row["strategy"]][row["seed"]] = row
    base, auto = by_strategy.get("allreduce", {}), by_strategy.get("auto", {})
    done = {seed: row for seed, row in base.items() if row["status"] == "done"}
    if not done or not auto:
        return None
    target = target_accuracy(name, mean_curve(done.values())[-1][1])
    times = {
        strategy: time_to(mean_curve(found.values()), target)
        for strategy, found in by_strategy.items()
    }
    fixed = {s: t for s, t in times.items() if s != "auto"}
    best = min(fixed, key=lambda s: fixed[s])
    pairs = [
        100 * (auto[seed].get("test_acc", 0.0) - row["test_acc"])
        for seed, row in done.items()
        if seed in auto
    ]
    return {
        "scenario": name,
        "allreduce_acc": statistics.mean(r["test_acc"] for r in done.values()),
        "points": statistics.mean(pairs),
        "significant": is_significantly_below(pairs),
        "below_worst": 100
        * (
            min(auto[s].get("test_acc", 0.0) for s in auto)
            - min(r["test_acc"] for r in done.values())
        ),
        "allreduce_s": times["allreduce"],
        "auto_s": times["auto"],
        "best": best,
        "best_s": times[best],
        "regret": times["auto"] / times[best] if times[best] < math.inf else math.nan,
        "diverged": sum(row["status"] != "done" for row in auto.values()),
    }


def is_significantly_below(pairs: list[float]) -> bool:
    """One-sided paired t-test at the 5% level: is the mean difference below 0?"""
    if len(pairs) < 2 or statistics.stdev(pairs) == 0:
        return len(pairs) > 1 and statistics.mean(pairs) < 0
    t = statistics.mean(pairs) / (statistics.stdev(pairs) / math.sqrt(len(pairs)))
    return bool(stdtr(len(pairs) - 1, t) < 0.05)


def print_table(rows: list[Row]) -> None:
    groups: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        groups[row["scenario"]].append(row)
    held_out = {scenario.name for scenario in scenarios() if scenario.held_out}
    print_part([group for group in groups.items() if group[0] not in held_out])
    if held_out & groups.keys():
        print("\nHeld out:\n")
        print_part([group for group in groups.items() if group[0] in held_out])


def print_part(groups: list[tuple[str, list[Row]]]) -> None:
    found = [s for s in (summarize(name, group) for name, group in groups) if s]
    print(
        "| scenario | allreduce acc | auto, points (worst) | allreduce s | auto s | "
        "best fixed (s) | regret |\n|---|---:|---:|---:|---:|---|---:|"
    )
    for s in found:
        print(
            f"| {s['scenario']} | {100 * s['allreduce_acc']:.1f}% | {s['points']:+.2f}"
            f"{'*' if s['significant'] else ''} ({s['below_worst']:+.1f}) | "
            f"{s['allreduce_s']:.1f} | {s['auto_s']:.1f} | "
            f"`{s['best']}` ({s['best_s']:.1f}) | {s['regret']:.2f} |"
        )
    regrets = [s["regret"] for s in found if not math.isnan(s["regret"])]
    if regrets:
        print(
            f"\nregret: median {statistics.median(regrets):.2f}, worst {max(regrets):.2f}, "
            f"within 1.20 in {sum(r <= 1.2 for r in regrets)} of {len(regrets)} scenarios; "
            f"{sum(s['diverged'] for s in found)} runs of auto failed\n"
            "points: mean difference in test accuracy, * if significantly below 0 (paired t-test, "
            "5%); in parentheses, the worst run next to the worst run of allreduce"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--data-dir", type=Path)
    parser.add_argument("--out", type=Path, default=Path("bench/results/regret.jsonl"))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--scenarios", help="comma-separated names; all by default")
    parser.add_argument(
        "--strategies",
        type=lambda text: text.split(";"),
        default=STRATEGIES,
        help="separated by semicolons; auto and six fixed ones by default",
    )
    parser.add_argument("--real", action="store_true", help="local processes, not the simulator")
    parser.add_argument("--table", action="store_true", help="only print the table")
    args = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    if args.out.exists():
        rows = [json.loads(line) for line in args.out.read_text().splitlines()]
    known = {(r["scenario"], r["strategy"], r["seed"]) for r in rows}
    chosen = args.scenarios.split(",") if args.scenarios else None
    every: list[Scenario | RealScenario] = [*(real_scenarios() if args.real else scenarios())]
    if args.real and not args.table:
        # The first run also starts the fork server and reads the data from disk.
        run(every[0], "allreduce", 0, args.data_dir)
    for scenario in () if args.table else every:
        if chosen is not None and scenario.name not in chosen:
            continue
        for seed in range(1, args.seeds + 1):
            for strategy in args.strategies:
                if (scenario.name, strategy, seed) in known:
                    continue
                rows.append(run(scenario, strategy, seed, args.data_dir))
                with args.out.open("a") as file:
                    file.write(json.dumps(rows[-1]) + "\n")
                print(f"{scenario.name} {strategy} seed {seed}: {rows[-1]['status']}", flush=True)
    print_table(rows)


if __name__ == "__main__":
    main()
