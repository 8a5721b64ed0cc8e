"""A pace for parameter servers: each push is answered with an update and the next lease."""

from collections.abc import Callable
from dataclasses import dataclass, replace

from paceline.protocol.balance import split_batch
from paceline.protocol.block_plan import RowRanges
from paceline.protocol.clock import Clock, Push
from paceline.protocol.ledger import ALL_WORKERS, LeaseEntry
from paceline.protocol.messages import (
    ApplyUpdate,
    ClipFactor,
    GradientPushed,
    GradientRef,
    Lease,
    LeaseGranted,
    Message,
    ShardSqNorm,
)
from paceline.protocol.pace import (
    CoveredWork,
    OutgoingMessage,
    Pace,
    PaceContext,
    Send,
    SendToServers,
)
from paceline.protocol.staleness import StalenessMeter


@dataclass(frozen=True, kw_only=True)
class PushRules:
    """Rules by which a strategy with parameter servers turns pushes into updates."""

    servers: int
    lr_scale: Callable[[float, int], float]
    """Learning-rate factor of an update, by its fraction of a global batch and its staleness."""
    corrects: bool = False
    """True if updates are corrected for staleness (`protocol.staleness`)."""
    gradient_weight: Callable[[int], float] = lambda staleness: 1.0
    """Weight of a gradient by its staleness in updates."""
    aggregates: bool = False
    """True if an update consists of the gradients of several units."""
    overlap: bool = False
    """True if a unit computes ahead and holds two leases at a time."""


class PushPace(Pace):
    """Answers every push with an order to the shards and the next lease.

    Workers push in units: individually, or as a group represented by its first worker.
    """

    def __init__(self, rules: PushRules, clock: Clock, context: PaceContext) -> None:
        """Creates a pace; `clock` counts units: the groups of the context, or single workers."""
        super().__init__(context)
        self._rules = rules
        self._clock = clock
        self._push_units = context.groups or tuple((w,) for w in range(context.workers))
        self._unit_of = {w: u for u, members in enumerate(self._push_units) for w in members}
        self._meter = StalenessMeter() if rules.corrects else None
        # A single gradient is clipped by its worker, which has all of it.
        self._clip = context.clip if rules.aggregates else None
        cuts = split_batch(context.batch, context.workers)
        self._share = [sum(cuts[w + 1] - cuts[w] for w in members) for members in self._push_units]
        self._leases: dict[tuple[int, int], Lease] = {}
        self._arrived: dict[int, dict[int, GradientPushed]] = {}
        self._rows: dict[int, RowRanges] = {}
        """Rows of the gradients that have arrived, by unit."""
        self._pushed: dict[tuple[int, int], tuple[int, int, RowRanges]] = {}
        """Positions and rows of each push, by unit and handle, until it is applied."""
        self._squares: dict[int, dict[int, float]] = {}
        self._view = context.view
        self._clipped = 0
        """Last version whose norm is complete; copies of a shard report it once more."""
        self._last_staleness = [-1] * len(self._push_units)
        self._idle: set[int] = set()
        """Units that wait because no lease was left."""
        self._lost: set[int] = set()

    def run_to(self, stop: int, now: float) -> list[OutgoingMessage]:
        self._stop = stop
        self._first_idle = None
        self.drained = False
        self._clock.begin()
        self._idle.clear()
        units = list(range(len(self._push_units)))
        return self._grant_or_drain(units * (2 if self._rules.overlap else 1), now)

    def _grant_or_drain(self, units: list[int], now: float) -> list[OutgoingMessage]:
        """Grants leases; if no worker is active, releases what the clock holds back."""
        orders = self._grant(units, now)
        while not self._leases:
            verdict = self._clock.flush()
            if not verdict.updates and not verdict.release:
                self._set_drained(now)
                break
            orders.extend(self._update(pushes) for pushes in verdict.updates)
            orders.extend(self._grant(verdict.release, now))
        return orders

    def _grant(self, units: list[int], now: float) -> list[OutgoingMessage]:
        """Grants the next lease to each of these units, if work is left."""
        orders: list[OutgoingMessage] = []
        if self._clock.synchronous and units:
            entry = self._ledger.take(ALL_WORKERS, self._batch, self._stop)
            if entry is not None:
                orders.extend(self._lease(entry, tuple(range(self._workers))))
        elif not self._clock.synchronous:
            history = self._history
            for unit in units:
                if unit in self._lost:
                    continue
                entry = self._ledger.take(unit, self._lease_size(unit), self._stop)
                if entry is None:
                    self._idle.add(unit)
                else:
                    self._idle.discard(unit)
                    lag = self._clock.lag(unit)
                    if lag > history.max_lag:
                        history.max_lag = lag
                    orders.extend(self._lease(entry, self._push_units[unit]))
        if units and not orders and self._first_idle is None:
            self._first_idle = now
        return orders

    def _lease_size(self, unit: int) -> int:
        """Returns a unit's share; the last lease includes a small remainder for BatchNorm."""
        share = self._share[unit]
        remainder = self._stop - self._ledger.leased_up_to - share
        return share + remainder if 0 < remainder < share // 2 else share

    def _lease(self, entry: LeaseEntry, members: tuple[int, ...]) -> list[OutgoingMessage]:
        """Splits an entry of the ledger across the workers of a unit."""
        orders: list[OutgoingMessage] = []
        ledger, start, stop = self._ledger, entry.lo, entry.hi
        cuts = split_batch(stop - start, len(members)) if len(members) > 1 else [0, stop - start]
        for worker, lo, hi in zip(members, cuts, cuts[1:], strict=False):
            lease = Lease(entry.id, ledger.epoch, start, stop, start + lo, start + hi)
            if ledger.layout is not None:
                pieces = ledger.draw_rows(entry.id, worker, hi - lo)
                lease = replace(lease, row_ranges=pieces, next_ranges=ledger.lookahead(worker))
            self._leases[worker, entry.id] = lease
            staleness = self._last_staleness[self._unit_of[worker]]
            orders.append(Send(worker, LeaseGranted(self.version, lease, staleness)))
        return orders

    def lose_worker(self, rank: int, now: float) -> list[OutgoingMessage] | None:
        unit = self._unit_of[rank]
        if self._clock.synchronous or len(self._push_units[unit]) > 1 or self.drained:
            return None
        self._lost.add(unit)
        self._leases = {key: lease for key, lease in self._leases.items() if key[0] != rank}
        self._ledger.return_all_of(unit)
        released = self._clock.forget(unit)
        # Workers that wait because no lease was left can take over the returned ones.
        return self._grant_or_drain([*released, *sorted(self._idle)], now)

    def suspend(self) -> list[OutgoingMessage]:
        orders: list[OutgoingMessage] = []
        if not self._clock.synchronous:
            # These gradients are acknowledged. In rounds, the whole lease is computed again.
            orders = [self._update(pushes) for pushes in self._clock.flush().updates]
        self._leases.clear()
        self._arrived.clear()
        self._rows.clear()
        self._pushed.clear()
        self._ledger.return_all()
        self.drained = True
        return orders

    def stop_early(self) -> None:
        ahead = -(-self._ledger.leased_up_to // self._batch) * self._batch
        self._stop = min(self._stop, ahead)

    def _share_of_batch(self, lo: int, hi: int) -> float:
        """Returns the fraction of the global batch; a lease may span two batches.

        The last batch of an epoch may be short; its samples then weigh more, as in the mean of a
        single process.
        """
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
            raise AssertionError(f"unexpected {type(report).__name__} with a parameter server")
        lease = self._leases.pop((report.worker, report.lease), None)
        if lease is None:
            return []  # A duplicate, or for a lease that the worker no longer holds.
        unit = self._unit_of[report.worker]
        leader, samples = report, report.samples
        if lease.row_ranges:
            self._rows[unit] = (*self._rows.get(unit, ()), *lease.row_ranges)
        if len(self._push_units[unit]) > 1:
            arrived = self._arrived.setdefault(unit, {})
            arrived[report.worker] = report
            if len(arrived) < len(self._push_units[unit]):
                return []
            del self._arrived[unit]
            leader = arrived[self._push_units[unit][0]]
            samples = sum(p.samples for p in arrived.values())
        in_rounds = self._clock.synchronous
        lo, hi = (lease.lo, lease.hi) if in_rounds else (lease.start, lease.stop)
        push = Push(unit, leader.handle, samples, self._share_of_batch(lo, hi), leader.base)
        self._pushed[unit, push.handle] = (lo, hi, self._rows.pop(unit, ()))
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
        history, rules = self._history, self._rules
        single = len(pushes) == 1
        samples = pushes[0].samples if single else sum([p.samples for p in pushes])
        most_stale, parts, covers = 0, [], []
        for push in pushes:
            lo, hi, rows = self._pushed.pop((push.worker, push.handle))
            if push.samples:
                staleness = self.version - push.base
                self._last_staleness[push.worker] = staleness
                history.staleness[staleness] += 1
                if staleness > most_stale:
                    most_stale = staleness
                weight = rules.gradient_weight(staleness)
                if not single:
                    weight = weight * push.samples / samples
                parts.append(GradientRef(self._push_units[push.worker][0], push.handle, weight))
                covers.append(CoveredWork(lo, hi, staleness, rows))
        self.version += 1
        history.updates += 1
        history.add_samples(samples)
        # In rounds, the shares belong to one batch and sum up to 1 regardless of rounding.
        share = pushes[0].share if single else sum([p.share for p in pushes])
        if self._clock.synchronous:
            share = 1.0
        fraction = self._meter.on_update(pushes, share) if self._meter is not None else None
        scale = rules.lr_scale(share, most_stale) if fraction is None else 1.0
        update = ApplyUpdate(self.version, tuple(parts), scale, self._clip, fraction, self._view)
        return SendToServers(rules.servers, update, tuple(covers))

    def _on_reduced(self, report: ShardSqNorm) -> list[OutgoingMessage]:
        if not self._clipped < report.version <= self.version:
            return []  # From another copy of the shard, perhaps for an earlier phase.
        squares = self._squares.setdefault(report.version, {})
        squares[report.server] = report.square
        if len(squares) < self._rules.servers:
            return []
        del self._squares[report.version]
        self._clipped = report.version
        assert self._clip is not None
        # In the order of the servers, so that the sum does not depend on the order of arrival.
        norm = sum(squares[s] for s in sorted(squares)) ** 0.5
        # The same formula as torch.nn.utils.clip_grad_norm_.
        factor = min(1.0, self._clip / (norm + 1e-6))
        return [SendToServers(self._rules.servers, ClipFactor(report.version, factor, self._view))]
