"""Matches runs with the published results that they repeat, and lists how they differ."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from paceline.report.comparison import StrategyEntry, mean_metric
from paceline.report.published_results import normalize_label, read_published_json
from paceline.report.runs import ReportRun, RunGroup
from paceline.report.stats import mean_and_std
from paceline.telemetry.schema import as_finite, as_mapping


@dataclass(frozen=True)
class Reproduced:
    """The runs of one arm, and the published workload, batch and arm that they stand for."""

    task: RunGroup
    entry: StrategyEntry
    workload: str
    batch: int
    arm: str

    @property
    def label(self) -> str:
        return self.entry["label"]

    @property
    def runs(self) -> list[ReportRun]:
        return self.task.done_runs_of(self.entry)

    def mean(self, key: str) -> float | None:
        """Returns the mean of a metric of comparison.json over the finished runs."""
        return mean_metric(self.entry, key)

    def stage(self, name: str) -> float | None:
        """Returns the mean seconds of a stage."""
        return self.average(as_mapping(run.result.get("stages")).get(name) for run in self.runs)

    @staticmethod
    def average(values: Iterable[object]) -> float | None:
        return mean_and_std(values)["mean"]


@dataclass(frozen=True)
class PublishedSettings:
    """Settings of a published run that ours should have, too."""

    data: str
    epochs: int
    workers: int
    batch: int
    batch_is_per_worker: bool = False
    models: tuple[str, ...] = ()
    """Our models that match the study's; any if empty."""


def list_reproduced(tasks: Sequence[RunGroup]) -> list[Reproduced]:
    """Returns the arms whose runs name a published result, in the order of the report."""
    found = []
    for task in tasks:
        for entry in task.entries:
            labels = as_mapping(task.runs_of(entry)[0].result.get("labels"))
            parts = str(labels.get("published") or "").split("/")
            if len(parts) == 3 and parts[1].isdecimal():
                found.append(Reproduced(task, entry, parts[0], int(parts[1]), parts[2]))
    return found


def mean_seconds(row: Reproduced | None) -> float | None:
    return row.mean("seconds") if row is not None else None


def find_arm(rows: Iterable[Reproduced], arm: str) -> Reproduced | None:
    return next((row for row in rows if row.arm == arm), None)


def group_workloads(rows: Iterable[Reproduced]) -> dict[str, list[Reproduced]]:
    groups: dict[str, list[Reproduced]] = {}
    for row in rows:
        groups.setdefault(row.workload, []).append(row)
    return groups


def study_facts(study: str) -> Mapping[str, Any]:
    return as_mapping(read_published_json("results")[study])


def describe_mismatch(row: Reproduced, published: PublishedSettings) -> str:
    """Returns how the runs differ from the published ones, for example "2 workers, not 5"."""
    entry, result = row.entry, row.runs[0].result if row.runs else {}
    found = []
    model, data = entry["model"], str(entry["data"])
    if published.models and model not in published.models:
        found.append(f"model {model}, not {' or '.join(published.models)}")
    if normalize_label(data) != normalize_label(published.data):
        found.append(f"data {data}, not {published.data}")
    epochs = as_finite(result.get("epochs"))
    if epochs is not None and epochs != published.epochs:
        found.append(f"{epochs:g} epochs, not {published.epochs}")
    workers, batch = entry["workers"], entry["batch"]
    if workers is not None and workers != published.workers:
        found.append(f"{workers} workers, not {published.workers}")
    if batch is not None:
        ours = batch // workers if published.batch_is_per_worker and workers else batch
        if ours != published.batch:
            found.append(f"batch {ours}, not {published.batch}")
    if entry["virtual"]:
        found.append("simulated")
    found += [str(note) for note in result.get("notes") or ()]
    if not row.runs:
        found.append("no run finished")
    return "; ".join(found) or "nothing"
