"""Progress of a run: one live line on a terminal, a few plain lines elsewhere."""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Callable
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, TaskID, TextColumn
from rich.progress import Progress as Bar
from rich.table import Column
from rich.text import Text

from paceline.report.number_format import (
    format_duration,
    format_number,
    format_percent,
    format_seconds,
    to_single_line,
)
from paceline.telemetry.events import EpochRow
from paceline.telemetry.numbers import as_finite

PLAIN_INTERVAL_S = 5.0
ROW_INTERVAL_S = 2.0
"""Minimum time between two lines for epochs in a log."""
RATE_WINDOW_S = 30.0
"""The time left is estimated from the recent rate, which changes with a switch."""


class Progress:
    """Shows the progress of a run; omits what is unknown.

    On a terminal there is one live line; elsewhere one plain line per epoch and at most one more
    every 5 s, without control characters. `quiet` shows nothing. Writes to stderr by default.
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
        self._clock = clock
        # Explicit, because rich would treat FORCE_COLOR as a terminal and write control codes.
        self._console = console or Console(stderr=True, force_terminal=sys.stderr.isatty())
        self._quiet = quiet
        self._facts: dict[str, Any] = {}
        self._val_acc: float | None = None
        self._recent: deque[tuple[float, int]] = deque()
        self._last_plain_s = clock()
        self._last_row_s = -ROW_INTERVAL_S
        self._bar: Bar | None = None
        self._task = TaskID(0)
        if not quiet and self._console.is_interactive:
            self._start_bar()

    def set_totals(self, epochs: int, samples_per_epoch: int) -> None:
        """Sets the length of the run, once it is known."""
        self._epochs = epochs
        self._samples_total = epochs * samples_per_epoch
        self._redraw()

    def update(
        self,
        epoch: int | None = None,
        samples: int | None = None,
        updates: int | None = None,
        loss: float | None = None,
        strategy: str | None = None,
        samples_per_s: float | None = None,
    ) -> None:
        """Sets the totals so far; None keeps the last value."""
        given = {
            "epoch": epoch,
            "samples": samples,
            "updates": updates,
            "loss": loss,
            "strategy": strategy,
            "samples_per_s": samples_per_s,
        }
        self._facts.update({name: fact for name, fact in given.items() if fact is not None})
        now = self._clock()
        if samples is not None:
            self._remember_samples(now, samples)
        if self._quiet:
            return
        if self._bar is not None:
            self._redraw()
        elif now - self._last_plain_s >= PLAIN_INTERVAL_S:
            self._last_plain_s = now
            self._print(f"{self._label}: {self.describe()}")

    def epoch_row(self, row: EpochRow) -> None:
        """Displays the metrics at the end of an epoch."""
        accuracy = as_finite(row.val_acc)
        if accuracy is not None:
            self._val_acc = accuracy
        if self._quiet:
            return
        now = self._clock()
        if self._bar is not None:
            self._redraw()
        elif now - self._last_row_s >= ROW_INTERVAL_S or row.epoch == self._epochs:
            self._last_row_s = now
            self._print(f"{self._label}: {self._describe_row(row)}")

    def print_line(self, text: str) -> None:
        """Prints a permanent line above the live line."""
        if not self._quiet:
            self._print(f"{self._label}: {to_single_line(text)}")

    def close(self) -> None:
        """Stops the live line; may be called twice."""
        if self._bar is not None:
            self._redraw()
            self._bar.stop()
            self._bar = None
        self._quiet = True

    def __enter__(self) -> Progress:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def estimate_left_s(self) -> float | None:
        """Returns the seconds left at the recent rate; None if unknown."""
        samples = self._facts.get("samples")
        if self._samples_total is None or samples is None:
            return None
        left = max(0, self._samples_total - samples)
        rate = self._measure_rate() or as_finite(self._facts.get("samples_per_s"))
        if left == 0:
            return 0.0
        return left / rate if rate else None

    def describe(self) -> str:
        """Returns the text of the live line."""
        facts, parts = self._facts, []
        if "epoch" in facts:
            parts.append(f"epoch {facts['epoch']}" + (f"/{self._epochs}" if self._epochs else ""))
        if "samples_per_s" in facts:
            parts.append(f"{format_number(facts['samples_per_s'])} samples/s")
        if "loss" in facts:
            parts.append(f"loss {facts['loss']:.4g}")
        if self._val_acc is not None:
            parts.append(f"val acc {format_percent(self._val_acc)}")
        left_s = self.estimate_left_s()
        if left_s is not None:
            parts.append(f"{format_duration(left_s)} left")
        if "strategy" in facts:
            parts.append(to_single_line(facts["strategy"]))
        return ", ".join(parts) or "starting"

    def _describe_row(self, row: EpochRow) -> str:
        parts = [f"epoch {row.epoch}" + (f"/{self._epochs}" if self._epochs else "")]
        if row.seconds > 0:
            parts.append(f"after {format_seconds(row.seconds)}")
        for loss, word in ((row.train_loss, "train loss"), (row.val_loss, "val loss")):
            if as_finite(loss) is not None:
                parts.append(f"{word} {loss:.4g}")
        for accuracy, word in ((row.train_acc, "train acc"), (row.val_acc, "val acc")):
            if as_finite(accuracy) is not None:
                parts.append(f"{word} {format_percent(accuracy)}")
        rate = as_finite(row.lr)
        if rate is not None:
            parts.append(f"lr {rate:.4g}")
        left_s = self.estimate_left_s()
        if left_s:
            parts.append(f"{format_duration(left_s)} left")
        if "strategy" in self._facts:
            parts.append(to_single_line(self._facts["strategy"]))
        return ", ".join(parts)

    def _remember_samples(self, now: float, samples: int) -> None:
        if self._recent and samples < self._recent[-1][1]:
            self._recent.clear()  # Rolled back to a checkpoint: the old points are invalid.
        self._recent.append((now, samples))
        while len(self._recent) > 2 and now - self._recent[0][0] > RATE_WINDOW_S:
            self._recent.popleft()

    def _measure_rate(self) -> float | None:
        if len(self._recent) < 2:
            return None
        (began, first), (ended, last) = self._recent[0], self._recent[-1]
        return (last - first) / (ended - began) if ended > began and last > first else None

    def _start_bar(self) -> None:
        self._bar = Bar(
            TextColumn("{task.fields[label]}", markup=False),
            BarColumn(bar_width=20),
            # Always one line: truncated, never wrapped.
            TextColumn(
                "{task.fields[facts]}",
                markup=False,
                table_column=Column(no_wrap=True, overflow="ellipsis", ratio=1),
            ),
            console=self._console,
            expand=True,
        )
        self._task = self._bar.add_task("", total=None, label=self._label, facts="starting")
        self._bar.start()

    def _redraw(self) -> None:
        if self._bar is not None:
            self._bar.update(
                self._task,
                total=self._samples_total,
                completed=self._facts.get("samples", 0),
                facts=self.describe(),
            )

    def _print(self, line: str) -> None:
        # Soft wrap: a log line stays one line, whatever width rich assumes.
        self._console.print(Text(line), soft_wrap=True)
