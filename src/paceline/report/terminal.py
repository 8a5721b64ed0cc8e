"""The coordinator's notes on the terminal."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from paceline.report.progress import Progress

Show = Callable[[str, dict[str, Any]], None]


@contextmanager
def terminal_reporter(label: str, *, quiet: bool = False) -> Iterator[Show]:
    """A function that shows notes as they come; the display is closed at the end."""
    with Progress(label, quiet=quiet) as progress:
        yield TerminalReporter(progress)


class TerminalReporter:
    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._last: tuple[float, int] | None = None

    def __call__(self, kind: str, facts: dict[str, Any]) -> None:
        progress = self._progress
        if kind == "totals" and facts["epochs"] is not None:
            progress.set_totals(facts["epochs"], facts["samples_per_epoch"])
        elif kind == "progress":
            progress.update(
                epoch=facts["epoch"] + 1,
                samples=facts["samples"],
                updates=facts["updates"],
                loss=facts["loss"] if facts["loss"] is not None else math.nan,
                strategy=facts["strategy"],
                samples_per_s=self._rate(facts["t"], facts["samples"]),
            )
        elif kind == "epoch":
            progress.epoch_row(facts["row"])
        elif kind == "phase":
            progress.update(strategy=facts["strategy"])
            progress.print_line(
                f"strategy {facts['strategy']} from sample {facts['samples']}: {facts['lr']}"
            )
        elif kind == "switch":
            row = facts["row"]
            progress.print_line(
                f"switched {row['from']} -> {row['to']} at sample {row['samples']} "
                f"({row['reason']}): pause {row['pause_s']:.3f} s, drain {row['drain_s']:.3f} s"
            )
        elif kind == "decision":
            if facts["row"]["strategy"] == facts["row"]["chosen"]:  # a switch is told when it comes
                progress.print_line(
                    f"at sample {facts['row']['samples']}: {facts['row']['reason']}"
                )
        elif kind == "verdict":
            if facts["state"] == "began":
                progress.print_line(f"{facts['text']}: {facts['suggestion']}")
            else:
                progress.print_line(f"no longer: {facts['text']}")
        elif kind == "way":
            if facts["way"] != "shared" and facts["why"]:
                part = "some " if facts["way"] == "partly shared" else ""
                progress.print_line(
                    f"{part}gradients passed through sockets, not memory: {facts['why']}"
                )
        elif kind == "output":
            progress.print_line(f"[{facts['who'].replace('-', ' ')}] {facts['line']}")

    def _rate(self, t: float, samples: int) -> float:
        before, self._last = self._last, (t, samples)
        if before is None or t <= before[0]:
            return 0.0
        return (samples - before[1]) / (t - before[0])
