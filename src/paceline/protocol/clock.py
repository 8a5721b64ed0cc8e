"""Clocks of a parameter server: which gradients make an update, and who may go on.

A clock counts pushes a worker; `lag` of a worker is its count above the slowest one's.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from paceline.specs.strategy import Asp, Bsp, Sync


@dataclass(frozen=True)
class Push:
    """A gradient that has been computed, waiting to become (part of) an update."""

    worker: int
    handle: int
    samples: int
    share: float
    """What its samples are of their global batch; the shares of an epoch add up to its batches."""
    base: int


@dataclass
class Verdict:
    """`updates`: each a list of pushes applied as one. `release`: workers that may go on."""

    updates: list[list[Push]] = field(default_factory=list)
    release: list[int] = field(default_factory=list)


class Clock(Protocol):
    in_rounds: bool
    """Workers are released all together and share one global batch."""

    def pushed(self, push: Push) -> Verdict: ...


class WorkerCounts:
    """Steps pushed a worker, with the minimum kept in constant time."""

    def __init__(self, workers: int) -> None:
        self._count = [0] * workers
        self._how_many = {0: workers}
        self._low = 0

    def advance(self, worker: int) -> None:
        old = self._count[worker]
        self._count[worker] = old + 1
        self._how_many[old] -= 1
        self._how_many[old + 1] = self._how_many.get(old + 1, 0) + 1
        while not self._how_many[self._low]:
            del self._how_many[self._low]
            self._low += 1

    def lag(self, worker: int) -> int:
        return self._count[worker] - self._low


class AspClock:
    """Apply at once, let the worker go on at once."""

    in_rounds = False

    def pushed(self, push: Push) -> Verdict:
        return Verdict(updates=[[push]], release=[push.worker])


class BspClock:
    """One update a round, made of every worker's gradient in the order of the workers."""

    in_rounds = True

    def __init__(self, workers: int) -> None:
        self._workers = workers
        self._waiting: dict[int, Push] = {}

    def pushed(self, push: Push) -> Verdict:
        assert push.worker not in self._waiting, "a worker pushed twice in one round"
        self._waiting[push.worker] = push
        if len(self._waiting) < self._workers:
            return Verdict()
        # A fixed order of summation makes the weights independent of who came first.
        together = [self._waiting[w] for w in sorted(self._waiting)]
        self._waiting = {}
        return Verdict(updates=[together], release=[p.worker for p in together])


def make_clock(sync: Sync, workers: int) -> Clock:
    if isinstance(sync, Asp):
        return AspClock()
    if isinstance(sync, Bsp):
        return BspClock(workers)
    raise AssertionError(f"no clock for {sync}")
