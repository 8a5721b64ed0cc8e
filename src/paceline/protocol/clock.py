"""Clocks of a parameter server: they decide which gradients form an update and who proceeds.

A clock counts pushes per worker; the `lag` of a worker is its count minus that of the slowest one.
All counts are equal at the start of a training interval (`begin`), because all workers have waited
for each other. When no worker is active, `flush` releases what is still held back.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass, field

from paceline.protocol.messages import record


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
    """Updates, each of which applies a list of pushes, and the workers that may proceed."""

    updates: list[list[Push]] = field(default_factory=list)
    release: list[int] = field(default_factory=list)


class Clock(ABC):
    """Counts pushes per worker, and keeps their minimum."""

    synchronous = False
    """True if workers are released together and share one global batch."""

    def __init__(self, workers: int) -> None:
        self._workers = workers
        self.begin()

    def begin(self) -> None:
        """Starts a training interval."""
        self._pushes = [0] * self._workers
        self._fewest = 0
        self._lost: set[int] = set()

    def advance(self, worker: int) -> bool:
        """Counts a push; returns True if the minimum has increased."""
        old = self._pushes[worker]
        self._pushes[worker] = old + 1
        if old > self._fewest:
            return False
        return self._raise_minimum()

    def _raise_minimum(self) -> bool:
        before, lost = self._fewest, self._lost
        self._fewest = min(
            (n for w, n in enumerate(self._pushes) if w not in lost) if lost else self._pushes,
            default=before,
        )
        return self._fewest > before

    def forget(self, worker: int) -> list[int]:
        """Stops counting a lost worker; returns those that it held back."""
        self._lost.add(worker)
        return self._released_by_minimum() if self._raise_minimum() else []

    def _released_by_minimum(self) -> list[int]:
        return []

    def lag(self, worker: int) -> int:
        return self._pushes[worker] - self._fewest

    @abstractmethod
    def on_push(self, push: Push, now: float) -> ClockDecision: ...

    def flush(self) -> ClockDecision:
        return ClockDecision()


class AspClock(Clock):
    """Asynchronous (ASP): applies every gradient and releases its worker immediately."""

    def on_push(self, push: Push, now: float) -> ClockDecision:
        self.advance(push.worker)
        return ClockDecision(updates=[[push]], release=[push.worker])


class SspClock(Clock):
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
        risen = self.advance(push.worker)
        self._held.append(push.worker)
        released: list[int] = []
        if self._bound == 0:
            self._round.append(push)
            return self.flush() if risen else ClockDecision()
        if risen:
            released = self._release_held()
        elif self.lag(push.worker) <= self._bound:
            # The minimum is unchanged, so no waiting worker can be released; only this one may be.
            released = [self._held.pop()]
        return ClockDecision(updates=[[push]], release=released)

    def forget(self, worker: int) -> list[int]:
        self._held = [w for w in self._held if w != worker]
        return super().forget(worker)

    def _released_by_minimum(self) -> list[int]:
        # With a bound of 0, a round must be complete: `flush` ends it when no worker is active.
        return self._release_held() if self._bound else []

    def _release_held(self) -> list[int]:
        released = [w for w in self._held if self.lag(w) <= self._bound]
        self._held = [w for w in self._held if self.lag(w) > self._bound]
        return released

    def flush(self) -> ClockDecision:
        pushes = sorted(self._round, key=lambda p: p.worker)
        released, self._held, self._round = sorted(self._held), [], []
        return ClockDecision(updates=[[p] for p in pushes], release=released)


class DsspClock(SspClock):
    """Dynamic SSP: the bound varies between `low` and `high` with the measured speeds.

    Beyond the low bound, the fastest worker is granted the number of extra steps after which its
    predicted wait for a push of the slowest worker is shortest.
    """

    def __init__(self, workers: int, low: int, high: int) -> None:
        super().__init__(workers, low)
        self._high = high
        self._last = [0.0] * workers
        self._interval: list[float | None] = [None] * workers

    def begin(self) -> None:
        super().begin()
        self._extra = [0] * self._workers

    def _released_by_minimum(self) -> list[int]:
        return self._release_held()

    def on_push(self, push: Push, now: float) -> ClockDecision:
        worker = push.worker
        # The time across an interruption of training is not a measure of speed.
        if self._pushes[worker]:
            self._interval[worker] = now - self._last[worker]
        self._last[worker] = now
        released = self._release_held() if self.advance(worker) else []
        (released if self._may_proceed(worker) else self._held).append(worker)
        return ClockDecision(updates=[[push]], release=released)

    def _may_proceed(self, worker: int) -> bool:
        lag = self.lag(worker)
        if lag <= self._bound:
            self._extra[worker] = 0
            return True
        if lag > self._high:
            return False
        if self._extra[worker] > 0:
            self._extra[worker] -= 1
            return True
        interval = self._interval[worker]
        if interval is None or interval > min(i for i in self._interval if i is not None):
            return False
        steps = self._grant(self._last[worker], interval, self._high - lag + 1)
        self._extra[worker] = max(0, steps - 1)
        return steps > 0

    def _grant(self, now: float, interval: float, limit: int) -> int:
        """Returns the number of extra steps, up to `limit`, with the shortest predicted wait."""
        slowest = [
            (i, self._last[w])
            for w, i in enumerate(self._interval)
            if i is not None and i > 0 and self._pushes[w] == self._fewest
        ]
        if not slowest:
            return 0
        slow, last = max(slowest, key=lambda pair: pair[0])

        def wait_after(steps: int) -> float:
            arrives = now + steps * interval
            # The slowest worker's next predicted push, or the one before it.
            pushes = int(max(0.0, (arrives - last) / slow))
            return min(abs(last + k * slow - arrives) for k in (pushes, pushes + 1) if k)

        return min(range(limit + 1), key=wait_after)


class KAsyncClock(Clock):
    """K-async: an update consists of the first `k` gradients; their workers then proceed."""

    def __init__(self, workers: int, k: int) -> None:
        super().__init__(workers)
        self._k = k
        self._waiting: list[Push] = []

    def on_push(self, push: Push, now: float) -> ClockDecision:
        self.advance(push.worker)
        self._waiting.append(push)
        return self.flush() if len(self._waiting) >= self._k else ClockDecision()

    def flush(self) -> ClockDecision:
        # A fixed order of summation makes the weights independent of the order of arrival.
        together, self._waiting = sorted(self._waiting, key=lambda p: p.worker), []
        if not together:
            return ClockDecision()
        return ClockDecision(updates=[together], release=[p.worker for p in together])


class BspClock(KAsyncClock):
    """Bulk synchronous (BSP): one update per round, with the gradients of all workers."""

    synchronous = True

    def __init__(self, workers: int) -> None:
        super().__init__(workers, workers)

    def on_push(self, push: Push, now: float) -> ClockDecision:
        assert not self.lag(push.worker), "a worker pushed twice in one round"
        return super().on_push(push, now)


class GbaClock(Clock):
    """Global batch aggregation (GBA): workers never wait; an update covers one global batch."""

    def __init__(self, workers: int) -> None:
        super().__init__(workers)
        self._buffer: list[Push] = []
        self._shares = 0.0

    def on_push(self, push: Push, now: float) -> ClockDecision:
        self.advance(push.worker)
        self._buffer.append(push)
        self._shares += push.share
        # Shares are rounded fractions: a full batch may sum up to slightly less than 1.
        updates = self.flush().updates if self._shares >= 1 - 1e-9 else []
        return ClockDecision(updates, release=[push.worker])

    def flush(self) -> ClockDecision:
        together, self._buffer, self._shares = self._buffer, [], 0.0
        return ClockDecision(updates=[together] if together else [])
