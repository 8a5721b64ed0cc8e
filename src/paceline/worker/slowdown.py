"""Injects slowdowns into this worker (`--slow`, `--delay`), to study unequal machines."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping

from paceline.specs.slowdown import ActiveSlowdown, InjectedSlowdown
from paceline.telemetry.phase_clock import BACKWARD, COMM, PhaseClock


class SlowdownInjector:
    """Stretches the compute time of each step, and delays its first exchange.

    `begin_step` marks the start of the compute; `apply` sleeps for the time that is missing so
    far. It is called before gradients leave, as they would leave late on a slow machine, and
    sleeps once for every stretch of compute.
    """

    def __init__(self, slowdowns: tuple[InjectedSlowdown, ...], rank: int, clock: PhaseClock):
        self._slowdowns = slowdowns
        self._rank = rank
        self._clock = clock
        self._active = ActiveSlowdown()
        self._delayed = True
        """This step's first exchange has been delayed, or needs no delay."""
        self._applied_until = (time.perf_counter(), time.thread_time())

    @classmethod
    def for_worker(
        cls, slowdowns: Iterable[Mapping[str, float]], rank: int, clock: PhaseClock
    ) -> SlowdownInjector | None:
        """The injector of worker `rank`; None if no slowdown concerns it."""
        parsed = (InjectedSlowdown.from_plain(dict(plain)) for plain in slowdowns)
        own = tuple(slowdown for slowdown in parsed if slowdown.worker == rank)
        return cls(own, rank, clock) if own else None

    @property
    def max_factor(self) -> float:
        """The largest slowdown factor that this worker will have."""
        return max(slowdown.factor / slowdown.cores for slowdown in self._slowdowns)

    def begin_step(self, epoch: float) -> None:
        """Starts a step at this position of the run, in epochs."""
        self._active = ActiveSlowdown.of(self._slowdowns, self._rank, epoch)
        self._delayed = self._active.delay_s == 0.0
        self._applied_until = (time.perf_counter(), time.thread_time())

    def apply(self) -> None:
        """Sleeps until the compute since the last call has taken as long as it should."""
        began, busy_until = self._applied_until
        elapsed_s = time.perf_counter() - began
        wall_s = self._active.wall_s(elapsed_s, time.thread_time() - busy_until)
        time.sleep(max(0.0, wall_s - elapsed_s))
        if not self._delayed:
            self._clock.enter(COMM)
            time.sleep(self._active.delay_s)
            self._clock.enter(BACKWARD)
            self._delayed = True
        self._applied_until = (time.perf_counter(), time.thread_time())
