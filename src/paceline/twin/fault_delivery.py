"""Injected delivery faults: messages that arrive late, twice or never."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

from paceline.twin.timeline import Callback, Timeline


class UnreliableDelivery:
    """Delays, repeats or loses messages; each connection keeps its order."""

    LATE, TWICE, LOST = 0.3, 0.1, 0.004

    def __init__(
        self,
        timeline: Timeline,
        rng: random.Random,
        faults: Sequence[str],
        lost: Callable[[int], None],
    ) -> None:
        self._timeline, self._rng, self._faults = timeline, rng, faults
        self._lost = lost
        self._last: dict[object, float] = {}
        self._broken: set[int] = set()
        """Workers whose control connection is broken."""

    def to_coordinator(self, worker: int, at_s: float, callback: Callback) -> None:
        if self._loses(worker):
            return
        self._deliver(("up", worker), at_s, callback)
        if "repeat" in self._faults and self._rng.random() < self.TWICE:
            self._deliver(("up", worker), at_s + self._rng.expovariate(2.0), callback)

    def to_worker(self, worker: int, at_s: float, callback: Callback) -> None:
        if not self._loses(worker):
            self._deliver(("down", worker), at_s, callback)

    def to_servers(self, at_s: float, callback: Callback) -> None:
        self._deliver("order", at_s, callback)
        if "repeat" in self._faults and self._rng.random() < self.TWICE:
            self._deliver("order", at_s + self._rng.expovariate(2.0), callback)

    def push(self, worker: int, at_s: float, gradient: Callback, notification: Callback) -> None:
        self._deliver(("push", worker), at_s, gradient)
        self.to_coordinator(worker, at_s, notification)

    def _loses(self, worker: int) -> bool:
        """A lost message means a broken connection: nothing passes it afterwards."""
        if worker in self._broken:
            return True
        if "lose" in self._faults and self._rng.random() < self.LOST:
            self._broken.add(worker)
            self._lost(worker)
            return True
        return False

    def _deliver(self, connection: object, at_s: float, callback: Callback) -> None:
        if "delay" in self._faults and self._rng.random() < self.LATE:
            at_s += self._rng.expovariate(3.0)
        # Bytes of one connection do not overtake each other.
        at_s = max(at_s, self._last.get(connection, 0.0))
        self._last[connection] = at_s
        self._timeline.schedule(at_s, callback)
