"""How work is handed out while one strategy is in force: planned ahead, or granted push by push.

A pace runs up to a position of the current epoch and then drains; while it runs it turns the
workers' reports into further work. The coordinator owns the moments in between.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from paceline.protocol.clock import Push, make_clock
from paceline.protocol.history import History
from paceline.protocol.ledger import EVERYBODY, Entry, Ledger
from paceline.protocol.messages import (
    Advanced,
    Apply,
    Clip,
    Go,
    Lease,
    Message,
    Part,
    Pushed,
    Reduced,
    Steps,
    split_batch,
)
from paceline.specs.strategy import ParameterServer, Single, Strategy
from paceline.specs.sync import Gba

PLAN_AHEAD_S = 2.0
"""Planned work is kept this many seconds ahead of the slowest worker."""

FIRST_PLAN_BATCHES = 8
"""How far to plan before the workers' speed is known."""


@dataclass(frozen=True)
class Tell:
    worker: int
    message: Message


@dataclass(frozen=True)
class TellServers:
    """To the servers that the strategy in force uses: the first `servers` of those launched."""

    servers: int
    message: Message


Order = Tell | TellServers


class Pace(Protocol):
    drained: bool
    drain_s: float
    version: int
    """What servers must have applied before the state can be exported."""

    def run_to(self, stop: int, now: float) -> list[Order]:
        """Hand out the epoch's positions up to `stop`."""
        ...

    def on_report(self, report: Message, now: float) -> list[Order]: ...


class PlannedPace:
    """All workers share every global batch; blocks of batches are planned well ahead."""

    version = 0

    def __init__(
        self,
        *,
        workers: int,
        batch: int,
        ledger: Ledger,
        history: History,
        weights: tuple[int, ...] | None = None,
    ) -> None:
        self._workers = workers
        self._batch = batch
        self._ledger = ledger
        self._history = history
        self._weights = weights
        self.drained = True
        self.drain_s = 0.0

    def run_to(self, stop: int, now: float) -> list[Order]:
        start = self._ledger.frontier
        self._stop = stop
        self._blocks: list[Entry] = []
        self._at = [start] * self._workers
        self._slowest = start
        self._ahead = FIRST_PLAN_BATCHES * self._batch
        self._began = (now, start)
        self._first_idle: float | None = None
        self._planned = start
        self.drained = False
        return self._plan()

    def _plan(self) -> list[Order]:
        orders: list[Order] = []
        while self._planned < self._stop and self._planned - self._slowest < self._ahead:
            # Two blocks within the horizon: one is worked on while the next lies ready.
            batches = max(1, self._ahead // (2 * self._batch))
            entry = self._ledger.take(EVERYBODY, batches * self._batch, self._stop)
            assert entry is not None
            self._blocks.append(entry)
            self._planned = entry.hi
            steps = Steps(self._ledger.epoch, entry.lo, entry.hi, self._batch, self._weights)
            orders.extend(Tell(worker, steps) for worker in range(self._workers))
        return orders

    def on_report(self, report: Message, now: float) -> list[Order]:
        if not isinstance(report, Advanced):
            raise AssertionError(f"{type(report).__name__} under planned work")
        self._at[report.worker] = report.position
        if report.position == self._stop and self._first_idle is None:
            self._first_idle = now
        slowest = min(self._at)
        if slowest == self._slowest:
            return []
        batches_before = -(-self._slowest // self._batch)
        self._history.updates += -(-slowest // self._batch) - batches_before
        self._history.samples += slowest - self._slowest
        self._slowest = slowest
        while self._blocks and self._blocks[0].hi <= slowest:
            self._ledger.acknowledge(self._blocks.pop(0).id, EVERYBODY)
        if slowest == self._stop:
            self.drained = True
            self.drain_s = now - (self._first_idle if self._first_idle is not None else now)
            return []
        began, start = self._began
        if now > began:
            per_s = (slowest - start) / (now - began)
            self._ahead = max(2 * self._batch, int(per_s * PLAN_AHEAD_S))
        return self._plan()


class ServerPace:
    """Parameter servers: every push is answered with an order to the shards and the next lease."""

    def __init__(
        self,
        *,
        spec: ParameterServer,
        workers: int,
        batch: int,
        ledger: Ledger,
        history: History,
        clip: float | None,
    ) -> None:
        self._spec = spec
        self._workers = workers
        self._servers = spec.servers_for(workers)
        self._batch = batch
        self._ledger = ledger
        self._history = history
        # A single gradient is clipped by the worker that knows the whole of it.
        self._clip = clip if spec.sync.aggregates else None
        self._clock = make_clock(spec.sync, workers)
        self._share = split_batch(batch, workers)
        self._leases: dict[int, Lease] = {}
        self._squares: dict[int, dict[int, float]] = {}
        self._last_staleness = [-1] * workers
        self.version = 0
        self.drained = True
        self.drain_s = 0.0

    def run_to(self, stop: int, now: float) -> list[Order]:
        self._stop = stop
        self._first_idle: float | None = None
        self.drained = False
        self._clock.begin()
        return self._go_on(list(range(self._workers)), now)

    def _go_on(self, workers: list[int], now: float) -> list[Order]:
        """Grant leases; when nobody is at work any more, give up what the clock holds back."""
        orders = self._grant(workers, now)
        while not self._leases:
            verdict = self._clock.flush()
            if not verdict.updates and not verdict.release:
                self.drained = True
                self.drain_s = now - (self._first_idle if self._first_idle is not None else now)
                break
            orders.extend(self._update(pushes) for pushes in verdict.updates)
            orders.extend(self._grant(verdict.release, now))
        return orders

    def _grant(self, workers: list[int], now: float) -> list[Order]:
        """The next lease for each of these workers, as far as there is work left."""
        if not workers:
            return []
        leases = self._lease_round() if self._clock.in_rounds else self._lease_each(workers)
        orders: list[Order] = []
        for worker, lease in leases:
            self._leases[worker] = lease
            self._history.max_lag = max(self._history.max_lag, self._clock.lag(worker))
            orders.append(Tell(worker, Go(self.version, lease, self._last_staleness[worker])))
        if len(leases) < len(workers) and self._first_idle is None:
            self._first_idle = now
        return orders

    def _share_of_batch(self, lease: Lease) -> float:
        """Samples over the size of their global batch; a lease may lie across two of them.

        The last batch of an epoch may be short: its samples weigh more, as they do when one
        process takes the mean over it.
        """
        share = 0.0
        lo = lease.lo
        while lo < lease.hi:
            start = lo - lo % self._batch
            stop = min(start + self._batch, self._ledger.samples)
            share += (min(stop, lease.hi) - lo) / (stop - start)
            lo = stop
        return share

    def _lease_each(self, workers: list[int]) -> list[tuple[int, Lease]]:
        leases = []
        for worker in workers:
            share = self._share[worker + 1] - self._share[worker]
            entry = self._ledger.take(worker, share, self._stop)
            if entry is not None:
                lease = Lease(entry.id, self._ledger.epoch, entry.lo, entry.hi, entry.lo, entry.hi)
                leases.append((worker, lease))
        return leases

    def _lease_round(self) -> list[tuple[int, Lease]]:
        entry = self._ledger.take(EVERYBODY, self._batch, self._stop)
        if entry is None:
            return []
        cuts = split_batch(entry.hi - entry.lo, self._workers)
        epoch = self._ledger.epoch
        return [
            (
                w,
                Lease(
                    entry.id, epoch, entry.lo, entry.hi, entry.lo + cuts[w], entry.lo + cuts[w + 1]
                ),
            )
            for w in range(self._workers)
        ]

    def on_report(self, report: Message, now: float) -> list[Order]:
        if isinstance(report, Reduced):
            return self._on_reduced(report)
        if not isinstance(report, Pushed):
            raise AssertionError(f"{type(report).__name__} under a parameter server")
        lease = self._leases.get(report.worker)
        if lease is None or lease.id != report.lease:
            return []  # Said twice, or of a lease that is no longer this worker's.
        del self._leases[report.worker]
        share = self._share_of_batch(lease)
        push = Push(report.worker, report.handle, report.samples, share, report.base)
        verdict = self._clock.pushed(push, now)
        orders: list[Order] = [self._update(pushes) for pushes in verdict.updates]
        if not self._clock.in_rounds:
            self._ledger.acknowledge(lease.id, report.worker)
        elif verdict.updates:
            self._ledger.acknowledge(lease.id, EVERYBODY)
        if verdict.release or not self._leases:
            orders.extend(self._go_on(verdict.release, now))
        return orders

    def _update(self, pushes: list[Push]) -> Order:
        samples = sum(p.samples for p in pushes)
        used = [p for p in pushes if p.samples]
        stale = [self.version - p.base for p in used]
        for push, staleness in zip(used, stale, strict=True):
            self._last_staleness[push.worker] = staleness
            self._history.staleness[staleness] += 1
        self.version += 1
        self._history.updates += 1
        self._history.samples += samples
        decay = [self._decay_of(s) for s in stale]
        parts = tuple(
            Part(p.worker, p.handle, d * p.samples / samples)
            for p, d in zip(used, decay, strict=True)
        )
        # In rounds the shares are of one batch and make it whole, whatever their rounding.
        share = 1.0 if self._clock.in_rounds else sum(p.share for p in pushes)
        scale = self._spec.scale_of(share, max(stale))
        return TellServers(self._servers, Apply(self.version, parts, scale, self._clip))

    def _decay_of(self, staleness: int) -> float:
        sync = self._spec.sync
        return sync.weight_of(staleness) if isinstance(sync, Gba) else 1.0

    def _on_reduced(self, report: Reduced) -> list[Order]:
        squares = self._squares.setdefault(report.version, {})
        squares[report.server] = report.square
        if len(squares) < self._servers:
            return []
        del self._squares[report.version]
        assert self._clip is not None
        # In the order of the servers, so that the sum does not depend on who came first.
        norm = sum(squares[s] for s in sorted(squares)) ** 0.5
        # The same formula as torch.nn.utils.clip_grad_norm_.
        factor = min(1.0, self._clip / (norm + 1e-6))
        return [TellServers(self._servers, Clip(report.version, factor))]


def make_pace(
    strategy: Strategy,
    *,
    workers: int,
    batch: int,
    ledger: Ledger,
    history: History,
    clip: float | None,
) -> Pace:
    if isinstance(strategy, ParameterServer):
        return ServerPace(
            spec=strategy,
            workers=workers,
            batch=batch,
            ledger=ledger,
            history=history,
            clip=clip,
        )
    weights = (1,) + (0,) * (workers - 1) if isinstance(strategy, Single) else None
    return PlannedPace(
        workers=workers, batch=batch, ledger=ledger, history=history, weights=weights
    )
