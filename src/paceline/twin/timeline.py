"""Virtual time: an event queue in which simultaneous events run in the order of scheduling."""

import gc
import heapq
from collections.abc import Callable

Callback = Callable[[float], None]
"""Called with the virtual time in seconds."""


class Timeline:
    """Event queue of a simulation and its current time."""

    def __init__(self, now: float = 0.0) -> None:
        self.now = now
        self.events = 0
        self._heap: list[tuple[float, int, Callback]] = []
        self._count = 0
        self._stopped = False

    def schedule(self, time_s: float, callback: Callback) -> None:
        """Schedules a callback; one in the past runs now."""
        self._count += 1
        if time_s < self.now:
            time_s = self.now
        heapq.heappush(self._heap, (time_s, self._count, callback))

    def run(self) -> bool:
        """Runs until `stop` is called; returns False if the queue empties before that."""
        heap, pop = self._heap, heapq.heappop
        # Events allocate many objects and few cycles, so garbage is collected less often.
        thresholds = gc.get_threshold()
        gc.set_threshold(200_000, 20, 100)
        try:
            while heap and not self._stopped:
                self.now, _, callback = pop(heap)
                self.events += 1
                callback(self.now)
        finally:
            gc.set_threshold(*thresholds)
        return self._stopped

    def stop(self) -> None:
        """Stops after the current event."""
        self._stopped = True


class FifoResource:
    """A resource that serves one request at a time, in order: a link, a server, a queue."""

    def __init__(self) -> None:
        self.free_at = 0.0

    def reserve(self, time_s: float, seconds: float) -> float:
        """Returns the end time of a request made at `time_s`."""
        begins = time_s if time_s > self.free_at else self.free_at
        self.free_at = begins + seconds
        return self.free_at


class SharedCores:
    """Cores of a machine, shared evenly by more processes than cores."""

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
        """Performs `seconds` of work from `time_s` on; calls `then` with the end time.

        With one core per process the end is known immediately, and `then` is called before the
        timeline reaches it.
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
        """Schedules the end of the next task, assuming that no task starts or ends before."""
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
