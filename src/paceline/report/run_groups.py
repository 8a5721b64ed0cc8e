"""Runs that may be compared with each other: of one model, one data set and one batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from paceline.report.comparison import as_mapping, compare_results, label_results
from paceline.report.run_loader import ReportRun


@dataclass(frozen=True, kw_only=True)
class RunGroup:
    """Comparable runs, labelled among themselves."""

    name: str
    runs: list[ReportRun]
    comparison: dict[str, Any]

    @property
    def entries(self) -> list[dict[str, Any]]:
        entries: list[dict[str, Any]] = self.comparison["strategies"]
        return entries

    def runs_of(self, entry: dict[str, Any]) -> list[ReportRun]:
        return [run for run in self.runs if run.label == entry["label"]]


def split_tasks(runs: Sequence[ReportRun]) -> list[RunGroup]:
    """One task for each name that a matrix gave, else for each model and data set."""
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
