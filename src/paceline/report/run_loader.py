"""Reading run folders for a report: whole, failed, still going or cut off anywhere.

What result.json cannot say is taken from the events, and what is missing is said in words.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from os.path import commonpath
from pathlib import Path
from typing import Any

from paceline.errors import UsageError
from paceline.report.comparison import as_mapping, label_results
from paceline.report.stats import as_finite, interpolate
from paceline.telemetry.events import PHASES, STEP_PHASES
from paceline.telemetry.run_folder import RunFolder, read_events

UNFINISHED = "unfinished"
"""The status of a run without a result.json: cut off, or still going."""


@dataclass(kw_only=True)
class ReportRun:
    """One run as the report sees it; `result` is rebuilt from the events if there is none."""

    name: str
    result: dict[str, Any]
    config: dict[str, Any] = field(default_factory=dict)
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
        """(epochs done, seconds since the run began, value) for each epoch that has the value."""
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
        """Where a switch lies in epochs and in seconds; its event's time, else interpolated."""
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
    """Seconds per worker and phase, from `{worker: {...}}`, a list a worker, or one flat dict."""
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
    """Read every run in the folders; a folder that is no run is searched for runs below it.

    UsageError if a path does not exist or no run is found in it.
    """
    folders: list[Path] = []
    for path in paths:
        found = list(find_run_folders(Path(path)))
        if not found:
            raise UsageError(f"{path} holds no run: name a run's folder, or one with runs below it")
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
    """The places of a matrix's runs: its first strategy is the one that others stand against."""
    try:
        rows = json.loads((path / "matrix.json").read_text(encoding="utf-8"))["runs"]
        return {str(row["name"]): number for number, row in enumerate(rows)}
    except (OSError, ValueError, KeyError, TypeError):
        return {}


def shorten_names(folders: Sequence[Path]) -> list[str]:
    """Names without what all folders share: a report travels, its machine's paths do not."""
    whole = [folder.resolve() for folder in folders]
    if len(whole) == 1:
        return [whole[0].name]
    shared = Path(commonpath(whole))
    return [str(path.relative_to(shared)) for path in whole]


def load_run(path: Path, name: str) -> ReportRun:
    folder = RunFolder(path)
    missing: list[str] = []
    config = read_object(folder.config, missing)
    result = read_object(folder.result, missing)
    events = read_known_events(folder, "run", missing)
    has_result = bool(result)
    if not has_result:
        result = result_from_events(events, config)
        note_missing_end(events, missing)
    for who in folder.workers_with_events():
        of_worker = read_known_events(folder, who, missing)
        if not has_result:
            phases_from_events(result, who, of_worker, missing)
    result["dir"] = name
    times = {
        int(as_finite(as_mapping(e.get("row")).get("samples")) or 0): as_finite(e.get("t"))
        for e in events
        if e.get("kind") == "switch"
    }
    return ReportRun(
        name=name,
        result=result,
        config=config,
        missing=missing,
        switch_times_s={samples: t for samples, t in times.items() if t is not None},
    )


def read_object(path: Path, missing: list[str]) -> dict[str, Any]:
    """The JSON object in a file, or an empty one with a word on why."""
    try:
        value = json.loads(path.read_text(encoding="utf-8", errors="replace"))
    except FileNotFoundError:
        missing.append(f"{path.name} is missing")
        return {}
    except (OSError, ValueError):
        missing.append(f"{path.name} is cut off or not readable")
        return {}
    if not isinstance(value, dict) or not value:
        missing.append(f"{path.name} holds nothing")
        return {}
    return value


def read_known_events(folder: RunFolder, who: str, missing: list[str]) -> list[dict[str, Any]]:
    """The whole events of a file; a torn end is said, not fatal."""
    path = folder.events(who)
    shown = f"events/{path.name}"
    if not path.exists():
        missing.append(f"{shown} is missing")
        return []
    events = list(read_events(path))
    with path.open("rb") as file:
        lines = sum(1 for line in file if line.strip())
    if len(events) < lines:
        end = f" at {as_finite(events[-1].get('t')) or 0.0:.1f} s" if events else ""
        missing.append(f"{shown} is cut off after {len(events)} whole events{end}")
    elif not events:
        missing.append(f"{shown} is empty")
    return events


def result_from_events(events: list[dict[str, Any]], config: dict[str, Any]) -> dict[str, Any]:
    """As much of a result as the coordinator's events tell."""
    result: dict[str, Any] = {"status": UNFINISHED, "error": None}
    asked = {**as_mapping(config.get("job")), **config}
    for name in ("strategy", "model", "data", "workers", "servers", "seed", "batch"):
        if isinstance(asked.get(name), str | int):
            result[name] = asked[name]
    result["labels"] = dict(as_mapping(config.get("labels")))
    # By epoch and by samples: a resumed run tells again what it lost at the cut.
    rows: dict[Any, dict[str, Any]] = {}
    switches: dict[Any, dict[str, Any]] = {}
    for event in events:
        kind, row = event.get("kind"), dict(as_mapping(event.get("row")))
        if kind == "started":
            result.update({k: event[k] for k in ("strategy", "workers", "servers") if k in event})
        elif kind == "progress":
            result.update({k: event.get(k) for k in ("samples", "updates")})
        elif kind == "epoch":
            rows[row.get("epoch")] = row
            result.update({k: row[k] for k in ("samples", "updates") if k in row})
            result.update({k: v for k, v in row.items() if k.startswith(("train_", "val_"))})
        elif kind == "switch":
            switches[row.get("samples")] = row
        elif kind == "ended" and event.get("status") != "done":
            # Ended well but without a result is not done: the figures that count are not there.
            result["status"], result["error"] = event.get("status"), event.get("error")
        result["seconds"] = as_finite(event.get("t"))
    result["history"], result["switches"] = list(rows.values()), list(switches.values())
    return result


def note_missing_end(events: list[dict[str, Any]], missing: list[str]) -> None:
    missing.append("test accuracy and the totals of the run are missing with result.json")
    if events and events[-1].get("kind") != "ended":
        missing.append(
            f"the run's events stop at {as_finite(events[-1].get('t')) or 0.0:.1f} s without its "
            "end: the run was cut off or is still going"
        )


def phases_from_events(
    result: dict[str, Any], who: str, events: list[dict[str, Any]], missing: list[str]
) -> None:
    """Add a worker's phases: its own totals, or the sum of the steps that it recorded."""
    if events and events[-1].get("kind") == "worker_ended":
        phases = dict(as_mapping(events[-1].get("phases")))
    else:
        missing.append(f"events/{who}.jsonl has no totals: phases are the sum of recorded steps")
        phases = dict.fromkeys(STEP_PHASES, 0.0)
        for event in events:
            summed = as_mapping(event.get("phases_us"))
            for phase in STEP_PHASES:
                column = event.get(phase)
                steps_us = column if isinstance(column, list) else [summed.get(phase, 0)]
                phases[phase] += sum(as_finite(us) or 0.0 for us in steps_us) / 1e6
    if any(phases.values()):
        result.setdefault("phases", {})[who] = phases
