"""Records a worker's steps in memory and writes them out a window at a time."""

from __future__ import annotations

import time

from paceline.protocol.messages import Lease
from paceline.telemetry.events import STEP_PHASES, StepsDone, StepsSummed
from paceline.telemetry.folder import EventSink
from paceline.telemetry.phases import PhaseClock

WINDOW_S = 1.0
SINGLE_STEPS = 200_000
"""Steps recorded one by one; a longer run goes on in sums, so that its folder stays bounded."""

_FIRST = 1  # index of "input" among the phases
_COUNT = len(STEP_PHASES)


class StepRecorder:
    """One call a step, no input or output but at the end of a window."""

    def __init__(self, writer: EventSink, clock: PhaseClock, first_step: int = 0) -> None:
        self._writer = writer
        self._clock = clock
        self._step = first_step
        self._single_left = SINGLE_STEPS
        self._rows: list[tuple[Lease, float | None, list[int]]] = []
        self._staleness: dict[int, int] = {}  # by row of the window
        self._last_ns = list(clock.total_ns)
        self._due_s = time.monotonic() + WINDOW_S

    def step_done(self, lease: Lease, loss: float | None) -> None:
        total = self._clock.total_ns
        self._rows.append((lease, loss, list(total)))
        self._step += 1
        if time.monotonic() >= self._due_s:
            self.flush()

    def note_staleness(self, staleness: int) -> None:
        """How stale the step recorded last turned out to be."""
        if staleness >= 0 and self._rows:
            self._staleness[len(self._rows) - 1] = staleness

    def flush(self, *, final: bool = False) -> None:
        """Write the window; its last step stays back until its staleness can be known."""
        keep = 0 if final else 1
        cut = len(self._rows) - keep
        rows, self._rows = self._rows[:cut], self._rows[cut:]
        self._due_s = time.monotonic() + WINDOW_S
        if not rows:
            return
        before = self._last_ns
        columns: list[list[int]] = [[] for _ in STEP_PHASES]
        for _, _, total in rows:
            for i in range(_COUNT):
                columns[i].append((total[_FIRST + i] - before[_FIRST + i]) // 1000)
            before = total
        self._last_ns = before
        first = self._step - len(rows) - len(self._rows)
        if self._single_left > 0:
            self._single_left -= len(rows)
            self._writer.write(
                StepsDone(
                    t=round(self._clock.now_s(), 6),
                    first_step=first,
                    epoch=[lease.epoch for lease, _, _ in rows],
                    start=[lease.start for lease, _, _ in rows],
                    lo=[lease.lo for lease, _, _ in rows],
                    hi=[lease.hi for lease, _, _ in rows],
                    loss=[None if loss is None else round(loss, 6) for _, loss, _ in rows],
                    staleness=[self._staleness.get(i, -1) for i in range(len(rows))],
                    pieces=_list_pieces([lease for lease, _, _ in rows]),
                    **dict(zip(STEP_PHASES, columns, strict=True)),
                )
            )
        else:
            sums = {name: sum(c) for name, c in zip(STEP_PHASES, columns, strict=True)}
            samples = sum(lease.samples for lease, _, _ in rows)
            self._writer.write(
                StepsSummed(
                    t=round(self._clock.now_s(), 6),
                    first_step=first,
                    count=len(rows),
                    samples=samples,
                    phases_us=sums,
                )
            )
        kept = self._staleness.get(len(rows))
        self._staleness = {} if kept is None else {0: kept}


def _list_pieces(leases: list[Lease]) -> list[list[list[int]]]:
    if not any(lease.pieces for lease in leases):
        return []
    return [[list(piece) for piece in lease.pieces] for lease in leases]
