"""Progress of a run or of a matrix: live lines on a terminal, a few plain lines elsewhere."""

import contextlib
import math
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, TextColumn
from rich.progress import Progress as Bars
from rich.table import Column
from rich.text import Text

from paceline.report.event_text import describe_notice
from paceline.report.number_format import (
    format_duration,
    format_number,
    format_percent,
    format_seconds,
    to_single_line,
)
from paceline.report.stats import RecentRate
from paceline.telemetry import events as ev
from paceline.telemetry.run_folder import OnEvent, RunNotice
from paceline.telemetry.schema import as_finite

PLAIN_INTERVAL_S = 5.0
MATRIX_INTERVAL_S = 30.0
ROW_INTERVAL_S = 2.0
"""Minimum time between two lines for epochs in a log."""

Size = tuple[str, str, int]
"""Model, data and epochs of a run, from which its time is estimated."""


class LiveLines:
    """Lines with a bar, redrawn on a terminal (default: stderr); none elsewhere or if `quiet`."""

    def __init__(
        self, *, quiet: bool, console: Console | None, clock: Callable[[], float], bar_width: int
    ) -> None:
        self._clock = clock
        self._quiet = quiet
        # Explicit, because rich would treat FORCE_COLOR as a terminal and write control codes.
        self._console = console or Console(stderr=True, force_terminal=sys.stderr.isatty())
        self._last_plain_s = clock()
        self._bars: Bars | None = None
        if not quiet and self._console.is_interactive:
            # Always one line each: truncated, never wrapped.
            one_line = Column(no_wrap=True, overflow="ellipsis", ratio=1)
            self._bars = Bars(
                TextColumn("{task.fields[label]}", markup=False),
                BarColumn(bar_width=bar_width),
                TextColumn("{task.fields[facts]}", markup=False, table_column=one_line),
                console=self._console,
                expand=True,
            )
            self._add_lines(self._bars)
            self._bars.start()

    def _add_lines(self, bars: Bars) -> None:
        raise NotImplementedError

    def _redraw(self) -> None:
        """Updates the live lines, if there are any."""
        raise NotImplementedError

    def _print(self, line: str) -> None:
        if not self._quiet:
            # Soft wrap: a log line stays one line, whatever width rich assumes.
            self._console.print(Text(to_single_line(line)), soft_wrap=True)

    def close(self) -> None:
        """Stops the live lines; may be called twice."""
        self._redraw()
        if self._bars is not None:
            self._bars.stop()
            self._bars = None
        self._quiet = True


class Progress(LiveLines):
    """Shows the progress of a run; omits what is unknown.

    On a terminal there is one live line; elsewhere one plain line per epoch and at most one more
    every 5 s, without control characters. `quiet` shows nothing.
    """

    def __init__(
        self,
        label: str,
        *,
        epochs: int | None = None,
        samples_total: int | None = None,
        quiet: bool = False,
        console: Console | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._label = to_single_line(label)
        self._epochs = epochs
        self._samples_total = samples_total
        self._facts: dict[str, Any] = {}
        self._val_acc: float | None = None
        self._rate = RecentRate()
        self._last: tuple[float, int] = (math.inf, 0)
        self._last_row_s = -ROW_INTERVAL_S
        super().__init__(quiet=quiet, console=console, clock=clock, bar_width=20)

    def show(self, notice: RunNotice) -> None:
        """Displays a notice; ignores what a terminal does not show."""
        match notice:
            case ev.RunProgress(t=t, samples=samples):
                before, seen = self._last
                self.update(
                    # The last report comes after the last epoch.
                    epoch=min(notice.epoch, (self._epochs or notice.epoch + 1) - 1) + 1,
                    samples=samples,
                    loss=notice.loss,
                    samples_per_s=(samples - seen) / (t - before) if t > before else 0.0,
                )
                self._last = t, samples
            case ev.RunLengthKnown(epochs=int(epochs), samples_per_epoch=int(samples)):
                self.set_totals(epochs, samples)
            case ev.EpochEnded():
                self.epoch_row(notice.row)
            case ev.StrategyStarted():
                self.update(strategy=notice.strategy)
        line = describe_notice(notice)
        if line is not None:
            self.print_line(line)

    def set_totals(self, epochs: int, samples_per_epoch: int) -> None:
        """Sets the length of the run, once it is known."""
        self._epochs = epochs
        self._samples_total = epochs * samples_per_epoch
        self._redraw()

    def update(
        self,
        epoch: int | None = None,
        samples: int | None = None,
        loss: float | None = None,
        strategy: str | None = None,
        samples_per_s: float | None = None,
    ) -> None:
        """Sets the totals so far; None keeps the last value."""
        given = {"epoch": epoch, "samples": samples, "loss": loss, "strategy": strategy}
        given["samples_per_s"] = samples_per_s
        self._facts |= {name: fact for name, fact in given.items() if fact is not None}
        now = self._clock()
        if samples is not None:
            self._rate.add(now, samples)
        self._redraw()
        if self._bars is None and now - self._last_plain_s >= PLAIN_INTERVAL_S:
            self._last_plain_s = now
            self.print_line(self.describe())

    def epoch_row(self, row: ev.EpochRow) -> None:
        accuracy = as_finite(row.val_acc)
        if accuracy is not None:
            self._val_acc = accuracy
        self._redraw()
        now = self._clock()
        is_due = now - self._last_row_s >= ROW_INTERVAL_S or row.epoch == self._epochs
        if self._bars is None and is_due:
            self._last_row_s = now
            self.print_line(self._describe_row(row))

    def print_line(self, text: str) -> None:
        """Prints a permanent line above the live line."""
        self._print(f"{self._label}: {text}")

    def estimate_left_s(self) -> float | None:
        """Returns the seconds left at the recent rate; None if unknown."""
        samples = self._facts.get("samples")
        if self._samples_total is None or samples is None:
            return None
        left = max(0, self._samples_total - samples)
        rate = self._rate.per_second or as_finite(self._facts.get("samples_per_s"))
        if left == 0:
            return 0.0
        return left / rate if rate else None

    def describe(self) -> str:
        facts, left_s = self._facts, self.estimate_left_s()
        rate, loss = facts.get("samples_per_s"), facts.get("loss")
        parts = [
            self._describe_epoch(facts["epoch"]) if "epoch" in facts else None,
            None if rate is None else f"{format_number(rate)} samples/s",
            None if loss is None else f"loss {loss:.4g}",
            None if self._val_acc is None else f"val acc {format_percent(self._val_acc)}",
            None if left_s is None else f"{format_duration(left_s)} left",
            facts.get("strategy"),
        ]
        return to_single_line(", ".join(filter(None, parts))) or "starting"

    def _describe_epoch(self, epoch: int) -> str:
        return f"epoch {epoch}" + (f"/{self._epochs}" if self._epochs else "")

    def _describe_row(self, row: ev.EpochRow) -> str:
        losses, accuracies = ("train_loss", "val_loss"), ("train_acc", "val_acc")
        known = {name: as_finite(row.value(name)) for name in (*losses, *accuracies, "lr")}
        texts = {name: f"{x:.4g}" for name, x in known.items() if x is not None}
        texts |= {name: format_percent(known[name]) for name in accuracies if name in texts}
        left_s = self.estimate_left_s()
        parts = [
            self._describe_epoch(row.epoch),
            f"after {format_seconds(row.seconds)}" if row.seconds > 0 else None,
            *(f"{name.replace('_', ' ')} {text}" for name, text in texts.items()),
            f"{format_duration(left_s)} left" if left_s else None,
            self._facts.get("strategy"),
        ]
        return ", ".join(filter(None, parts))

    def _add_lines(self, bars: Bars) -> None:
        self._task = bars.add_task("", total=None, label=self._label, facts="starting")

    def _redraw(self) -> None:
        if self._bars is not None:
            self._bars.update(
                self._task,
                total=self._samples_total,
                completed=self._facts.get("samples", 0),
                facts=self.describe(),
            )


@contextlib.contextmanager
def terminal_reporter(label: str, *, quiet: bool = False) -> Iterator[OnEvent]:
    """Yields a function that displays notices; closes the display at the end."""
    with contextlib.closing(Progress(label, quiet=quiet)) as progress:
        yield progress.show


class MatrixProgress(LiveLines):
    """Shows runs done, the current run, and the time left: two live lines, or plain lines."""

    def __init__(
        self,
        title: str,
        sizes: Mapping[str, Size],
        *,
        quiet: bool = False,
        console: Console | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._title = to_single_line(title)
        self._sizes = dict(sizes)
        self._ended: dict[str, bool] = {}
        """Runs that ended, and whether they are done."""
        self._times: list[tuple[Size, float]] = []
        self._now: str | None = None
        self._began_s = clock()
        self._total = self._seen = 0
        self._facts = ""
        super().__init__(quiet=quiet, console=console, clock=clock, bar_width=24)

    def begin(self, name: str) -> None:
        self._now, self._began_s = name, self._clock()
        self._total = self._seen = 0
        self._facts = "starting"
        self._redraw()

    def show(self, notice: RunNotice) -> None:
        if isinstance(notice, ev.RunLengthKnown):
            self._total = (notice.epochs or 0) * (notice.samples_per_epoch or 0)
        elif isinstance(notice, ev.RunProgress):
            self._seen = notice.samples
            self._facts = f"epoch {notice.epoch + 1}, {format_number(self._seen)} samples"
        elif isinstance(notice, ev.StrategySwitched):
            self._facts = f"switched {notice.row.before} -> {notice.row.after}"
        else:
            return
        self._redraw()
        if self._bars is None and self._clock() - self._last_plain_s >= MATRIX_INTERVAL_S:
            self._print_plain(f"{self._now}: {self._facts}")

    def end(self, name: str, result: Mapping[str, Any]) -> None:
        seconds = self._clock() - self._began_s
        self._ended[name] = result.get("status") == "done"
        if self._ended[name]:
            self._times.append((self._sizes[name], seconds))
        self._print_plain(f"{name}: {describe_result(result)} ({self.describe()})")
        self._now = None
        self._redraw()

    def skip(self, name: str, result: Mapping[str, Any]) -> None:
        """Counts a run that already has a result."""
        self._ended[name] = result.get("status") == "done"
        self._redraw()

    def describe(self) -> str:
        parts = [f"{len(self._ended)} of {len(self._sizes)}"]
        if failed := list(self._ended.values()).count(False):
            parts.append(f"{failed} failed")
        left = self.estimate_left_s()
        if left is not None and len(self._ended) < len(self._sizes):
            parts.append(f"about {format_duration(left)} left")
        return ", ".join(parts)

    def estimate_left_s(self) -> float | None:
        """Estimates from the time per epoch of the same model and data, or else of any run."""
        if not self._times:
            return None
        rates: dict[tuple[str, str], list[float]] = {}
        for (model, data, epochs), seconds in self._times:
            rates.setdefault((model, data), []).append(seconds / epochs)
        every = [rate for group in rates.values() for rate in group]
        left = 0.0
        for name in self._sizes.keys() - self._ended.keys():
            model, data, epochs = self._sizes[name]
            group = rates.get((model, data), every)
            left += epochs * sum(group) / len(group)
        if self._now is not None and self._now not in self._ended:
            left -= self._clock() - self._began_s
        return max(0.0, left)

    def _add_lines(self, bars: Bars) -> None:
        self._whole = bars.add_task("", total=len(self._sizes), label=self._title, facts="")
        self._one = bars.add_task("", total=None, label="", facts="")

    def _redraw(self) -> None:
        if self._bars is None:
            return
        part = self._seen / self._total if self._total and self._now else 0.0
        done = len(self._ended) + part
        self._bars.update(self._whole, completed=done, facts=self.describe())
        self._bars.update(
            self._one,
            total=self._total or None,
            completed=self._seen,
            label=self._now or "",
            facts=self._facts if self._now else "",
        )

    def _print_plain(self, line: str) -> None:
        self._last_plain_s = self._clock()
        self._print(line)


def describe_result(result: Mapping[str, Any]) -> str:
    if result.get("status") != "done":
        return f"{result.get('status')}: {result.get('error') or 'no reason recorded'}"
    accuracy = as_finite(result.get("test_acc"))
    words = f"done in {format_seconds(as_finite(result.get('seconds')))}"
    return words if accuracy is None else f"{words}, test accuracy {format_percent(accuracy)}"
