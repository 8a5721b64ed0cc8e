"""Records a worker's steps in memory and writes them as windows."""

import itertools
import time
from collections import Counter
from dataclasses import dataclass

import numpy as np

from paceline.protocol.messages import Lease
from paceline.telemetry.events import PHASES, STEP_PHASES, StepSummary, StepWindow
from paceline.telemetry.phase_clock import PhaseClock
from paceline.telemetry.run_folder import EventSink
from paceline.telemetry.sampler import LINES_A_STAGE, StepCounters

WINDOW_S = 1.0
SINGLE_STEPS = 200_000
"""Steps recorded individually; further steps are summed, which bounds the size of the folder."""


@dataclass(slots=True)
class StepRow:
    """One recorded step; `total_ns` are the totals of the clock after it."""

    lease: Lease
    loss: float | None
    total_ns: list[int]
    end_s: float
    hidden_us: int | None
    staleness: int = -1


class StepRecorder:
    """Called once per step; does I/O only at the end of a window. Without a writer, only counts."""

    def __init__(
        self,
        writer: EventSink | None,
        clock: PhaseClock,
        first_step: int = 0,
        counters: StepCounters | None = None,
    ) -> None:
        self._writer = writer
        self._clock = clock
        self._step = first_step
        self._counters = counters or StepCounters()
        self._hidden_us = 0
        self._single_left = SINGLE_STEPS
        self._window_s = WINDOW_S
        self._sums = 0
        self._rows: list[StepRow] = []
        self._last_ns = list(clock.total_ns)
        self._last_end_s = clock.now_s()
        self._due_s = time.monotonic() + WINDOW_S

    def step_done(self, lease: Lease, loss: float | None, hidden_us: int | None = None) -> None:
        """`hidden_us`: communication overlapped with computation; None if not measured."""
        counters = self._counters
        counters.epoch = lease.epoch
        counters.samples += lease.hi - lease.lo
        if hidden_us is not None:
            self._hidden_us = hidden_us
        counters.comm_hidden_us += self._hidden_us  # Between measurements the last one holds.
        counters.steps += 1
        self._step += 1
        if self._writer is None:
            return
        clock = self._clock
        self._rows.append(StepRow(lease, loss, list(clock.total_ns), clock.now_s(), hidden_us))
        if time.monotonic() >= self._due_s:
            self.flush()

    def note_staleness(self, staleness: int) -> None:
        """Sets the staleness of the last recorded step."""
        if self._rows:
            self._rows[-1].staleness = staleness

    def flush(self, *, final: bool = False) -> None:
        """Writes the window, except for its last step, whose staleness may not be known yet."""
        keep = 0 if final else 1
        cut = len(self._rows) - keep
        rows, self._rows = self._rows[:cut], self._rows[cut:]
        self._due_s = time.monotonic() + self._window_s
        if not rows or self._writer is None:
            return
        if self._single_left > 0:
            self._single_left -= len(rows)
            self._write_single(self._writer, rows)
            return
        first = self._step - len(rows) - len(self._rows)
        # Sum per epoch, because the first epoch differs from the rest.
        for epoch, group in itertools.groupby(rows, lambda row: row.lease.epoch):
            part = list(group)
            self._write_sums(self._writer, epoch, part, first)
            first += len(part)
            self._sums += 1
            if self._sums % LINES_A_STAGE == 0:
                self._window_s *= 2

    def _take_columns(self, rows: list[StepRow]) -> dict[str, list[int]]:
        """Returns the microseconds of each step by time category."""
        totals_ns = [self._last_ns, *(row.total_ns for row in rows)]
        self._last_ns = totals_ns[-1]
        columns = (np.diff(totals_ns, axis=0) // 1000).T.tolist()
        return {name: columns[PHASES.index(name)] for name in STEP_PHASES}

    def _write_single(self, writer: EventSink, rows: list[StepRow]) -> None:
        began, self._last_end_s = self._last_end_s, rows[-1].end_s
        writer.write(
            StepWindow(
                t=round(self._clock.now_s(), 6),
                first_step=self._step - len(rows) - len(self._rows),
                began=round(began, 6),
                end=[int((row.end_s - began) * 1e6) for row in rows],
                epoch=[row.lease.epoch for row in rows],
                start=[row.lease.start for row in rows],
                lo=[row.lease.lo for row in rows],
                hi=[row.lease.hi for row in rows],
                loss=[None if row.loss is None else round(row.loss, 6) for row in rows],
                staleness=[row.staleness for row in rows],
                comm_hidden=[-1 if row.hidden_us is None else row.hidden_us for row in rows],
                pieces=[[list(piece) for piece in row.lease.row_ranges] for row in rows]
                if any(row.lease.row_ranges for row in rows)
                else [],
                **self._take_columns(rows),
            )
        )

    def _write_sums(self, writer: EventSink, epoch: int, rows: list[StepRow], first: int) -> None:
        began, self._last_end_s = self._last_end_s, rows[-1].end_s
        stale = Counter(row.staleness for row in rows if row.staleness >= 0)
        writer.write(
            StepSummary(
                t=round(self._clock.now_s(), 6),
                first_step=first,
                count=len(rows),
                samples=sum(row.lease.samples for row in rows),
                phases_us={name: sum(c) for name, c in self._take_columns(rows).items()},
                began=round(began, 6),
                epoch=epoch,
                staleness={str(k): v for k, v in sorted(stale.items())},
            )
        )
