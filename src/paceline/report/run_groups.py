"""Groups runs that can be compared: same task, or same model and dataset."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from paceline.report.comparison import (
    Comparison,
    StrategyEntry,
    compare_results,
    label_results,
)
from paceline.report.run_loader import ReportRun
from paceline.telemetry.numbers import as_mapping


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
