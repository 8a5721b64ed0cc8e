"""How work is handed out while one strategy is in force: planned ahead, or granted push by push.

A pace runs up to a position of the current epoch and then drains; while it runs it turns the
workers' reports into further work. The coordinator owns the moments in between.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from itertools import pairwise
from typing import Protocol

from paceline.protocol.block_plan import RowRange, merge_ranges
from paceline.protocol.clock import Push, make_clock
from paceline.protocol.history import History
from paceline.protocol.ledger import ALL_WORKERS, LeaseEntry, Ledger
from paceline.protocol.messages import (
    ApplyUpdate,
    ClipFactor,
    GradientPushed,
    GradientRef,
    Lease,
    LeaseGranted,
    Message,
    PlannedSteps,
    ShardSqNorm,
    StepsApplied,
    StepStats,
    split_batch,
)
from paceline.protocol.record import record
from paceline.specs.strategy import AllReduce, Grouped, ParameterServer, Strategy
from paceline.specs.sync import Gba

PLAN_AHEAD_S = 2.0
"""Planned work is kept this many seconds ahead of the slowest worker."""

FIRST_PLAN_BATCHES = 8
"""How far to plan before the workers' speed is known."""


@record
class Send:
    worker: int
    message: Message


@record
class SendToServers:
    """To the servers that the strategy in force uses: the first `servers` of those launched."""

    servers: int
    message: Message


OutgoingMessage = Send | SendToServers


class Pace(Protocol):
    drained: bool
    drain_s: float
    version: int
    """What servers must have applied before the state can be exported."""

    def run_to(self, stop: int, now: float) -> list[OutgoingMessage]:
        """Hand out the epoch's positions up to `stop`."""
        ...

    def on_report(self, report: Message, now: float) -> list[OutgoingMessage]: ...

    def stop_early(self) -> None:
        """Hand out no more than must be, up to the end of a global batch, and then drain."""
        ...

    def exclude_worker(self, worker: int) -> None:
        """Give this worker no more work, where the strategy can do without it."""
        ...


class SpeedBalancer:
    """Shares in proportion to the workers' measured speed, kept current while they work."""

    MEMORY = 0.5
    """How much of the old speed stays when a new one is measured."""

    def __init__(self, workers: int) -> None:
        self._speed: list[float | None] = [None] * workers

    def update(self, worker: int, measured: StepStats) -> None:
        if measured.samples and measured.busy_s > 0:
            fresh = measured.samples / measured.busy_s
            old = self._speed[worker]
            mixed = fresh if old is None else self.MEMORY * old + (1 - self.MEMORY) * fresh
            self._speed[worker] = mixed

    def weights(self) -> tuple[int, ...] | None:
        """None until everybody's speed is known: shares are even until then."""
        known = [s for s in self._speed if s is not None]
        if len(known) < len(self._speed):
            return None
        # At least one part in a thousand: a share of nothing could never be measured again.
        return tuple(max(1, round(1000 * s / max(known))) for s in known)


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
        balance: bool = False,
    ) -> None:
        self._balance = SpeedBalancer(workers) if balance else None
        self._workers = workers
        self._batch = batch
        self._ledger = ledger
        self._history = history
        self._weights = weights
        self._excluded: set[int] = set()
        self.drained = True
        self.drain_s = 0.0

    def run_to(self, stop: int, now: float) -> list[OutgoingMessage]:
        start = self._ledger.frontier
        self._stop = stop
        self._blocks: list[LeaseEntry] = []
        self._at = [start] * self._workers
        self._workers_at = Counter({start: self._workers})
        """How many workers stand at each position: the slowest is found without asking all."""
        self._slowest = start
        self._ahead = FIRST_PLAN_BATCHES * self._batch
        self._began = (now, start)
        self._first_idle: float | None = None
        self._planned = start
        self.drained = False
        return self._plan()

    def _plan(self) -> list[OutgoingMessage]:
        orders: list[OutgoingMessage] = []
        while self._planned < self._stop and self._planned - self._slowest < self._ahead:
            # Two blocks within the horizon: one is worked on while the next lies ready.
            batches = max(1, self._ahead // (2 * self._batch))
            entry = self._ledger.take(ALL_WORKERS, batches * self._batch, self._stop)
            assert entry is not None
            self._blocks.append(entry)
            self._planned = entry.hi
            weights = self._shares()
            steps = PlannedSteps(self._ledger.epoch, entry.lo, entry.hi, self._batch, weights)
            orders.extend(Send(w, s) for w, s in enumerate(self._assign_rows(entry, steps)))
        return orders

    def _assign_rows(self, entry: LeaseEntry, steps: PlannedSteps) -> list[PlannedSteps]:
        """The same steps for everybody; with each worker's own rows where they read in blocks."""
        if not self._ledger.deals_rows:
            return [steps] * self._workers
        drawn: list[list[RowRange]] = [[] for _ in range(self._workers)]
        # Batch by batch, so that it does not matter how many are planned at a time.
        for start in range(entry.lo, entry.hi, self._batch):
            count = min(self._batch, entry.hi - start)
            cuts = split_batch(count, self._workers, steps.batch_weights)
            for worker, (lo, hi) in enumerate(pairwise(cuts)):
                drawn[worker].extend(self._ledger.draw_rows(entry.id, worker, hi - lo))
        return [
            dataclasses.replace(
                steps, pieces=merge_ranges(pieces), ahead=self._ledger.lookahead(worker)
            )
            for worker, pieces in enumerate(drawn)
        ]

    def _shares(self) -> tuple[int, ...] | None:
        weights = self._balance.weights() if self._balance else self._weights
        if not self._excluded:
            return weights
        base = weights or (1,) * self._workers
        return tuple(0 if w in self._excluded else share for w, share in enumerate(base))

    def stop_early(self) -> None:
        self._stop = self._planned

    def exclude_worker(self, worker: int) -> None:
        if len(self._excluded) + 1 < self._workers:
            self._excluded.add(worker)

    def _advance_worker(self, worker: int, position: int) -> None:
        before = self._at[worker]
        self._at[worker] = position
        self._workers_at[before] -= 1
        if not self._workers_at[before]:
            del self._workers_at[before]
        self._workers_at[position] += 1

    def on_report(self, report: Message, now: float) -> list[OutgoingMessage]:
        if not isinstance(report, StepsApplied):
            raise AssertionError(f"{type(report).__name__} under planned work")
        self._advance_worker(report.worker, report.position)
        if self._balance is not None:
            self._balance.update(report.worker, report.measured)
        if report.position == self._stop and self._first_idle is None:
            self._first_idle = now
        slowest = min(self._workers_at)
        if slowest == self._slowest:
            return []
        batches_before = -(-self._slowest // self._batch)
        self._history.updates += -(-slowest // self._batch) - batches_before
        self._history.add_samples(slowest - self._slowest)
        self._slowest = slowest
        while self._blocks and self._blocks[0].hi <= slowest:
            self._ledger.acknowledge(self._blocks.pop(0).id, ALL_WORKERS)
        if slowest == self._stop:
            self.drained = True
            self.drain_s = now - (self._first_idle if self._first_idle is not None else now)
            return []
        began, start = self._began
        if now > began:
            per_s = (slowest - start) / (now - began)
            self._ahead = max(2 * self._batch, int(per_s * PLAN_AHEAD_S))
        return self._plan()


class PushPace:
    """Parameter servers: every push is answered with an order to the shards and the next lease.

    Workers push in units: each by itself, or a group as one, its first worker for all of it.
    """

    def __init__(
        self,
        *,
        spec: ParameterServer,
        workers: int,
        batch: int,
        ledger: Ledger,
        history: History,
        clip: float | None,
        units: tuple[tuple[int, ...], ...] = (),
    ) -> None:
        self._spec = spec
        self._push_units = units or tuple((w,) for w in range(workers))
        self._unit_of = {w: u for u, members in enumerate(self._push_units) for w in members}
        self._workers = workers
        self._servers = spec.servers_for(workers)
        self._batch = batch
        self._ledger = ledger
        self._history = history
        # A single gradient is clipped by the worker that knows the whole of it.
        self._clip = clip if spec.sync.aggregates else None
        self._clock = make_clock(spec.sync, len(self._push_units))
        cuts = split_batch(batch, workers)
        self._share = [sum(cuts[w + 1] - cuts[w] for w in members) for members in self._push_units]
        # A unit that computes ahead holds two leases at a time.
        self._leases: dict[tuple[int, int], Lease] = {}
        self._came: dict[int, dict[int, GradientPushed]] = {}
        self._squares: dict[int, dict[int, float]] = {}
        self._last_staleness = [-1] * len(self._push_units)
        self.version = 0
        self.drained = True
        self.drain_s = 0.0

    def run_to(self, stop: int, now: float) -> list[OutgoingMessage]:
        self._stop = stop
        self._first_idle: float | None = None
        self.drained = False
        self._clock.begin()
        ahead = 2 if self._spec.overlap else 1
        return self._grant_or_drain(list(range(len(self._push_units))) * ahead, now)

    def _grant_or_drain(self, units: list[int], now: float) -> list[OutgoingMessage]:
        """Grant leases; when nobody is at work any more, give up what the clock holds back."""
        orders = self._grant(units, now)
        while not self._leases:
            verdict = self._clock.flush()
            if not verdict.updates and not verdict.release:
                self.drained = True
                self.drain_s = now - (self._first_idle if self._first_idle is not None else now)
                break
            orders.extend(self._update(pushes) for pushes in verdict.updates)
            orders.extend(self._grant(verdict.release, now))
        return orders

    def _grant(self, units: list[int], now: float) -> list[OutgoingMessage]:
        """The next lease for each of these units, as far as there is work left."""
        orders: list[OutgoingMessage] = []
        if self._clock.synchronous and units:
            entry = self._ledger.take(ALL_WORKERS, self._batch, self._stop)
            if entry is not None:
                orders.extend(self._lease_to_unit(entry, tuple(range(self._workers))))
        elif not self._clock.synchronous:
            history = self._history
            for unit in units:
                entry = self._ledger.take(unit, self._lease_size(unit), self._stop)
                if entry is not None:
                    lag = self._clock.lag(unit)
                    if lag > history.max_lag:
                        history.max_lag = lag
                    members = self._push_units[unit]
                    if len(members) == 1 and not self._ledger.deals_rows:
                        orders.append(self._lease_to_one(entry, members[0], unit))
                    else:
                        orders.extend(self._lease_to_unit(entry, members))
        if units and not orders and self._first_idle is None:
            self._first_idle = now
        return orders

    def _lease_size(self, unit: int) -> int:
        """A unit's share; the last one takes a small rest along, or BatchNorm might see one row."""
        share = self._share[unit]
        rest = self._stop - self._ledger.leased_up_to - share
        return share + rest if 0 < rest < share // 2 else share

    def _lease_to_one(self, entry: LeaseEntry, worker: int, unit: int) -> OutgoingMessage:
        """An entry of the ledger for one worker alone."""
        lease = Lease(entry.id, self._ledger.epoch, entry.lo, entry.hi, entry.lo, entry.hi)
        self._leases[worker, entry.id] = lease
        return Send(worker, LeaseGranted(self.version, lease, self._last_staleness[unit]))

    def _lease_to_unit(self, entry: LeaseEntry, members: tuple[int, ...]) -> list[OutgoingMessage]:
        """Share one entry of the ledger among workers that act together."""
        orders: list[OutgoingMessage] = []
        cuts = split_batch(entry.hi - entry.lo, len(members))
        for worker, (lo, hi) in zip(members, pairwise(cuts), strict=True):
            pieces = self._ledger.draw_rows(entry.id, worker, hi - lo)
            lease = Lease(
                entry.id,
                self._ledger.epoch,
                entry.lo,
                entry.hi,
                entry.lo + lo,
                entry.lo + hi,
                pieces,
                self._ledger.lookahead(worker),
            )
            self._leases[worker, lease.id] = lease
            staleness = self._last_staleness[self._unit_of[worker]]
            orders.append(Send(worker, LeaseGranted(self.version, lease, staleness)))
        return orders

    def stop_early(self) -> None:
        ahead = -(-self._ledger.leased_up_to // self._batch) * self._batch
        self._stop = min(self._stop, ahead)

    def exclude_worker(self, worker: int) -> None:
        return  # A slow worker holds nobody up here.

    def _share_of_batch(self, lo: int, hi: int) -> float:
        """Samples over the size of their global batch; a lease may lie across two of them.

        The last batch of an epoch may be short: its samples weigh more, as they do when one
        process takes the mean over it.
        """
        start = lo - lo % self._batch
        stop = min(start + self._batch, self._ledger.samples)
        if hi <= stop:
            return (hi - lo) / (stop - start)
        share = 0.0
        while lo < hi:
            start = lo - lo % self._batch
            stop = min(start + self._batch, self._ledger.samples)
            share += (min(stop, hi) - lo) / (stop - start)
            lo = stop
        return share

    def on_report(self, report: Message, now: float) -> list[OutgoingMessage]:
        if not isinstance(report, GradientPushed):
            if isinstance(report, ShardSqNorm):
                return self._on_reduced(report)
            raise AssertionError(f"{type(report).__name__} under a parameter server")
        lease = self._leases.pop((report.worker, report.lease), None)
        if lease is None:
            return []  # Said twice, or of a lease that is no longer this worker's.
        unit = self._unit_of[report.worker]
        chief, samples = report, report.samples
        if len(self._push_units[unit]) > 1:
            came = self._came.setdefault(unit, {})
            came[report.worker] = report
            if len(came) < len(self._push_units[unit]):
                return []
            del self._came[unit]
            chief = came[self._push_units[unit][0]]
            samples = sum(p.samples for p in came.values())
        in_rounds = self._clock.synchronous
        lo, hi = (lease.lo, lease.hi) if in_rounds else (lease.start, lease.stop)
        push = Push(unit, chief.handle, samples, self._share_of_batch(lo, hi), chief.base)
        verdict = self._clock.on_push(push, now)
        orders: list[OutgoingMessage] = [self._update(pushes) for pushes in verdict.updates]
        if not in_rounds:
            self._ledger.acknowledge(lease.id, unit)
        elif verdict.updates:
            self._ledger.acknowledge(lease.id, ALL_WORKERS)
        if verdict.release or not self._leases:
            orders += self._grant_or_drain(verdict.release, now)
        return orders

    def _update(self, pushes: list[Push]) -> OutgoingMessage:
        if len(pushes) == 1 and pushes[0].samples and not self._clock.synchronous:
            return self._single_push_update(pushes[0])
        samples = sum(p.samples for p in pushes)
        used = [p for p in pushes if p.samples]
        stale = [self.version - p.base for p in used]
        for push, staleness in zip(used, stale, strict=True):
            self._last_staleness[push.worker] = staleness
            self._history.staleness[staleness] += 1
        self.version += 1
        self._history.updates += 1
        self._history.add_samples(samples)
        decay = [self._decay_of(s) for s in stale]
        parts = tuple(
            GradientRef(self._push_units[p.worker][0], p.handle, d * p.samples / samples)
            for p, d in zip(used, decay, strict=True)
        )
        # In rounds the shares are of one batch and make it whole, whatever their rounding.
        share = 1.0 if self._clock.synchronous else sum(p.share for p in pushes)
        scale = self._spec.lr_scale_for(share, max(stale))
        return SendToServers(self._servers, ApplyUpdate(self.version, parts, scale, self._clip))

    def _single_push_update(self, push: Push) -> OutgoingMessage:
        """The same for a single gradient, which is what asynchronous servers do all the time."""
        staleness = self.version - push.base
        self._last_staleness[push.worker] = staleness
        self._history.staleness[staleness] += 1
        self.version += 1
        self._history.updates += 1
        self._history.add_samples(push.samples)
        part = GradientRef(self._push_units[push.worker][0], push.handle, self._decay_of(staleness))
        scale = self._spec.lr_scale_for(push.share, staleness)
        return SendToServers(self._servers, ApplyUpdate(self.version, (part,), scale, self._clip))

    def _decay_of(self, staleness: int) -> float:
        sync = self._spec.sync
        return sync.weight_of(staleness) if isinstance(sync, Gba) else 1.0

    def _on_reduced(self, report: ShardSqNorm) -> list[OutgoingMessage]:
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
        return [SendToServers(self._servers, ClipFactor(report.version, factor))]


def make_pace(
    strategy: Strategy,
    *,
    workers: int,
    batch: int,
    ledger: Ledger,
    history: History,
    clip: float | None,
    groups: tuple[tuple[int, ...], ...] = (),
) -> Pace:
    if isinstance(strategy, Grouped):
        return PushPace(
            spec=ParameterServer(servers=strategy.servers, lr_scale=strategy.lr_scale),
            workers=workers,
            batch=batch,
            ledger=ledger,
            history=history,
            clip=clip,
            units=groups,
        )
    if isinstance(strategy, ParameterServer):
        return PushPace(
            spec=strategy,
            workers=workers,
            batch=batch,
            ledger=ledger,
            history=history,
            clip=clip,
        )
    return PlannedPace(
        workers=workers,
        batch=batch,
        ledger=ledger,
        history=history,
        weights=strategy.batch_weights(workers),
        balance=isinstance(strategy, AllReduce) and strategy.balance == "auto",
    )
