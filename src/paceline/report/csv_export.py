"""Exports a run's events as CSV files, for spreadsheets and data frames."""

from __future__ import annotations

import csv
from collections.abc import Collection, Iterable, Iterator
from dataclasses import fields
from pathlib import Path

from paceline.errors import UsageError
from paceline.telemetry.events import PHASES, SERVER_PHASES, EpochEnded, Event, ProcessMetrics
from paceline.telemetry.reader import RunRecord, read_run

Row = dict[str, object]


def write_csv_files(folder: Path, out: Path) -> list[Path]:
    """Writes steps.csv, vitals.csv, machines.csv, epochs.csv and verdicts.csv, unless empty.

    Raises:
        UsageError: The folder has no events.
    """
    run = read_run(folder)
    if not run.processes:
        raise UsageError(f"{folder} has no events; choose the folder of a run")
    out.mkdir(parents=True, exist_ok=True)
    tables = {
        "steps": steps(run),
        "vitals": metrics(run),
        "machines": hosts(run),
        "epochs": epochs(run),
        "verdicts": verdict_rows(run),
    }
    written = []
    for name, rows in tables.items():
        path = out / f"{name}.csv"
        if write_rows(path, rows):
            written.append(path)
    return written


def write_rows(path: Path, rows: Iterable[Row]) -> bool:
    """Writes the rows; the first one names the columns. Returns False if there are none."""
    iterator = iter(rows)
    first = next(iterator, None)
    if first is None:
        return False
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, fieldnames=list(first), extrasaction="ignore")
        writer.writeheader()
        writer.writerow(first)
        writer.writerows(iterator)
    return True


def steps(run: RunRecord) -> Iterator[Row]:
    for worker in run.workers:
        for step in worker.iter_steps():
            columns = {f.name: getattr(step, f.name) for f in fields(step)}
            number, began, ended = (columns.pop(name) for name in ("number", "began", "ended"))
            if not columns["pieces"]:
                del columns["pieces"]
            yield {
                "worker": worker.number, "step": number, **columns, "began": began, "ended": ended
            }  # fmt: skip


def metrics(run: RunRecord) -> Iterator[Row]:
    """Yields the metrics of all processes; time categories of servers have their own columns."""
    names = [f"phase_{n}_s" for n in dict.fromkeys((*PHASES, *SERVER_PHASES))]
    for process in run.processes.values():
        for event in process.metrics:
            phases = dict.fromkeys(names, 0.0)
            phases |= {f"phase_{n}_s": s for n, s in process.phase_seconds(event).items()}
            yield {"process": process.process_name, **_flat(event), **phases}


def _flat(event: ProcessMetrics) -> Row:
    plain = scalar_fields(event, leave_out=("phases", "gil", "serving"))
    gil = dict(zip(GIL, event.gil, strict=False))
    served = event.serving or {}
    return {**plain, **dict.fromkeys(GIL, 0), **gil, **{k: served.get(k, 0) for k in SERVED}}


GIL = ("lock_probes", "lock_held", "input_probes", "input_lock_held", "input_blocked")
SERVED = ("pushes", "pulls", "waiting", "queued_us", "apply_us")


def scalar_fields(event: Event, *, leave_out: Collection[str] = ()) -> Row:
    return {
        name: value
        for name, value in vars(event).items()
        if name not in leave_out and not isinstance(value, list | dict)
    }


def hosts(run: RunRecord) -> Iterator[Row]:
    for process, events in run.hosts.items():
        for event in events:
            yield {"measured_by": process, **scalar_fields(event)}


def epochs(run: RunRecord) -> Iterator[Row]:
    for event in run.events:
        if isinstance(event, EpochEnded):
            yield event.row.to_plain()


def verdict_rows(run: RunRecord) -> Iterator[Row]:
    for event in run.verdict_events:
        yield scalar_fields(event, leave_out=("figures",))
