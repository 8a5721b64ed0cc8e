"""Displays a run's events in the terminal."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from contextlib import contextmanager

from paceline.report.progress import Progress
from paceline.telemetry.event_log import CollectivesNotice, OnEvent, ProcessOutput, RunNotice
from paceline.telemetry.events import (
    EpochEnded,
    RunLengthKnown,
    RunProgress,
    StrategyStarted,
    StrategySwitched,
    SwitchDecided,
    VerdictChanged,
)


@contextmanager
def terminal_reporter(label: str, *, quiet: bool = False) -> Iterator[OnEvent]:
    """Yields a function that displays notices; closes the display at the end."""
    with Progress(label, quiet=quiet) as progress:
        yield TerminalReporter(progress)


class TerminalReporter:
    """Translates notices into calls of `Progress`; ignores what a terminal does not show."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._last: tuple[float, int] | None = None

    def __call__(self, notice: RunNotice) -> None:
        self._show(notice)

    @functools.singledispatchmethod
    def _show(self, notice: RunNotice) -> None:
        """Checkpoints, run start and end, and everything else have no line of their own."""

    @_show.register
    def _(self, event: RunLengthKnown) -> None:
        if event.epochs is not None and event.samples_per_epoch is not None:
            self._progress.set_totals(event.epochs, event.samples_per_epoch)

    @_show.register
    def _(self, event: RunProgress) -> None:
        self._progress.update(
            epoch=event.epoch + 1,
            samples=event.samples,
            updates=event.updates,
            loss=event.loss if event.loss is not None else math.nan,
            samples_per_s=self._rate(event.t, event.samples),
        )

    @_show.register
    def _(self, event: EpochEnded) -> None:
        self._progress.epoch_row(event.row)

    @_show.register
    def _(self, event: StrategyStarted) -> None:
        self._progress.update(strategy=event.strategy)
        self._progress.print_line(
            f"strategy {event.strategy} from sample {event.samples}: {event.lr}"
        )

    @_show.register
    def _(self, event: StrategySwitched) -> None:
        row = event.row
        self._progress.print_line(
            f"switched {row.before} -> {row.after} at sample {row.samples} "
            f"({row.reason}): pause {row.pause_s:.3f} s, drain {row.drain_s:.3f} s"
        )

    @_show.register
    def _(self, event: SwitchDecided) -> None:
        if event.row.stays:  # A switch is printed when it has happened.
            self._progress.print_line(f"at sample {event.row.samples}: {event.row.reason}")

    @_show.register
    def _(self, event: VerdictChanged) -> None:
        if event.is_over:
            self._progress.print_line(f"resolved: {event.text}")
        else:
            self._progress.print_line(f"{event.text}: {event.suggestion}")

    @_show.register
    def _(self, notice: CollectivesNotice) -> None:
        if notice.path == "shared" or not notice.reason:
            return
        part = "some gradients" if notice.path == "partly shared" else "gradients"
        self._progress.print_line(f"shared memory not used for {part}: {notice.reason}")

    @_show.register
    def _(self, notice: ProcessOutput) -> None:
        self._progress.print_line(f"[{notice.process.replace('-', ' ')}] {notice.line}")

    def _rate(self, t: float, samples: int) -> float:
        before, self._last = self._last, (t, samples)
        if before is None or t <= before[0]:
            return 0.0
        return (samples - before[1]) / (t - before[0])
