"""Runs side by side: per strategy the mean and spread over seeds, and every run that went in."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from paceline.report.stats import as_finite, mean_and_std
from paceline.telemetry.run_folder import write_json

MEASURES = (
    "seconds",
    "samples_per_s",
    "test_acc",
    "val_acc",
    "train_acc",
    "train_loss",
    "val_loss",
    "test_loss",
    "samples",
    "updates",
)
SETTINGS = ("model", "data", "batch", "workers", "servers", "virtual")
"""Runs of one strategy that differ in one of these are not the same thing repeated."""


def compare_results(results: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Group runs by strategy text, in the order given, and measure each group over its seeds.

    A result may carry `dir`, the folder it came from. Only runs that are `done` are averaged; the
    others are kept among the runs and counted in `runs_failed`. Where runs of one strategy differ
    in model, data, batch, workers, servers or being virtual, they form groups of their own and
    `label` says how they differ; otherwise `label` is the strategy text, or a matrix's name for it.
    """
    groups: dict[str, list[Mapping[str, Any]]] = {}
    for result, label in zip(results, label_results(results), strict=True):
        groups.setdefault(label, []).append(result)
    strategies = [summarise_group(label, runs) for label, runs in groups.items()]
    if strategies:
        first_seconds = strategies[0]["seconds"]["mean"]
        for entry in strategies:
            add_ratio(entry, first_seconds)
    return {
        "first_strategy": strategies[0]["label"] if strategies else None,
        "runs_total": len(results),
        "runs_failed": sum(entry["runs_failed"] for entry in strategies),
        "spread": "std is the sample standard deviation over the runs that are done; "
        "null with fewer than two",
        "strategies": strategies,
    }


def label_results(results: Sequence[Mapping[str, Any]]) -> list[str]:
    """One label a result: its strategy, and whatever sets it apart from others of the same text."""
    alike: dict[str, list[Mapping[str, Any]]] = {}
    for result in results:
        alike.setdefault(name_strategy(result), []).append(result)
    labels = []
    for result in results:
        strategy = name_strategy(result)
        notes = []
        for setting in SETTINGS:
            known = [r[setting] for r in alike[strategy] if r.get(setting) is not None]
            if all(value == known[0] for value in known):
                continue
            value = result.get(setting)
            notes.append(describe_setting(setting, known[0] if value is None else value))
        labels.append(f"{strategy} [{', '.join(notes)}]" if notes else strategy)
    return labels


def name_strategy(result: Mapping[str, Any]) -> str:
    """What tables call a run: the name that a matrix gave it, else its strategy's text."""
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


def summarise_group(label: str, runs: list[Mapping[str, Any]]) -> dict[str, Any]:
    done = [run for run in runs if run.get("status") == "done"]
    strategy = str(runs[0].get("strategy") or "unknown")
    entry: dict[str, Any] = {"label": label, "strategy": strategy}
    for setting in SETTINGS:
        entry[setting] = next((r[setting] for r in runs if r.get(setting) is not None), None)
    entry["virtual"] = bool(entry["virtual"])
    entry["runs_total"] = len(runs)
    entry["runs_done"] = len(done)
    entry["runs_failed"] = len(runs) - len(done)
    for measure in MEASURES:
        entry[measure] = mean_and_std(run.get(measure) for run in done)
    entry["staleness_mean"] = mean_and_std(
        as_mapping(run.get("staleness")).get("mean") for run in done
    )
    entry["bytes_sent"] = mean_and_std(run.get("bytes_sent") for run in done)
    entry["bytes_over_uncoded"] = mean_and_std(compare_bytes(run) for run in done)
    entry["switch_pause_s"] = mean_and_std(sum_switches(run, "pause_s") for run in done)
    entry["switch_drain_s"] = mean_and_std(sum_switches(run, "drain_s") for run in done)
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


def add_ratio(entry: dict[str, Any], first_seconds: float | None) -> None:
    """Set the time against the first strategy's: a ratio below 1 is faster, absolutes beside."""
    mean = entry["seconds"]["mean"]
    ratio = difference = None
    if mean is not None and first_seconds:
        ratio, difference = mean / first_seconds, mean - first_seconds
    entry["seconds_over_first_strategy_seconds"] = ratio
    entry["seconds_minus_first_strategy_seconds"] = difference
    entry["first_strategy_seconds"] = first_seconds


def sum_switches(result: Mapping[str, Any], what: str) -> float | None:
    """Seconds of all switches of a run; None when it never switched, which is not a pause of 0."""
    rows = result.get("switches")
    if not isinstance(rows, list) or not rows:
        return None
    return sum(as_finite(as_mapping(row).get(what)) or 0.0 for row in rows)


def compare_bytes(result: Mapping[str, Any]) -> float | None:
    """Bytes sent over what they would have been without a codec; None where there was none."""
    sent, uncoded = as_finite(result.get("bytes_sent")), as_finite(result.get("bytes_before_codec"))
    return sent / uncoded if sent and uncoded and sent != uncoded else None


def as_mapping(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def compare_tasks(results: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The same for a matrix: within each task, because ratios across tasks mean nothing.

    `tasks` holds a comparison each; `strategies` the entries of all, each with its `task`.
    """
    groups: dict[str, list[Mapping[str, Any]]] = {}
    for result in results:
        task = as_mapping(result.get("labels")).get("task")
        groups.setdefault(str(task or "unknown"), []).append(result)
    tasks = [{"task": task, **compare_results(group)} for task, group in groups.items()]
    return {
        "runs_total": len(results),
        "runs_failed": sum(task["runs_failed"] for task in tasks),
        "tasks": tasks,
        "strategies": [
            {"task": task["task"], **entry} for task in tasks for entry in task["strategies"]
        ],
    }


def write_comparison(path: Path, results: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Compare the results, write `comparison.json` at `path` atomically, and return it."""
    comparison = compare_results(results)
    write_json(path, comparison)
    return comparison
