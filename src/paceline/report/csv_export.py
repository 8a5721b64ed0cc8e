"""A run's events as CSV files, for spreadsheets and data frames."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from paceline.errors import UsageError
from paceline.telemetry.events import PHASES, SERVER_PHASES
from paceline.telemetry.reader import ProcessRecord, RunRecord, read_run


def write_csv_files(folder: Path, out: Path) -> list[Path]:
    """steps.csv, vitals.csv, machines.csv, epochs.csv and verdicts.csv, as far as there is any."""
    run = read_run(folder)
    if not run.processes:
        raise UsageError(f"{folder} holds no events: name the folder of a run")
    out.mkdir(parents=True, exist_ok=True)
    tables = {
        "steps": steps(run),
        "vitals": vitals(run),
        "machines": machines(run),
        "epochs": (e["row"] for e in run.events if e.get("kind") == "epoch"),
        "verdicts": verdict_rows(run),
    }
    written = []
    for name, rows in tables.items():
        path = out / f"{name}.csv"
        if write_rows(path, rows):
            written.append(path)
    return written


def write_rows(path: Path, rows: Iterable[dict[str, Any]]) -> bool:
    """The first row names the columns; a file is only written if there is one."""
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


def steps(run: RunRecord) -> Iterator[dict[str, Any]]:
    for worker in run.workers:
        for step in worker.iter_steps():
            named = {"worker": worker.number, "step": step.pop("number")}
            yield {**named, **{k: v for k, v in step.items() if k != "end"}}


def vitals(run: RunRecord) -> Iterator[dict[str, Any]]:
    """All processes in one table: a server's phases have columns of their own."""
    names = [f"phase_{n}_s" for n in dict.fromkeys((*PHASES, *SERVER_PHASES))]
    for process in run.processes.values():
        for event in process.vitals:
            phases = dict.fromkeys(names, 0.0)
            phases |= {f"phase_{n}_s": s for n, s in process.phase_seconds(event).items()}
            yield {"process": process.process_name, **_flat(process, event), **phases}


def _flat(process: ProcessRecord, event: dict[str, Any]) -> dict[str, Any]:
    plain = {k: v for k, v in event.items() if k not in ("kind", "phases", "gil", "serving")}
    gil = dict(zip(GIL, event.get("gil") or (), strict=False))
    served = event.get("serving") or {}
    return {**plain, **dict.fromkeys(GIL, 0), **gil, **{k: served.get(k, 0) for k in SERVED}}


GIL = ("lock_probes", "lock_held", "input_probes", "input_lock_held", "input_blocked")
SERVED = ("pushes", "pulls", "waiting", "queued_us", "apply_us")


def machines(run: RunRecord) -> Iterator[dict[str, Any]]:
    for who, events in run.machines.items():
        for event in events:
            plain = {k: v for k, v in event.items() if not isinstance(v, list | dict)}
            yield {"measured_by": who, **{k: v for k, v in plain.items() if k != "kind"}}


def verdict_rows(run: RunRecord) -> Iterator[dict[str, Any]]:
    for event in run.verdict_events:
        yield {k: event[k] for k in ("t", "state", "rule", "who", "text", "suggestion")}
