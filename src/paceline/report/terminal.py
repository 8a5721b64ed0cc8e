"""Displays a run's events in the terminal."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator

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


@contextlib.contextmanager
def terminal_reporter(label: str, *, quiet: bool = False) -> Iterator[OnEvent]:
    """Yields a function that displays notices; closes the display at the end."""
    with contextlib.closing(Progress(label, quiet=quiet)) as progress:
        yield TerminalReporter(progress)


class TerminalReporter:
    """Translates notices into calls of `Progress`; ignores what a terminal does not show."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._last: tuple[float, int] | None = None

    def __call__(self, notice: RunNotice) -> None:
        progress = self._progress
        match notice:
            case RunProgress():
                progress.update(
                    epoch=notice.epoch + 1,
                    samples=notice.samples,
                    loss=notice.loss if notice.loss is not None else math.nan,
                    samples_per_s=self._rate(notice.t, notice.samples),
                )
            case RunLengthKnown(epochs=int(epochs), samples_per_epoch=int(samples)):
                progress.set_totals(epochs, samples)
            case EpochEnded():
                progress.epoch_row(notice.row)
            case StrategyStarted():
                progress.update(strategy=notice.strategy)
        line = self._describe(notice)
        if line is not None:
            progress.print_line(line)

    def _describe(self, notice: RunNotice) -> str | None:
        """Returns the permanent line of a notice; None for those without one."""
        match notice:
            case StrategyStarted():
                return f"strategy {notice.strategy} from sample {notice.samples}: {notice.lr}"
            case StrategySwitched(row=row):
                return (
                    f"switched {row.before} -> {row.after} at sample {row.samples} "
                    f"({row.reason}): pause {row.pause_s:.3f} s, drain {row.drain_s:.3f} s"
                )
            case SwitchDecided(row=row) if row.stays:  # A switch is printed when it has happened.
                return f"at sample {row.samples}: {row.reason}"
            case VerdictChanged(is_over=True):
                return f"resolved: {notice.text}"
            case VerdictChanged():
                return f"{notice.text}: {notice.suggestion}"
            case CollectivesNotice() if notice.path != "shared" and notice.reason:
                part = "some gradients" if notice.path == "partly shared" else "gradients"
                return f"shared memory not used for {part}: {notice.reason}"
            case ProcessOutput():
                return f"[{notice.process.replace('-', ' ')}] {notice.line}"
        return None

    def _rate(self, t: float, samples: int) -> float:
        before, self._last = self._last, (t, samples)
        if before is None or t <= before[0]:
            return 0.0
        return (samples - before[1]) / (t - before[0])
