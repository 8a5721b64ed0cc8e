"""Progress of a matrix of runs: runs done, the current run, and the time left."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn
from rich.table import Column
from rich.text import Text

from paceline.report.number_format import (
    format_duration,
    format_number,
    format_percent,
    format_seconds,
    to_single_line,
)
from paceline.telemetry.event_log import RunNotice
from paceline.telemetry.events import RunLengthKnown, RunProgress, StrategySwitched
from paceline.telemetry.numbers import as_finite

PLAIN_INTERVAL_S = 30.0

Size = tuple[str, str, int]
"""Model, data and epochs of a run, from which its time is estimated."""


class MatrixProgress:
    """Shows two live lines on a terminal and a few plain lines elsewhere; nothing if `quiet`."""

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
        self._quiet = quiet
        self._clock = clock
        self._console = console or Console(stderr=True, force_terminal=sys.stderr.isatty())
        self._done = self._failed = 0
        self._left = set(sizes)
        self._times: list[tuple[Size, float]] = []
        self._now: str | None = None
        self._began_s = self._plain_s = clock()
        self._total = self._seen = 0
        self._facts = ""
        self._bar: Progress | None = None
        self._tasks = (TaskID(0), TaskID(0))
        if not quiet and self._console.is_interactive:
            self._start_bars()

    def begin(self, name: str) -> None:
        self._now, self._began_s = name, self._clock()
        self._total = self._seen = 0
        self._facts = "starting"
        self._redraw()

    def show(self, notice: RunNotice) -> None:
        """Displays a notice of the current run."""
        if isinstance(notice, RunLengthKnown):
            self._total = (notice.epochs or 0) * (notice.samples_per_epoch or 0)
        elif isinstance(notice, RunProgress):
            self._seen = notice.samples
            self._facts = f"epoch {notice.epoch + 1}, {format_number(self._seen)} samples"
        elif isinstance(notice, StrategySwitched):
            self._facts = f"switched {notice.row.before} -> {notice.row.after}"
        else:
            return
        self._redraw()
        if self._bar is None and self._clock() - self._plain_s >= PLAIN_INTERVAL_S:
            self._print(f"{self._now}: {self._facts}")

    def end(self, name: str, result: Mapping[str, Any]) -> None:
        seconds = self._clock() - self._began_s
        if result.get("status") == "done":
            self._times.append((self._sizes[name], seconds))
        self._count(name, result)
        self._print(f"{name}: {describe_result(result)} ({self.describe()})")
        self._now = None
        self._redraw()

    def skip(self, name: str, result: Mapping[str, Any]) -> None:
        """Counts a run that already has a result."""
        self._count(name, result)
        self._redraw()

    def describe(self) -> str:
        whole = len(self._sizes)
        parts = [f"{self._done + self._failed} of {whole}"]
        if self._failed:
            parts.append(f"{self._failed} failed")
        left = self.estimate_left_s()
        if left is not None and self._left:
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
        for name in self._left:
            model, data, epochs = self._sizes[name]
            group = rates.get((model, data), every)
            left += epochs * sum(group) / len(group)
        if self._now in self._left:
            left -= self._clock() - self._began_s
        return max(0.0, left)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None
        self._quiet = True

    def __enter__(self) -> MatrixProgress:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _count(self, name: str, result: Mapping[str, Any]) -> None:
        self._left.discard(name)
        if result.get("status") == "done":
            self._done += 1
        else:
            self._failed += 1

    def _start_bars(self) -> None:
        self._bar = Progress(
            TextColumn("{task.fields[label]}", markup=False),
            BarColumn(bar_width=24),
            TextColumn(
                "{task.fields[facts]}",
                markup=False,
                table_column=Column(no_wrap=True, overflow="ellipsis", ratio=1),
            ),
            console=self._console,
            expand=True,
        )
        self._tasks = (
            self._bar.add_task("", total=len(self._sizes), label=self._title, facts=""),
            self._bar.add_task("", total=None, label="", facts=""),
        )
        self._bar.start()

    def _redraw(self) -> None:
        if self._bar is None:
            return
        whole, one = self._tasks
        part = self._seen / self._total if self._total and self._now else 0.0
        self._bar.update(whole, completed=self._done + self._failed + part, facts=self.describe())
        self._bar.update(
            one,
            total=self._total or None,
            completed=self._seen,
            label=self._now or "",
            facts=self._facts if self._now else "",
        )

    def _print(self, line: str) -> None:
        if not self._quiet:
            self._plain_s = self._clock()
            # Soft wrap: a log line stays one line, whatever width rich assumes.
            self._console.print(Text(to_single_line(line)), soft_wrap=True)


def describe_result(result: Mapping[str, Any]) -> str:
    if result.get("status") != "done":
        return f"{result.get('status')}: {result.get('error') or 'no reason recorded'}"
    accuracy = as_finite(result.get("test_acc"))
    words = f"done in {format_seconds(as_finite(result.get('seconds')))}"
    return words if accuracy is None else f"{words}, test accuracy {format_percent(accuracy)}"
