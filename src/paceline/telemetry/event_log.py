"""Writes the coordinator's events to the run folder and passes them on for display."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from paceline.telemetry.events import Event, RunEnded, RunStarted
from paceline.telemetry.run_folder import EventWriter


@dataclass(frozen=True, kw_only=True)
class ProcessOutput:
    """A line printed by a process. Displayed and logged, but not an event of the run."""

    process: str
    line: str


@dataclass(frozen=True, kw_only=True)
class CollectivesNotice:
    """Transport of the collectives, and the reason if shared memory was not used. Display only."""

    path: str
    """`shared`, `partly shared`, or another transport."""
    reason: str


RunNotice = Event | ProcessOutput | CollectivesNotice
"""Anything that a display receives while a run is in progress."""

OnEvent = Callable[[RunNotice], None]


def ignore_notice(notice: RunNotice) -> None:
    """The default display: shows nothing."""


@dataclass(frozen=True)
class EventLog:
    """Appends events to run.jsonl; every notice also goes to `on_event`."""

    writer: EventWriter
    on_event: OnEvent

    def started(self, *, strategy: str, workers: int, servers: int) -> None:
        self.writer.write(RunStarted(t=0.0, strategy=strategy, workers=workers, servers=servers))

    def record(self, notice: RunNotice) -> None:
        if isinstance(notice, Event):
            self.writer.write(notice)
        self.on_event(notice)

    def ended(self, status: str, error: str | None, seconds: float) -> None:
        self.record(RunEnded(t=round(seconds, 6), status=status, error=error))
