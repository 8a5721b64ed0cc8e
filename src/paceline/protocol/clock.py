"""Clocks of a parameter server: they decide which gradients form an update and who proceeds.

A clock counts pushes per worker; the `lag` of a worker is its count minus that of the slowest one.
All counts are equal at the start of a training interval (`begin`), because all workers have waited
for each other. When no worker is active, `flush` releases what is still held back.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from paceline.protocol.record import record


@record
class Push:
    """A computed gradient that waits to become (part of) an update."""

    worker: int
    handle: int
    samples: int
    share: float
    """Fraction of the global batch; the fractions of an epoch sum up to its number of batches."""
    base: int
    """Version of the weights that it was computed on."""


@dataclass
class ClockDecision:
    """`updates`.

    Lists of pushes, each applied as one update. `release`: workers that may proceed.
    """

    updates: list[list[Push]] = field(default_factory=list)
    release: list[int] = field(default_factory=list)


class Clock(Protocol):
    synchronous: bool
    """True if workers are released together and share one global batch."""

    def begin(self) -> None: ...

    def on_push(self, push: Push, now: float) -> ClockDecision: ...

    def flush(self) -> ClockDecision: ...

    def lag(self, worker: int) -> int: ...


class WorkerCounts:
    """Pushes per worker, with the minimum maintained in constant time."""

    def __init__(self, workers: int) -> None:
        self._workers = workers
        self.reset()

    def reset(self) -> None:
        self._count = [0] * self._workers
        self._how_many = {0: self._workers}
        self._low = 0

    def advance(self, worker: int) -> bool:
        """Counts a push; returns True if the minimum has increased."""
        old = self._count[worker]
        self._count[worker] = old + 1
        self._how_many[old] -= 1
        self._how_many[old + 1] = self._how_many.get(old + 1, 0) + 1
        before = self._low
        while not self._how_many[self._low]:
            del self._how_many[self._low]
            self._low += 1
        return self._low > before

    def lag(self, worker: int) -> int:
        return self._count[worker] - self._low

    def slowest(self) -> list[int]:
        return [w for w, count in enumerate(self._count) if count == self._low]


class _CountingClock:
    """Base class of clocks: counts pushes and holds nothing back."""

    synchronous = False

    def __init__(self, workers: int) -> None:
        self._workers = workers
        self._counts = WorkerCounts(workers)

    def begin(self) -> None:
        self._counts.reset()

    def lag(self, worker: int) -> int:
        return self._counts.lag(worker)

    def flush(self) -> ClockDecision:
        return ClockDecision()


class AspClock(_CountingClock):
    """Asynchronous (ASP): applies every gradient and releases its worker immediately."""

    def on_push(self, push: Push, now: float) -> ClockDecision:
        self._counts.advance(push.worker)
        return ClockDecision(updates=[[push]], release=[push.worker])


class BspClock(_CountingClock):
    """Bulk synchronous (BSP): one update per round, with the gradients of all workers."""

    synchronous = True

    def __init__(self, workers: int) -> None:
        super().__init__(workers)
        self._waiting: dict[int, Push] = {}

    def on_push(self, push: Push, now: float) -> ClockDecision:
        assert push.worker not in self._waiting, "a worker pushed twice in one round"
        self._counts.advance(push.worker)
        self._waiting[push.worker] = push
        if len(self._waiting) < self._workers:
            return ClockDecision()
        # A fixed order of summation makes the weights independent of the order of arrival.
        together = [self._waiting[w] for w in sorted(self._waiting)]
        self._waiting = {}
        return ClockDecision(updates=[together], release=[p.worker for p in together])


class SspClock(_CountingClock):
    """Stale synchronous (SSP): a worker proceeds while its lag is at limit `bound`.

    With a bound of 0, no worker can proceed before all have pushed, so the gradients of a round are
    applied together in the order of the workers. All workers pull the same weights, and the result
    equals that of BSP.
    """

    def __init__(self, workers: int, bound: float) -> None:
        super().__init__(workers)
        self._bound = bound
        self._held: list[int] = []
        self._round: list[Push] = []

    def on_push(self, push: Push, now: float) -> ClockDecision:
        risen = self._counts.advance(push.worker)
        self._held.append(push.worker)
        if self._bound == 0:
            self._round.append(push)
            return self.flush() if risen else ClockDecision()
        if not risen:
            # The minimum is unchanged, so no waiting worker can be released; only this one may be.
            if self.lag(push.worker) > self._bound:
                return ClockDecision(updates=[[push]])
            self._held.pop()
            return ClockDecision(updates=[[push]], release=[push.worker])
        released = [w for w in self._held if self.lag(w) <= self._bound]
        self._held = [w for w in self._held if self.lag(w) > self._bound]
        return ClockDecision(updates=[[push]], release=released)

    def flush(self) -> ClockDecision:
        pushes = sorted(self._round, key=lambda p: p.worker)
        released, self._held, self._round = sorted(self._held), [], []
        return ClockDecision(updates=[[p] for p in pushes], release=released)


class DsspClock(_CountingClock):
    """Dynamic SSP: the bound varies between `low` and `high` with the measured speeds.

    Beyond the low bound, the fastest worker is granted the number of extra steps after which its
    predicted wait for a push of the slowest worker is shortest.
    """

    def __init__(self, workers: int, low: int, high: int) -> None:
        super().__init__(workers)
        self._low, self._high = low, high
        self._extra = [0] * workers
        self._last = [0.0] * workers
        self._interval: list[float | None] = [None] * workers
        self._pushes = [0] * workers
        self._held: list[int] = []

    def begin(self) -> None:
        super().begin()
        self._extra = [0] * self._workers
        # The time across an interruption of training is not a measure of speed.
        self._pushes = [0] * self._workers

    def on_push(self, push: Push, now: float) -> ClockDecision:
        worker = push.worker
        risen = self._counts.advance(worker)
        if self._pushes[worker]:
            self._interval[worker] = now - self._last[worker]
        self._last[worker] = now
        self._pushes[worker] += 1
        released = []
        if risen:
            released = [w for w in self._held if self.lag(w) <= self._low]
            self._held = [w for w in self._held if self.lag(w) > self._low]
        if self._may_proceed(worker):
            released.append(worker)
        else:
            self._held.append(worker)
        return ClockDecision(updates=[[push]], release=released)

    def _may_proceed(self, worker: int) -> bool:
        lag = self.lag(worker)
        if lag <= self._low:
            self._extra[worker] = 0
            return True
        if lag > self._high:
            return False
        if self._extra[worker] > 0:
            self._extra[worker] -= 1
            return True
        if self._is_fastest(worker):
            steps = self._grant(worker, self._high - lag + 1)
            if steps > 0:
                self._extra[worker] = steps - 1
                return True
        return False

    def _is_fastest(self, worker: int) -> bool:
        own_interval = self._interval[worker]
        known = [i for i in self._interval if i is not None]
        return own_interval is not None and own_interval <= min(known)

    def _grant(self, worker: int, limit: int) -> int:
        """Returns the number of extra steps, up to `limit`, with the shortest predicted wait."""
        interval = self._interval[worker]
        assert interval is not None
        pace = [
            (self._last[s], i)
            for s in self._counts.slowest()
            if (i := self._interval[s]) is not None and i > 0
        ]
        if not pace:
            return 0
        last, slow = max(pace, key=lambda pair: pair[1])
        waits = []
        for steps in range(limit + 1):
            arrives = self._last[worker] + steps * interval
            # The slowest worker's next predicted push, or the one before it.
            behind = max(0.0, (arrives - last) / slow)
            nearest = min(abs(last + (int(behind) + j) * slow - arrives) for j in (0, 1))
            if int(behind) == 0:
                nearest = abs(last + slow - arrives)
            waits.append((nearest, steps))
        return min(waits)[1]

    def flush(self) -> ClockDecision:
        released, self._held = sorted(self._held), []
        return ClockDecision(release=released)


class KAsyncClock(_CountingClock):
    """K-async: an update consists of the first `k` gradients; their workers then proceed."""

    def __init__(self, workers: int, k: int) -> None:
        super().__init__(workers)
        self._k = k
        self._waiting: list[Push] = []

    def on_push(self, push: Push, now: float) -> ClockDecision:
        self._counts.advance(push.worker)
        self._waiting.append(push)
        return self.flush() if len(self._waiting) >= self._k else ClockDecision()

    def flush(self) -> ClockDecision:
        together, self._waiting = sorted(self._waiting, key=lambda p: p.worker), []
        if not together:
            return ClockDecision()
        return ClockDecision(updates=[together], release=[p.worker for p in together])


class GbaClock(_CountingClock):
    """Global batch aggregation (GBA): workers never wait; an update covers one global batch."""

    def __init__(self, workers: int) -> None:
        super().__init__(workers)
        self._buffer: list[Push] = []
        self._shares = 0.0

    def on_push(self, push: Push, now: float) -> ClockDecision:
        self._counts.advance(push.worker)
        self._buffer.append(push)
        self._shares += push.share
        verdict = ClockDecision(release=[push.worker])
        # Shares are rounded fractions: a full batch may sum up to slightly less than 1.
        if self._shares >= 1 - 1e-9:
            verdict.updates = self.flush().updates
        return verdict

    def flush(self) -> ClockDecision:
        together, self._buffer, self._shares = self._buffer, [], 0.0
        return ClockDecision(updates=[together] if together else [])
