"""Exports a run's events as CSV files, for spreadsheets and data frames."""

from __future__ import annotations

import csv
import itertools
from collections.abc import Collection, Iterator
from dataclasses import fields
from pathlib import Path

from paceline.errors import UsageError
from paceline.telemetry.events import PHASES, SERVER_PHASES, EpochEnded, Event
from paceline.telemetry.reader import RunRecord, read_run

Row = dict[str, object]

GIL = ("lock_probes", "lock_held", "input_probes", "input_lock_held", "input_blocked")
SERVED = ("pushes", "pulls", "waiting", "queued_us", "apply_us")


def write_csv_files(folder: Path, out: Path) -> list[Path]:
    """Writes steps.csv, vitals.csv, machines.csv, epochs.csv and verdicts.csv, unless empty.

    Raises:
        UsageError: The folder has no events.
    """
    run = read_run(folder)
    if not run.processes:
        raise UsageError(f"{folder} has no events; choose the folder of a run")
    out.mkdir(parents=True, exist_ok=True)
    tables: dict[str, Iterator[Row]] = {
        "steps": steps(run),
        "vitals": metrics(run),
        "machines": (
            {"measured_by": process, **scalar_fields(event)}
            for process, events in run.hosts.items()
            for event in events
        ),
        "epochs": (e.row.to_plain() for e in run.events if isinstance(e, EpochEnded)),
        "verdicts": (scalar_fields(e, leave_out=("figures",)) for e in run.verdict_events),
    }
    written = []
    for name, rows in tables.items():
        first = next(rows, None)
        if first is not None:
            written.append(out / f"{name}.csv")
            with written[-1].open("w", newline="", encoding="utf-8") as file:
                # The first row names the columns.
                writer = csv.DictWriter(file, fieldnames=list(first), extrasaction="ignore")
                writer.writeheader()
                writer.writerows(itertools.chain([first], rows))
    return written


def steps(run: RunRecord) -> Iterator[Row]:
    for worker in run.workers:
        for step in worker.iter_steps():
            columns = {f.name: getattr(step, f.name) for f in fields(step)}
            number, began, ended = (columns.pop(name) for name in ("number", "began", "ended"))
            if not columns["pieces"]:
                del columns["pieces"]
            row = {"worker": worker.number, "step": number, **columns}
            yield {**row, "began": began, "ended": ended}


def metrics(run: RunRecord) -> Iterator[Row]:
    """Yields the metrics of all processes; time categories of servers have their own columns."""
    names = [f"phase_{n}_s" for n in dict.fromkeys((*PHASES, *SERVER_PHASES))]
    for process in run.processes.values():
        for event in process.metrics:
            phases = dict.fromkeys(names, 0.0)
            phases |= {f"phase_{n}_s": s for n, s in process.phase_seconds(event).items()}
            plain = scalar_fields(event, leave_out=("phases", "gil", "serving"))
            gil = dict.fromkeys(GIL, 0) | dict(zip(GIL, event.gil, strict=False))
            served = {name: (event.serving or {}).get(name, 0) for name in SERVED}
            yield {"process": process.process_name, **plain, **gil, **served, **phases}


def scalar_fields(event: Event, *, leave_out: Collection[str] = ()) -> Row:
    return {
        name: value
        for name, value in vars(event).items()
        if name not in leave_out and not isinstance(value, list | dict)
    }
