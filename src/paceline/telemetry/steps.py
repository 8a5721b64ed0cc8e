"""Single steps and time categories, taken from events."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from paceline.telemetry.events import (
    PHASES,
    SERVER_PHASES,
    STEP_PHASES,
    ProcessMetrics,
    StepSummary,
    StepWindow,
)


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One step of a worker; time categories in microseconds, `began` and `ended` in seconds."""

    number: int
    began: float
    ended: float
    epoch: int
    start: int
    lo: int
    hi: int
    loss: float | None
    staleness: int
    input: int
    forward: int
    backward: int
    comm_exposed: int
    optimizer: int
    wait: int
    queue: int
    comm_hidden: int
    pieces: list[list[int]]

    @property
    def samples(self) -> int:
        return self.hi - self.lo

    @property
    def compute_s(self) -> float:
        """Seconds of input, forward and backward."""
        return (self.input + self.forward + self.backward) / 1e6


def steps_of_window(window: StepWindow) -> Iterator[StepRecord]:
    """Yields the steps of a window; columns that an older version did not write are filled."""
    nothing: list[list[int]] = []
    columns: list[Iterable[object]] = [
        window.epoch, window.start, window.lo, window.hi,
        window.loss or itertools.repeat(None), window.staleness or itertools.repeat(-1),
        *(getattr(window, name) or itertools.repeat(0) for name in STEP_PHASES),
        window.comm_hidden or itertools.repeat(-1), window.pieces or itertools.repeat(nothing),
    ]  # fmt: skip
    began_s = window.began or window.t
    before = began_s
    rows = zip(window.end or itertools.repeat(0), *columns, strict=False)
    for index, (end_us, *values) in enumerate(rows):
        ended = began_s + end_us / 1e6
        yield StepRecord(window.first_step + index, before, ended, *values)
        before = ended


def window_seconds(window: StepWindow | StepSummary) -> dict[str, float]:
    """Returns the seconds by time category of a window of steps, single or summed."""
    if isinstance(window, StepSummary):
        return {name: window.phases_us.get(name, 0) / 1e6 for name in STEP_PHASES}
    return {name: sum(getattr(window, name)) / 1e6 for name in STEP_PHASES}


def phase_names(process: str) -> tuple[str, ...]:
    return SERVER_PHASES if process.startswith("server-") else PHASES


def phase_seconds(process: str, event: ProcessMetrics) -> dict[str, float]:
    """Returns the seconds by time category of one metrics event."""
    return {n: us / 1e6 for n, us in zip(phase_names(process), event.phases, strict=False)}
