"""Compares runs: mean and spread over seeds per strategy, and all runs behind them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TypedDict, cast

from paceline.report.stats import Spread, difference_or_none, group_by, mean_and_std, ratio_or_none
from paceline.telemetry import metrics
from paceline.telemetry.run_folder import write_json
from paceline.telemetry.schema import RunResult, as_finite, as_mapping

SETTINGS = ("model", "data", "batch", "workers", "servers", "virtual")
"""Runs of one strategy that differ in one of these are not repetitions of each other."""


class StrategyEntry(TypedDict, total=False):
    """One strategy of a comparison; it has a `Spread` under the key of every metric too."""

    task: str
    label: str
    strategy: str
    model: str | None
    data: str | None
    batch: int | None
    workers: int | None
    servers: int | None
    virtual: bool
    runs_total: int
    runs_done: int
    runs_failed: int
    seconds: Spread
    switch_pause_s: Spread
    switch_drain_s: Spread
    runs: list[dict[str, object]]
    seconds_over_first_strategy_seconds: float | None
    seconds_minus_first_strategy_seconds: float | None
    first_strategy_seconds: float | None
    train_seconds: Spread
    train_seconds_over_first_strategy_train_seconds: float | None


class Comparison(TypedDict, total=False):
    """comparison.json. A matrix has `tasks`, a comparison of strategies `first_strategy`."""

    task: str
    first_strategy: str | None
    runs_total: int
    runs_failed: int
    spread: str
    tasks: list[Comparison]
    strategies: list[StrategyEntry]


def spread_of(entry: StrategyEntry, key: str) -> Spread:
    return cast(Spread, entry[key])  # type: ignore[literal-required]


def mean_metric(entry: StrategyEntry, key: str) -> float | None:
    return spread_of(entry, key)["mean"]


def compare_results(results: Sequence[RunResult]) -> Comparison:
    """Groups runs by strategy, in the given order, and summarizes each group over its seeds.

    Only runs that are `done` are averaged; the others are listed and counted in `runs_failed`. Runs
    of one strategy that differ in one of `SETTINGS` form separate groups, and `label` states the
    difference. Otherwise `label` is the strategy text, or its name in a matrix.
    """
    groups = group_by(zip(label_results(results), results, strict=True), lambda pair: pair[0])
    strategies = [summarize_group(label, [r for _, r in g]) for label, g in groups.items()]
    for entry in strategies:  # A ratio below 1 is faster than the first strategy.
        mean, first = entry["seconds"]["mean"], strategies[0]["seconds"]["mean"]
        entry["seconds_over_first_strategy_seconds"] = ratio_or_none(mean, first)
        entry["seconds_minus_first_strategy_seconds"] = difference_or_none(mean, first)
        entry["first_strategy_seconds"] = first
        mean, first = entry["train_seconds"]["mean"], strategies[0]["train_seconds"]["mean"]
        entry["train_seconds_over_first_strategy_train_seconds"] = ratio_or_none(mean, first)
    return {
        "first_strategy": strategies[0]["label"] if strategies else None,
        "runs_total": len(results),
        "runs_failed": sum(entry["runs_failed"] for entry in strategies),
        "spread": "std is the sample standard deviation over the runs that are done; "
        "null with fewer than two",
        "strategies": strategies,
    }


def label_results(results: Sequence[RunResult]) -> list[str]:
    """Returns one label per result: its strategy, and how it differs from others of that text."""
    alike = group_by(results, name_strategy)
    labels = []
    for result in results:
        strategy, notes = name_strategy(result), []
        for setting in SETTINGS:
            known = [r.get(setting) for r in alike[strategy] if r.get(setting) is not None]
            if any(value != known[0] for value in known):
                value = result.get(setting)
                notes.append(describe_setting(setting, known[0] if value is None else value))
        labels.append(f"{strategy} [{', '.join(notes)}]" if notes else strategy)
    return labels


def name_strategy(result: RunResult) -> str:
    """Returns the name that a matrix gave the run, or else the text of its strategy."""
    arm = as_mapping(result.get("labels")).get("arm")
    return str(arm or result.get("strategy") or "unknown")


def describe_setting(setting: str, value: object) -> str:
    if setting == "virtual":
        return "virtual" if value else "measured"
    if setting == "batch":
        return f"batch {value}"
    if setting in ("workers", "servers"):
        return f"{value} {setting if value != 1 else setting[:-1]}"
    return str(value)


def summarize_group(label: str, runs: list[RunResult]) -> StrategyEntry:
    done = [run for run in runs if run.get("status") == "done"]
    strategy = str(runs[0].get("strategy") or "unknown")
    entry: StrategyEntry = {"label": label, "strategy": strategy}
    for setting in SETTINGS:
        known = (r.get(setting) for r in runs if r.get(setting) is not None)
        entry[setting] = next(known, None)  # type: ignore[literal-required]
    entry["virtual"] = bool(entry["virtual"])
    entry["runs_total"] = len(runs)
    entry["runs_done"] = len(done)
    entry["runs_failed"] = len(runs) - len(done)
    for metric in metrics.METRICS:
        # The table of metrics decides which keys there are: they cannot be literals here.
        entry[metric.key] = mean_and_std(metric.value(run) for run in done)  # type: ignore[literal-required]
    entry["runs"] = [
        {
            "dir": run.get("dir"),
            "seed": run.get("seed"),
            "status": run.get("status"),
            "seconds": as_finite(run.get("seconds")),
            "test_acc": as_finite(run.get("test_acc")),
            "error": run.get("error"),
        }
        for run in runs
    ]
    return entry


def compare_tasks(results: Sequence[RunResult]) -> Comparison:
    """Compares within each task of a matrix, because ratios across tasks are meaningless.

    `tasks` has one comparison per task, `strategies` the entries of all with their `task`.
    """
    groups = group_by(results, lambda r: str(as_mapping(r.get("labels")).get("task") or "unknown"))
    tasks: list[Comparison] = [
        {"task": task, **compare_results(group)} for task, group in groups.items()
    ]
    return {
        "runs_total": len(results),
        "runs_failed": sum(task["runs_failed"] for task in tasks),
        "tasks": tasks,
        "strategies": [
            {"task": task["task"], **entry} for task in tasks for entry in task["strategies"]
        ],
    }


def write_comparison(path: Path, results: Sequence[RunResult]) -> Comparison:
    """Compares the results, writes comparison.json atomically, and returns the comparison."""
    comparison = compare_results(results)
    write_json(path, comparison)
    return comparison
