"""Distribution of work while a strategy is active, and a pace that plans it ahead.

A pace runs up to a position of the current epoch and then drains; while it runs, it turns the
workers' reports into further work. The coordinator controls the time in between. A strategy's
`pace.py` chooses one: `PlannedPace` here, or `PushPace` of `paceline.protocol.push_pace`.
"""

import dataclasses
from abc import ABC, abstractmethod
from collections import deque
from itertools import pairwise

from paceline.protocol.balance import SpeedBalancer, split_batch
from paceline.protocol.block_plan import RowRange, RowRanges, merge_ranges
from paceline.protocol.history import History
from paceline.protocol.ledger import ALL_WORKERS, LeaseEntry, Ledger
from paceline.protocol.messages import (
    Message,
    PlannedSteps,
    ShardSqNorm,
    StepsApplied,
    record,
)
from paceline.specs.strategy import Strategy, WorkerGroups

PLAN_AHEAD_S = 1.0
"""Planned work is kept this many seconds ahead of the slowest worker: two intervals of reports.
A change of strategy waits until it is done."""

BALANCE_AHEAD_S = 0.25
"""The same where shares follow measured speeds, because new shares wait too. Workers report at the
end of a block, half of this; a report and its reply need a few milliseconds."""

FIRST_PLAN_BATCHES = 8
"""Number of batches to plan before the workers' speed is known."""


@record
class Send:
    worker: int
    message: Message


@record
class CoveredWork:
    """Positions [lo, hi) of the epoch that an update contains."""

    lo: int
    hi: int
    staleness: int
    rows: RowRanges = ()


@record
class SendToServers:
    """Sends to the servers of the active strategy, which has this many shards."""

    servers: int
    message: Message
    covers: tuple[CoveredWork, ...] = ()
    """The work that an update contains."""
    holders: tuple[int, ...] = ()
    """Servers of the view that hold these shards; the coordinator fills it in."""


OutgoingMessage = Send | SendToServers


@dataclasses.dataclass(frozen=True, kw_only=True)
class PaceContext:
    """Arguments of a strategy's `make_pace` at the start of a phase."""

    workers: int
    batch: int
    ledger: Ledger
    history: History
    clip: float | None = None
    groups: WorkerGroups = ()
    speeds: tuple[float, ...] = ()
    """Samples per second of each worker, as far as they were measured; 0 if unknown."""
    view: int = 0
    """View in which servers load the state of this phase."""


class Pace(ABC):
    """Interface between the coordinator and the active strategy."""

    def __init__(self, context: PaceContext) -> None:
        self._workers, self._batch = context.workers, context.batch
        self._ledger, self._history = context.ledger, context.history
        self._first_idle: float | None = None
        self.version = 0
        """Version that servers must have applied before the state can be exported."""
        self.drained = True
        self.drain_s = 0.0
        self.planned_rows: list[tuple[int, RowRanges]] = []
        """Rows of planned work by its first position, for the journal, which takes them out."""

    @abstractmethod
    def run_to(self, stop: int, now: float) -> list[OutgoingMessage]:
        """Assigns the epoch's positions up to `stop`."""

    @abstractmethod
    def on_report(self, report: Message, now: float) -> list[OutgoingMessage]: ...

    @abstractmethod
    def stop_early(self) -> None:
        """Assigns only the rest of the current global batch, then drains."""

    def set_batch(self, batch: int) -> None:
        """Changes the global batch, between two epochs."""
        self._batch = batch

    def exclude_worker(self, worker: int) -> None:
        """Excludes a worker from further work, if a slow one blocks the others."""
        return

    def lose_worker(self, rank: int, now: float) -> list[OutgoingMessage] | None:
        """Continues without a worker until the next quiesce; None if the others need it."""
        return None

    def suspend(self) -> list[OutgoingMessage]:
        """Takes all work back because the view ends; what is applied stays applied."""
        self.drained = True
        return []

    def rewind(self, samples: int) -> None:
        """Continues from a state with this many samples of the run, after `suspend`."""
        return

    def _set_drained(self, now: float) -> None:
        self.drained = True
        self.drain_s = now - (self._first_idle if self._first_idle is not None else now)


class PlannedPace(Pace):
    """Splits every global batch across all workers; blocks of batches are planned ahead."""

    def __init__(
        self, context: PaceContext, *, weights: tuple[int, ...] | None = None, balance: bool = False
    ) -> None:
        """Creates a pace; `weights` set the shares of a batch, `balance` uses measured speeds."""
        super().__init__(context)
        self._balance = SpeedBalancer(context.workers, context.speeds) if balance else None
        self._ahead_s = BALANCE_AHEAD_S if balance else PLAN_AHEAD_S
        self._weights = weights
        self._excluded: set[int] = set()

    def run_to(self, stop: int, now: float) -> list[OutgoingMessage]:
        start = self._ledger.frontier
        self._stop = stop
        self._blocks: list[LeaseEntry] = []
        self._at = [start] * self._workers
        self._slowest, self._behind = start, self._workers
        """The lowest position of a worker, and the number of workers at this position."""
        self._ahead = FIRST_PLAN_BATCHES * self._batch
        self._progress = deque([(now, start)])
        self._first_idle = None
        self._planned = start
        self.drained = False
        return self._plan()

    def _plan(self) -> list[OutgoingMessage]:
        orders: list[OutgoingMessage] = []
        while self._planned < self._stop and self._planned - self._slowest < self._ahead:
            # Two blocks within the horizon: one in progress and the next one ready.
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
        """Returns the steps of each worker, with its rows if workers read in blocks."""
        if self._ledger.layout is None:
            return [steps] * self._workers
        drawn: list[list[RowRange]] = [[] for _ in range(self._workers)]
        # Batch by batch, so that the result does not depend on the number planned at a time.
        for start in range(entry.lo, entry.hi, self._batch):
            count = min(self._batch, entry.hi - start)
            cuts = split_batch(count, self._workers, steps.batch_weights)
            for worker, (lo, hi) in enumerate(pairwise(cuts)):
                rows = self._ledger.draw_rows(entry.id, worker, hi - lo)
                drawn[worker].extend(rows)
                self.planned_rows.append((entry.lo, rows))
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

    def rewind(self, samples: int) -> None:
        ledger, history = self._ledger, self._history
        began = ledger.epoch * ledger.samples
        before, after = history.samples - began, samples - began
        history.updates += -(-after // self._batch) - -(-before // self._batch)
        history.add_samples(after - before)
        ledger.rewind(after)

    def exclude_worker(self, worker: int) -> None:
        if len(self._excluded) + 1 < self._workers:
            self._excluded.add(worker)

    def on_report(self, report: Message, now: float) -> list[OutgoingMessage]:
        if isinstance(report, ShardSqNorm):
            return []  # From a copy of a shard, for the last update of another strategy.
        if not isinstance(report, StepsApplied):
            raise AssertionError(f"unexpected {type(report).__name__} with planned work")
        if self._at[report.worker] == self._slowest < report.position:
            self._behind -= 1
        self._at[report.worker] = report.position
        if self._balance is not None:
            self._balance.update(report.worker, report.measured)
        if report.position == self._stop and self._first_idle is None:
            self._first_idle = now
        if self._behind:
            return []  # Counted, so that thousands of workers need no search for the slowest.
        slowest = min(self._at)
        self._behind = self._at.count(slowest)
        batches_before = -(-self._slowest // self._batch)
        self._history.updates += -(-slowest // self._batch) - batches_before
        self._history.add_samples(slowest - self._slowest)
        self._slowest = slowest
        while self._blocks and self._blocks[0].hi <= slowest:
            self._ledger.acknowledge(self._blocks.pop(0).id, ALL_WORKERS)
        if slowest == self._stop:
            self._set_drained(now)
            return []
        # The latest speed: work planned at that of a faster time would last too long.
        progress = self._progress
        progress.append((now, slowest))
        while len(progress) > 2 and progress[1][0] <= now - PLAN_AHEAD_S:
            progress.popleft()
        began, start = progress[0]
        if now > began:
            per_s = (slowest - start) / (now - began)
            self._ahead = max(2 * self._batch, int(per_s * self._ahead_s))
        return self._plan()


def make_planned_pace(spec: Strategy, context: PaceContext) -> Pace:
    """Plans ahead; batches are split as the strategy states, or by measured speeds."""
    weights = spec.batch_weights(context.workers)
    return PlannedPace(context, weights=weights, balance=spec.balances_speeds)
