"""Builds the part of a result that the events of an unfinished run contain."""

from __future__ import annotations

import functools

from paceline.telemetry.events import (
    STEP_PHASES,
    EpochEnded,
    EpochRow,
    Event,
    RunEnded,
    RunProgress,
    RunStarted,
    StrategySwitched,
    SwitchRow,
    WorkerEnded,
)
from paceline.telemetry.reader import ProcessRecord, RunRecord
from paceline.telemetry.schema import RunResult
from paceline.telemetry.steps import window_seconds

UNFINISHED = "unfinished"
"""Status of a run without a result.json: interrupted, or still in progress."""


def result_from_events(record: RunRecord) -> RunResult:
    """Returns the status, totals, history, switches and time categories found in the events."""
    config = record.config
    job = config.get("job") or {}
    result: RunResult = {"status": UNFINISHED, "error": None, "labels": config.get("labels") or {}}
    asked = {**job, **config}
    for name in ("strategy", "model", "data", "workers", "servers", "seed", "batch"):
        if isinstance(asked.get(name), str | int):
            result[name] = asked[name]
    collected = _Collected(result)
    for event in record.events:
        collected.add(event)
        result["seconds"] = event.t
    result["history"] = [row.to_plain() for row in collected.rows.values()]
    result["switches"] = [row.to_plain() for row in collected.switches.values()]
    phases = {w.process_name: worker_phases(w) for w in record.workers}
    result["phases"] = {name: seconds for name, seconds in phases.items() if any(seconds.values())}
    return result


class _Collected:
    """Rows by epoch and by samples, because a resumed run repeats what it lost."""

    def __init__(self, result: RunResult) -> None:
        self.result = result
        self.rows: dict[int, EpochRow] = {}
        self.switches: dict[int, SwitchRow] = {}

    @functools.singledispatchmethod
    def add(self, event: Event) -> None:
        """Other events do not contribute to a result."""

    @add.register
    def _(self, event: RunStarted) -> None:
        self.result["strategy"] = event.strategy
        self.result["workers"] = event.workers
        self.result["servers"] = event.servers

    @add.register
    def _(self, event: RunProgress) -> None:
        self.result["samples"], self.result["updates"] = event.samples, event.updates

    @add.register
    def _(self, event: EpochEnded) -> None:
        row = event.row
        self.rows[row.epoch] = row
        self.result["samples"], self.result["updates"] = row.samples, row.updates
        self.result["train_loss"], self.result["train_acc"] = row.train_loss, row.train_acc
        self.result["val_loss"], self.result["val_acc"] = row.val_loss, row.val_acc

    @add.register
    def _(self, event: StrategySwitched) -> None:
        self.switches[event.row.samples] = event.row

    @add.register
    def _(self, event: RunEnded) -> None:
        # Ended well but without result.json is not done: its final metrics are missing.
        if event.status != "done":
            self.result["status"], self.result["error"] = event.status, event.error


def worker_phases(worker: ProcessRecord) -> dict[str, float]:
    """Returns a worker's totals by time category; without totals, sums of its recorded steps."""
    if isinstance(worker.ended, WorkerEnded):
        return dict(worker.ended.phases)
    sums = dict.fromkeys(STEP_PHASES, 0.0)
    for window in worker.steps:
        for name, seconds in window_seconds(window).items():
            sums[name] += seconds
    return sums
