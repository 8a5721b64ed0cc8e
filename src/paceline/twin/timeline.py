"""Virtual time: what is to happen, in order; ties in the order in which they were planned."""

from __future__ import annotations

import gc
import heapq
from collections.abc import Callable, Iterator
from contextlib import contextmanager

Callback = Callable[[float], None]
"""Called with the virtual second at which it happens."""


class Timeline:
    def __init__(self, now: float = 0.0) -> None:
        self.now = now
        self.events = 0
        self._heap: list[tuple[float, int, Callback]] = []
        self._count = 0
        self._stopped = False

    def schedule(self, time_s: float, deed: Callback) -> None:
        """Plan a deed; one that lies in the past happens now."""
        self._count += 1
        if time_s < self.now:
            time_s = self.now
        heapq.heappush(self._heap, (time_s, self._count, deed))

    def run(self) -> bool:
        """Until somebody calls `stop`; False when nothing is left to happen before that."""
        with infrequent_gc():
            heap, pop = self._heap, heapq.heappop
            while heap and not self._stopped:
                self.now, _, deed = pop(heap)
                self.events += 1
                deed(self.now)
        return self._stopped

    def stop(self) -> None:
        """What happens now is the last."""
        self._stopped = True


@contextmanager
def infrequent_gc() -> Iterator[None]:
    """Look for rubbish less often: every event makes a few objects, and nearly none in circles."""
    usual = gc.get_threshold()
    gc.set_threshold(200_000, 20, 100)
    try:
        yield
    finally:
        gc.set_threshold(*usual)


class FifoResource:
    """Something that serves one at a time, in the order of asking: a link, a server, a queue."""

    def __init__(self) -> None:
        self.free_at = 0.0

    def reserve(self, time_s: float, seconds: float) -> float:
        """When a service that is asked for at `time_s` is over."""
        begins = time_s if time_s > self.free_at else self.free_at
        self.free_at = begins + seconds
        return self.free_at


class SharedCores:
    """A machine's cores, shared evenly by more processes than there are cores."""

    def __init__(self, timeline: Timeline, cores: int, processes: int) -> None:
        self._timeline = timeline
        self._cores = cores
        self.crowded = processes > cores
        self._left: dict[int, float] = {}
        self._then: dict[int, Callback] = {}
        self._since = 0.0
        self._count = 0
        self._round = 0

    def run(self, time_s: float, seconds: float, then: Callback) -> None:
        """Do `seconds` of work from `time_s` on; `then` is told when it is over.

        With a core for every process that is known at once, and `then` is called before the
        timeline gets there.
        """
        if not self.crowded:
            then(time_s + seconds)
        else:
            self._timeline.schedule(time_s, lambda now: self._begin(now, seconds, then))

    def _begin(self, now: float, seconds: float, then: Callback) -> None:
        self._advance(now)
        self._count += 1
        self._left[self._count] = seconds
        self._then[self._count] = then
        self._plan()

    def _rate(self) -> float:
        return min(1.0, self._cores / len(self._left)) if self._left else 1.0

    def _advance(self, now: float) -> None:
        done = (now - self._since) * self._rate()
        for task in self._left:
            self._left[task] -= done
        self._since = now

    def _plan(self) -> None:
        """When the next task ends, if none comes or goes before that."""
        self._round += 1
        if not self._left:
            return
        task = min(self._left, key=lambda t: (self._left[t], t))
        this_round, ends = self._round, self._since + max(0.0, self._left[task]) / self._rate()

        def end(now: float) -> None:
            if self._round != this_round:
                return
            self._advance(now)
            del self._left[task]
            then = self._then.pop(task)
            self._plan()
            then(now)

        self._timeline.schedule(ends, end)
