"""Where a worker's time goes: a clock that is always in exactly one phase."""

from __future__ import annotations

import time

from paceline.telemetry.events import PHASES

(
    STARTUP,
    INPUT,
    FORWARD,
    BACKWARD,
    COMM,
    OPTIMIZER,
    WAIT,
    QUEUE,
    EVAL,
    SWITCH,
    OTHER,
) = range(len(PHASES))

STAGES = ("start", "read", "prepare", "train", "evaluate", "save")
"""The coarse division of a run's wall time."""
START, READ, PREPARE, TRAIN, EVALUATE, SAVE = range(len(STAGES))


class PhaseClock:
    """`enter` ends the current phase and begins another: the phases add up to the wall time."""

    def __init__(self, started_wall_s: float, names: tuple[str, ...] = PHASES) -> None:
        """`started_wall_s`: when the run began by time.time(); all until now is the first phase."""
        self.names = names
        self.total_ns = [0] * len(names)
        self.current = 0
        self.turns = 0
        """How often a phase was entered: a worker whose turns stand still is stuck."""
        before_ns = max(0, int((time.time() - started_wall_s) * 1e9))
        self._since_ns = time.perf_counter_ns() - before_ns
        self._origin_ns = self._since_ns

    def enter(self, phase: int) -> None:
        now = time.perf_counter_ns()
        self.total_ns[self.current] += now - self._since_ns
        self._since_ns = now
        self.current = phase
        self.turns += 1

    def now_s(self) -> float:
        """Seconds since the run began."""
        return (time.perf_counter_ns() - self._origin_ns) / 1e9

    def totals_s(self) -> dict[str, float]:
        self.enter(self.current)
        return {name: ns / 1e9 for name, ns in zip(self.names, self.total_ns, strict=True)}
