"""The sample ledger: every position of an epoch is leased and acknowledged exactly once."""

import heapq
from collections import deque
from collections.abc import Mapping, Sequence

from paceline.protocol.block_plan import (
    BlockDealer,
    BlockLayout,
    EpochBlockPlan,
    RowRange,
    RowRanges,
    take_rows,
)
from paceline.protocol.messages import record

ALL_WORKERS = -1
"""Lease holder meaning "all workers"."""


@record
class LeaseEntry:
    id: int
    holder: int
    lo: int
    hi: int


class Ledger:
    """Leases of the positions 0..samples of each epoch.

    A position is in exactly one state: not leased, returned, leased, or done. Leases of a lost
    worker are returned and granted again. An acknowledgement of a lease that was already
    acknowledged or returned raises KeyError.
    """

    def __init__(
        self,
        samples: int,
        *,
        epoch: int = 0,
        position: int = 0,
        layout: BlockLayout | None = None,
        left: Sequence[RowRange] | None = None,
    ) -> None:
        """`layout`: blocks of the data; `left`: remaining rows of a resumed epoch."""
        self.samples = samples
        self.layout = layout
        """With one, leases contain row ranges; otherwise the epoch's order defines the rows."""
        self._next_id = 1
        self.begin_epoch(epoch, position, left)

    def begin_epoch(
        self, epoch: int, position: int = 0, left: Sequence[RowRange] | None = None
    ) -> None:
        assert 0 <= position <= self.samples
        self._allotment = None
        self._drawn: dict[int, list[RowRange]] = {}
        self._past: list[tuple[int, list[RowRange]]] = []
        """Start and rows of leases of all workers that are done, in order."""
        if self.layout is not None:
            self._allotment = BlockDealer(EpochBlockPlan(self.layout, epoch), left)
        self.epoch = epoch
        self.leased_up_to = position
        """No position from this one on has been leased in this epoch."""
        self._out: dict[int, LeaseEntry] = {}
        self._returned: list[tuple[int, int]] = []
        self._done_after: dict[int, int] = {}
        self.frontier = position
        """All positions below this one are done."""

    def take(self, holder: int, count: int, limit: int) -> LeaseEntry | None:
        """Leases up to `count` positions below `limit`, returned ones first; None without any."""
        assert count > 0
        if self._returned and self._returned[0][0] < limit:
            lo, hi = heapq.heappop(self._returned)
            cut = min(hi, lo + count, limit)
            if cut < hi:
                heapq.heappush(self._returned, (cut, hi))
            return self._lease(holder, lo, cut)
        last = limit if limit < self.samples else self.samples
        lo = self.leased_up_to
        if lo >= last:
            return None
        hi = lo + count
        self.leased_up_to = hi if hi < last else last
        return self._lease(holder, lo, self.leased_up_to)

    def _lease(self, holder: int, lo: int, hi: int) -> LeaseEntry:
        entry = LeaseEntry(self._next_id, holder, lo, hi)
        self._next_id += 1
        self._out[entry.id] = entry
        return entry

    def acknowledge(self, lease_id: int, holder: int) -> LeaseEntry:
        """Marks a lease as applied. Raises KeyError if `holder` does not hold it."""
        entry = self._drop(lease_id, holder)
        if self._drawn:
            rows = self._drawn.pop(lease_id, [])
            if holder == ALL_WORKERS:
                self._past.append((entry.lo, rows))
        if entry.lo != self.frontier:
            self._done_after[entry.lo] = entry.hi
            return entry
        self.frontier = entry.hi
        while self.frontier in self._done_after:
            self.frontier = self._done_after.pop(self.frontier)
        return entry

    def return_lease(self, lease_id: int, holder: int) -> None:
        """Returns an unprocessed lease; its positions are leased again."""
        entry = self._drop(lease_id, holder)
        if self._allotment is not None:
            self._allotment.return_rows(tuple(self._drawn.pop(lease_id, ())))
        heapq.heappush(self._returned, (entry.lo, entry.hi))

    def return_all_of(self, holder: int) -> None:
        """Returns all leases of a lost worker."""
        for lease_id in sorted(e.id for e in self._out.values() if e.holder == holder):
            self.return_lease(lease_id, holder)
        if self._allotment is not None:
            self._allotment.drop_worker(holder)

    def return_all(self) -> None:
        """Returns all leases, because their holders change; queued rows are free again."""
        for holder in sorted({entry.holder for entry in self._out.values()}):
            self.return_all_of(holder)
        if self._allotment is not None:
            self._allotment.drop_all_workers()

    def rewind(self, position: int) -> None:
        """Makes exactly the positions below this one done; only after planned leases.

        Workers may have completed more than they have reported, or may go back to an older state.
        """
        if self._allotment is not None:
            planned = self._past + [(e.lo, self._drawn.get(e.id, [])) for e in self._out.values()]
            self._past = []
            for lo, ranges in sorted(planned, key=lambda each: each[0], reverse=True):
                rows = deque(ranges)
                done = min(max(0, position - lo), sum(hi - first for first, hi in ranges))
                kept = list(take_rows(rows, done))
                self._allotment.return_rows(tuple(rows))
                if kept:
                    self._past.insert(0, (lo, kept))
            self._allotment.drop_all_workers()
        self._drawn = {}
        self._out, self._returned, self._done_after = {}, [], {}
        self.leased_up_to = self.frontier = position

    @property
    def done_ranges(self) -> RowRanges:
        """Positions behind the frontier that are done."""
        return tuple(sorted(self._done_after.items()))

    def restore(self, done: Sequence[RowRange], planned: Mapping[int, list[RowRange]]) -> None:
        """Continues an interval of another coordinator, whose leases are taken back.

        `done` are positions that updates contain, `planned` the rows of work that was planned; the
        rows of neither are among those that are left.
        """
        for lo, hi in sorted(done):
            if lo == self.frontier:
                self.frontier = hi
            else:
                self._done_after[lo] = hi
                if lo > self.leased_up_to:
                    heapq.heappush(self._returned, (self.leased_up_to, lo))
            self.leased_up_to = max(self.leased_up_to, hi)
        self._past = [(lo, list(planned[lo])) for lo in sorted(planned)]

    # ---- data that is read in blocks ----------------------------------------------------------

    def draw_rows(self, lease_id: int, worker: int, count: int) -> RowRanges:
        """Returns the rows of `count` positions of a lease, for one worker."""
        if self._allotment is None or not count:
            return ()
        ranges = self._allotment.draw(worker, count)
        self._drawn.setdefault(lease_id, []).extend(ranges)
        return ranges

    def lookahead(self, worker: int) -> RowRanges:
        return self._allotment.lookahead(worker) if self._allotment is not None else ()

    def remaining_rows(self) -> list[RowRange]:
        """Returns rows that were not taken yet; without open leases, those that are not done."""
        assert self._allotment is not None
        return self._allotment.remaining()

    def _drop(self, lease_id: int, holder: int) -> LeaseEntry:
        entry = self._out.get(lease_id)
        if entry is None or entry.holder != holder:
            raise KeyError(f"worker {holder} does not hold lease {lease_id}")
        del self._out[lease_id]
        return entry
