"""Groups of runs that can be compared, and what a group shows: its target, front and times."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from paceline.report.comparison import (
    Comparison,
    StrategyEntry,
    compare_results,
    label_results,
    mean_metric,
)
from paceline.report.run_loader import ReportRun
from paceline.report.stats import Spread, mean_and_std, mean_of
from paceline.telemetry.schema import as_finite, as_mapping


@dataclass(frozen=True, kw_only=True)
class RunGroup:
    """Comparable runs with labels that are unique among them."""

    name: str
    runs: list[ReportRun]
    comparison: Comparison

    @property
    def entries(self) -> list[StrategyEntry]:
        return self.comparison["strategies"]

    def runs_of(self, entry: StrategyEntry) -> list[ReportRun]:
        return [run for run in self.runs if run.label == entry["label"]]

    def done_runs_of(self, entry: StrategyEntry) -> list[ReportRun]:
        return [run for run in self.runs_of(entry) if run.is_done]


def split_tasks(runs: Sequence[ReportRun]) -> list[RunGroup]:
    """Returns one group per task of a matrix, or else per model and dataset."""
    groups: dict[str, list[ReportRun]] = {}
    for run in runs:
        groups.setdefault(name_task(run), []).append(run)
    return [make_task(name, group) for name, group in groups.items()]


def make_task(name: str, runs: Sequence[ReportRun]) -> RunGroup:
    results = [run.result for run in runs]
    labels = label_results(results)
    labelled = [replace(run, label=label) for run, label in zip(runs, labels, strict=True)]
    return RunGroup(name=name, runs=labelled, comparison=compare_results(results))


def name_task(run: ReportRun) -> str:
    given = as_mapping(run.result.get("labels")).get("task")
    if given:
        return str(given)
    model, data = run.result.get("model"), run.result.get("data")
    return f"{model or 'unknown model'} on {data or 'unknown data'}"


def group_by_label(runs: Iterable[ReportRun]) -> dict[str, list[ReportRun]]:
    """Returns the runs of each strategy, in the order of the report."""
    groups: dict[str, list[ReportRun]] = {}
    for run in runs:
        groups.setdefault(run.label, []).append(run)
    return groups


def finished_or_all(runs: Sequence[ReportRun]) -> list[ReportRun]:
    return [run for run in runs if run.is_done] or list(runs)


def average_phases(runs: Sequence[ReportRun]) -> dict[str, dict[str, float]]:
    """Returns mean seconds by worker and time category over finished runs, or else all runs."""
    gathered: dict[str, dict[str, list[float]]] = {}
    for run in finished_or_all(runs):
        for worker, phases in run.phases.items():
            for phase, seconds in phases.items():
                gathered.setdefault(worker, {}).setdefault(phase, []).append(seconds)
    return {
        worker: {phase: sum(values) / len(values) for phase, values in phases.items()}
        for worker, phases in gathered.items()
    }


@dataclass(frozen=True, kw_only=True)
class TimeToAccuracy:
    """Time, samples and updates until the runs of one strategy first reached the target."""

    label: str
    seconds: Spread
    samples: Spread
    updates: Spread
    reached: int
    runs: int


def choose_target_accuracy(task: RunGroup) -> float | None:
    """Returns the highest multiple of 0.5% validation accuracy that all runs reached."""
    best = []
    for run in task.runs:
        if run.is_done:
            values = [as_finite(row.get("val_acc")) for row in run.history]
            best.append(max((value for value in values if value is not None), default=None))
    known = [value for value in best if value is not None]
    if not known or len(known) < len(best):
        return None
    # Rounded to a readable target.
    return math.floor(min(known) * 200 + 1e-9) / 200


def time_to_accuracy_rows(task: RunGroup, target: float) -> list[TimeToAccuracy]:
    """Returns one row per strategy over finished runs; runs without the target are only counted."""
    found = []
    for entry in task.entries:
        runs = task.done_runs_of(entry)
        rows = [row for run in runs if (row := first_row(run, target)) is not None]
        found.append(
            TimeToAccuracy(
                label=entry["label"],
                seconds=mean_and_std(row.get("seconds") for row in rows),
                samples=mean_and_std(row.get("samples") for row in rows),
                updates=mean_and_std(row.get("updates") for row in rows),
                reached=len(rows),
                runs=len(runs),
            )
        )
    return found


def first_row(run: ReportRun, target: float) -> Mapping[str, Any] | None:
    for row in run.history:
        value = as_finite(row.get("val_acc"))
        if value is not None and value >= target - 1e-12:
            return row
    return None


def fastest(rows: Sequence[TimeToAccuracy]) -> list[TimeToAccuracy]:
    """Returns the rows whose runs all reached the target, fastest first."""
    whole = [row for row in rows if row.runs and row.reached == row.runs]
    return sorted(whole, key=lambda row: mean_of(row.seconds))


def choose_measure(task: RunGroup) -> tuple[str, str]:
    """Returns key and name of test accuracy if it is known, or else of validation accuracy."""
    if any(mean_metric(entry, "test_acc") is not None for entry in task.entries):
        return "test_acc", "test accuracy"
    if any(mean_metric(entry, "val_acc") is not None for entry in task.entries):
        return "val_acc", "validation accuracy"
    return "test_acc", "test accuracy"


def list_frontier_points(task: RunGroup) -> list[tuple[float, float, StrategyEntry]]:
    """Returns (seconds, accuracy, entry) of each strategy with both."""
    measure, _ = choose_measure(task)
    points = [(mean_metric(e, "seconds"), mean_metric(e, measure), e) for e in task.entries]
    return [(s, accuracy, e) for s, accuracy, e in points if s and accuracy is not None]


def find_frontier(task: RunGroup) -> list[StrategyEntry]:
    """Returns the Pareto-optimal entries in time and accuracy, by mean."""
    front: list[StrategyEntry] = []
    best = -math.inf
    for _, accuracy, entry in sorted(list_frontier_points(task), key=lambda p: (p[0], -p[1])):
        if accuracy > best:
            best = accuracy
            front.append(entry)
    return front
