"""How work is distributed while one strategy is active, and the pace that plans it ahead.

A pace runs up to a position of the current epoch and then drains; while it runs it turns the
workers' reports into further work. The coordinator owns the moments in between. A strategy's
`pace.py` chooses one: `PlannedPace` here, or `PushPace` of `paceline.protocol.push_pace`.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from itertools import pairwise
from typing import Protocol

from paceline.protocol.block_plan import RowRange, merge_ranges
from paceline.protocol.history import History
from paceline.protocol.ledger import ALL_WORKERS, LeaseEntry, Ledger
from paceline.protocol.messages import (
    Message,
    PlannedSteps,
    StepsApplied,
    StepStats,
    split_batch,
)
from paceline.protocol.record import record
from paceline.specs.strategy import WorkerGroups

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


@dataclasses.dataclass(frozen=True, kw_only=True)
class PaceContext:
    """What a strategy's `make_pace` is given when a phase begins."""

    workers: int
    batch: int
    ledger: Ledger
    history: History
    clip: float | None = None
    groups: WorkerGroups = ()


class Pace(Protocol):
    """What the coordinator needs of a strategy while it is active."""

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
        context: PaceContext,
        *,
        weights: tuple[int, ...] | None = None,
        balance: bool = False,
    ) -> None:
        """`weights` divide a batch in proportion; `balance` by measured speed instead."""
        self._balance = SpeedBalancer(context.workers) if balance else None
        self._workers = context.workers
        self._batch = context.batch
        self._ledger = context.ledger
        self._history = context.history
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
