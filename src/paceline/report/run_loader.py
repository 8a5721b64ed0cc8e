"""Loads run folders for a report: finished, failed, in progress or interrupted."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from os.path import commonpath
from pathlib import Path
from typing import Any

from paceline.errors import UsageError
from paceline.report.comparison import label_results
from paceline.report.stats import interpolate
from paceline.telemetry.events import PHASES, StrategySwitched
from paceline.telemetry.reader import STEP_EVENTS, RunReader, RunRecord
from paceline.telemetry.result import UNFINISHED, result_from_events
from paceline.telemetry.schema import RunConfig, RunResult, as_finite, as_mapping

__all__ = ["UNFINISHED", "ReportRun", "find_run_folders", "load_run", "load_runs"]


@dataclass(kw_only=True)
class ReportRun:
    """One run of a report; `result` is built from the events if there is no result.json."""

    name: str
    result: RunResult
    config: RunConfig = field(default_factory=RunConfig)
    missing: list[str] = field(default_factory=list)
    switch_times_s: dict[int, float] = field(default_factory=dict)
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

    def list_points(self, measure: str) -> list[tuple[float, float, float]]:
        """Returns (epochs done, seconds since the start, value) for each epoch with the value."""
        points = []
        rows = self.history
        offset = 1 if rows and rows[0].get("epoch") == 0 else 0
        for number, row in enumerate(rows, start=1):
            value = as_finite(row.get(measure))
            epoch = as_finite(row.get("epoch"))
            if value is not None:
                done = number if epoch is None else epoch + offset
                points.append((done, as_finite(row.get("seconds")) or 0.0, value))
        return points

    def locate_switch(self, switch: Mapping[str, Any]) -> tuple[float, float]:
        """Returns the epoch and the time of a switch; interpolated if its event is missing."""
        samples = as_finite(switch.get("samples")) or 0.0
        rows = self.history
        seen = [0.0, *(as_finite(row.get("samples")) or 0.0 for row in rows)]
        offset = 1 if rows and rows[0].get("epoch") == 0 else 0
        epochs = [0.0, *((as_finite(row.get("epoch")) or 0.0) + offset for row in rows)]
        seconds = [0.0, *(as_finite(row.get("seconds")) or 0.0 for row in rows)]
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
    """Loads every run in the folders; a folder that is not a run is searched recursively.

    Raises:
        UsageError: A path does not exist or contains no run.
    """
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
    reader = RunReader(path)
    result = reader.result
    if result is not None:
        reader.skip = STEP_EVENTS  # Only needed to sum up time categories without totals.
    record = RunRecord(path=path, config=reader.config, result=result)
    for process, event in reader.poll():
        record.add(process, event)
    missing = reader.missing + record.list_missing()
    if result is None:
        result = result_from_events(record)
        missing.append("without result.json, test accuracy and the totals of the run are unknown")
        for worker in record.workers:
            if worker.ended is None:
                missing.append(
                    f"events/{worker.process_name}.jsonl has no totals: its time categories are "
                    "sums of recorded steps"
                )
    result["dir"] = name
    switched = [event for event in record.events if isinstance(event, StrategySwitched)]
    return ReportRun(
        name=name,
        result=result,
        config=record.config,
        missing=missing,
        switch_times_s={event.row.samples: event.t for event in switched},
    )
