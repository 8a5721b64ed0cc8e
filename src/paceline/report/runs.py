"""Runs of a report, loaded from their folders in any state, and groups of comparable runs."""

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from os.path import commonpath
from pathlib import Path
from typing import Any

from paceline.errors import UsageError
from paceline.report.comparison import (
    Comparison,
    StrategyEntry,
    compare_results,
    label_results,
    mean_metric,
)
from paceline.report.machine_series import ClusterRecord, read_machines
from paceline.report.stats import Spread, group_by, interpolate, mean_and_std, mean_of
from paceline.telemetry.events import PHASES, StrategySwitched
from paceline.telemetry.reader import RunReader, read_run
from paceline.telemetry.result import UNFINISHED as UNFINISHED
from paceline.telemetry.result import result_from_events
from paceline.telemetry.schema import RunConfig, RunResult, as_finite, as_mapping


@dataclass(kw_only=True)
class ReportRun:
    """One run of a report; `result` is built from the events if there is no result.json."""

    name: str
    result: RunResult
    config: RunConfig = field(default_factory=RunConfig)
    missing: list[str] = field(default_factory=list)
    switch_times_s: dict[int, float] = field(default_factory=dict)
    cluster: ClusterRecord = field(default_factory=ClusterRecord)
    path: Path | None = None
    label: str = ""

    @property
    def status(self) -> str:
        return str(self.result.get("status"))

    @property
    def is_done(self) -> bool:
        return self.status == "done"

    @property
    def history(self) -> list[Mapping[str, Any]]:
        return rows_or_empty(self.result.get("history"))

    @property
    def switches(self) -> list[Mapping[str, Any]]:
        return rows_or_empty(self.result.get("switches"))

    @property
    def phases(self) -> dict[str, dict[str, float]]:
        return normalise_phases(self.result.get("phases"))

    @property
    def _first_epoch(self) -> int:
        """Added to epochs: 1 if the history counts them from 0."""
        return int(bool(self.history) and self.history[0].get("epoch") == 0)

    def list_points(self, measure: str) -> list[tuple[float, float, float]]:
        """Returns (epochs done, seconds since the start, value) for each epoch with the value."""
        points = []
        for number, row in enumerate(self.history, start=1):
            value, epoch = as_finite(row.get(measure)), as_finite(row.get("epoch"))
            if value is not None:
                done = number if epoch is None else epoch + self._first_epoch
                points.append((done, as_finite(row.get("seconds")) or 0.0, value))
        return points

    def locate_switch(self, switch: Mapping[str, Any]) -> tuple[float, float]:
        """Returns the epoch and the time of a switch; interpolated if its event is missing."""
        samples, rows = as_finite(switch.get("samples")) or 0.0, self.history
        seen, seconds, epochs = (
            [0.0, *(as_finite(row.get(name)) or 0.0 for row in rows)]
            for name in ("samples", "seconds", "epoch")
        )
        epochs[1:] = [epoch + self._first_epoch for epoch in epochs[1:]]
        at_s = self.switch_times_s.get(int(samples))
        if at_s is None:
            at_s = interpolate(seen, seconds, samples)
        return interpolate(seen, epochs, samples), at_s


def rows_or_empty(value: object) -> list[Mapping[str, Any]]:
    return [row for row in value if isinstance(row, Mapping)] if isinstance(value, list) else []


def normalise_phases(value: object) -> dict[str, dict[str, float]]:
    """Returns seconds per worker and time category, from any of the three known layouts.

    The layouts are `{worker: {...}}`, a list with one entry per worker, and one flat object.
    """
    if isinstance(value, list):
        items: Sequence[tuple[Any, Any]] = [
            (as_mapping(row).get("worker", number), row) for number, row in enumerate(value)
        ]
    elif isinstance(value, Mapping) and any(name in PHASES for name in value):
        items = [("all workers", value)]
    else:
        items = list(as_mapping(value).items())
    found = {}
    for name, row in items:
        known = {phase: as_finite(as_mapping(row).get(phase)) for phase in PHASES}
        seconds = {phase: number for phase, number in known.items() if number is not None}
        if seconds:
            worker = str(name)
            found[f"worker-{worker}" if worker.isdigit() else worker] = seconds
    return found


def load_runs(paths: Sequence[Path]) -> list[ReportRun]:
    """Loads the runs in and below the folders. Raises UsageError if a path contains none."""
    folders: list[Path] = []
    for path in paths:
        found = list(find_run_folders(Path(path)))
        if not found:
            raise UsageError(
                f"{path} contains no run; choose a run folder or a parent of run folders"
            )
        folders += [folder for folder in found if folder not in folders]
    runs = [
        load_run(folder, name) for folder, name in zip(folders, shorten_names(folders), strict=True)
    ]
    for run, label in zip(runs, label_results([run.result for run in runs]), strict=True):
        run.label = label
    return runs


def find_run_folders(path: Path) -> Iterator[Path]:
    if not path.is_dir():
        return
    if any((path / part).exists() for part in ("run.json", "result.json", "events")):
        yield path
        return
    order = read_order(path)
    for child in sorted(path.iterdir(), key=lambda p: (order.get(p.name, len(order)), p.name)):
        if child.is_dir() and not child.is_symlink() and not child.name.startswith("."):
            yield from find_run_folders(child)


def read_order(path: Path) -> dict[str, int]:
    """Returns the order of a matrix's runs: its first strategy is the baseline."""
    try:
        rows = json.loads((path / "matrix.json").read_text(encoding="utf-8"))["runs"]
        return {str(row["name"]): number for number, row in enumerate(rows)}
    except (OSError, ValueError, KeyError, TypeError):
        return {}


def shorten_names(folders: Sequence[Path]) -> list[str]:
    """Returns paths relative to the common parent, so that a report contains no local paths."""
    whole = [folder.resolve() for folder in folders]
    if len(whole) == 1:
        return [whole[0].name]
    shared = Path(commonpath(whole))
    return [str(path.relative_to(shared)) for path in whole]


def load_run(path: Path, name: str) -> ReportRun:
    """Reads one run folder; without a result.json the result is built from the events."""
    # Single steps are only needed to sum up time categories without totals.
    record = read_run(path, steps=RunReader(path).result is None)
    result, missing = record.result, record.missing
    if result is None:
        result = result_from_events(record)
        missing.append("without result.json, test accuracy and the totals of the run are unknown")
        missing += [
            f"events/{worker.process_name}.jsonl has no totals: its time categories are sums of "
            "recorded steps"
            for worker in record.workers
            if worker.ended is None
        ]
    result["dir"] = name
    switched = [event for event in record.events if isinstance(event, StrategySwitched)]
    return ReportRun(
        name=name,
        result=result,
        config=record.config,
        missing=missing,
        switch_times_s={event.row.samples: event.t for event in switched},
        cluster=read_machines(record),
        path=path,
    )


@dataclass(frozen=True)
class TimeToAccuracy:
    """Time, samples and updates until the runs of one strategy first reached the target."""

    label: str
    seconds: Spread
    samples: Spread
    updates: Spread
    reached: int
    runs: int


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

    def choose_target_accuracy(self) -> float | None:
        """Returns the highest multiple of 0.5% validation accuracy that all runs reached."""
        done = [run for run in self.runs if run.is_done]
        best = [mean_and_std(row.get("val_acc") for row in run.history)["max"] for run in done]
        known = [value for value in best if value is not None]
        if not known or len(known) < len(best):
            return None
        # Rounded to a readable target.
        return math.floor(min(known) * 200 + 1e-9) / 200

    def time_to_accuracy(self, target: float) -> list[TimeToAccuracy]:
        """Returns one row per strategy over finished runs; the others are only counted."""
        found = []
        for entry in self.entries:
            runs = self.done_runs_of(entry)
            rows = [row for run in runs if (row := first_row(run, target)) is not None]
            names = ("seconds", "samples", "updates")
            seconds, samples, updates = (mean_and_std(r.get(n) for r in rows) for n in names)
            times = TimeToAccuracy(entry["label"], seconds, samples, updates, len(rows), len(runs))
            found.append(times)
        return found

    def choose_measure(self) -> tuple[str, str]:
        """Returns key and name of test accuracy if it is known, or else of validation accuracy."""
        measures = {"test_acc": "test accuracy", "val_acc": "validation accuracy"}
        for measure, word in measures.items():
            if any(mean_metric(entry, measure) is not None for entry in self.entries):
                return measure, word
        return "test_acc", "test accuracy"

    def list_frontier_points(self) -> list[tuple[float, float, StrategyEntry]]:
        """Returns (seconds, accuracy, entry) of each strategy with both."""
        measure, _ = self.choose_measure()
        points = [(mean_metric(e, "seconds"), mean_metric(e, measure), e) for e in self.entries]
        return [(s, accuracy, e) for s, accuracy, e in points if s and accuracy is not None]

    def find_frontier(self) -> list[StrategyEntry]:
        """Returns the Pareto-optimal entries in time and accuracy, by mean."""
        front: list[StrategyEntry] = []
        best = -math.inf
        for _, accuracy, entry in sorted(self.list_frontier_points(), key=lambda p: (p[0], -p[1])):
            if accuracy > best:
                best = accuracy
                front.append(entry)
        return front


def split_tasks(runs: Sequence[ReportRun]) -> list[RunGroup]:
    """Returns one group per task of a matrix, or else per model and dataset."""
    return [make_task(name, group) for name, group in group_by(runs, name_task).items()]


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
    return group_by(runs, lambda run: run.label)


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
