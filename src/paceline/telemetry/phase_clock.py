"""Clocks that assign the wall time of a process to time categories."""

import threading
import time

from paceline.telemetry.events import PHASES, SERVER_PHASES

STARTUP, INPUT, FORWARD, BACKWARD, COMM, OPTIMIZER = range(6)
WAIT, QUEUE, EVAL, SWITCH, OTHER = range(6, len(PHASES))

STAGES = ("start", "read", "prepare", "train", "evaluate", "save")
"""Stages of a run; they divide its wall time coarsely."""
START, READ, PREPARE, TRAIN, EVALUATE, SAVE = range(len(STAGES))

_, IDLE, RECEIVE, APPLY, SEND = range(len(SERVER_PHASES))


class PhaseClock:
    """A clock that is always in exactly one category, so that they add up to the wall time."""

    def __init__(self, started_wall_s: float, names: tuple[str, ...] = PHASES) -> None:
        """`started_wall_s`: start of the run by time.time(); the first category begins there."""
        self.names = names
        self.total_ns = [0] * len(names)
        self.current = 0
        self.changes = 0
        """Number of calls of `enter`; a worker whose number does not change is stuck."""
        self.input_cpu_ns = 0
        """CPU time of the thread during `input`; the rest of `input` was waiting."""
        self._input_mark_ns = 0
        before_ns = max(0, int((time.time() - started_wall_s) * 1e9))
        self._since_ns = time.perf_counter_ns() - before_ns
        self._origin_ns = self._since_ns

    def enter(self, phase: int) -> None:
        now = time.perf_counter_ns()
        before = self.current
        self.total_ns[before] += now - self._since_ns
        self._since_ns = now
        if phase != before:
            if phase == INPUT:
                self._input_mark_ns = time.thread_time_ns()
            elif before == INPUT:
                self.input_cpu_ns += time.thread_time_ns() - self._input_mark_ns
            self.current = phase
        self.changes += 1

    def reassign(self, source: int, target: int, ns: int) -> None:
        """Moves time from one category to another, once its cause is known."""
        self.enter(self.current)
        ns = max(0, min(ns, self.total_ns[source]))
        self.total_ns[source] -= ns
        self.total_ns[target] += ns

    def now_s(self) -> float:
        """Returns the seconds since the start of the run."""
        return (time.perf_counter_ns() - self._origin_ns) / 1e9

    def read_ns(self) -> list[int]:
        """Returns the totals including the current category; safe from other threads."""
        while True:
            totals, since, current = list(self.total_ns), self._since_ns, self.current
            # Read during a change, the parts are inconsistent: retry.
            if sum(totals) == since - self._origin_ns:
                break
        totals[current] += max(0, time.perf_counter_ns() - since)
        return totals

    def totals_s(self) -> dict[str, float]:
        self.enter(self.current)
        return {name: ns / 1e9 for name, ns in zip(self.names, self.total_ns, strict=True)}


class ServerClock(PhaseClock):
    """The clock of a server, whose threads work concurrently; see `SERVER_PHASES`."""

    def __init__(self, started_wall_s: float) -> None:
        super().__init__(started_wall_s, SERVER_PHASES)
        self._lock = threading.Lock()
        self._doing = [0] * len(SERVER_PHASES)

    def start_idle(self) -> None:
        """Ends the startup."""
        with self._lock:
            self.enter(IDLE)

    def begin(self, phase: int) -> None:
        self._count(phase, 1)

    def end(self, phase: int) -> None:
        self._count(phase, -1)

    def _count(self, phase: int, change: int) -> None:
        with self._lock:
            self._doing[phase] += change
            shown = next((p for p in (APPLY, SEND, RECEIVE) if self._doing[p]), IDLE)
            if shown != self.current:
                self.enter(shown)
