"""Assigns data blocks to workers, in a seeded order per epoch.

The layout contains the number of rows per block and which blocks belong together. An epoch orders
the blocks by seed and epoch and packs them into windows, whose rows are shuffled; the rows in this
order have the indices 0, 1, 2, ... of the epoch. A worker is assigned complete windows (those of a
whole file, if files are not split); an idle worker takes the next one. When all windows are
assigned, an idle worker takes over the end of another worker's queue.
"""

from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import chain

RowRange = tuple[int, int]
"""Row indices [lo, hi) of an epoch."""
RowRanges = tuple[RowRange, ...]

_MASK = (1 << 64) - 1


@dataclass(frozen=True, slots=True)
class BlockLayout:
    """Rows of each block, its unit, and the size of the shuffle window."""

    rows: tuple[int, ...]
    units: tuple[int, ...]
    """Equal for blocks that the same worker reads: one unit per file, or one per block."""
    window: int
    """0 keeps the order of blocks and rows."""
    seed: int


@dataclass(frozen=True, slots=True)
class ShuffleWindow:
    """Rows [lo, hi) are those of these blocks, shuffled."""

    lo: int
    hi: int
    blocks: tuple[int, ...]


class EpochBlockPlan:
    """The windows of one epoch, determined by layout and epoch."""

    def __init__(self, layout: BlockLayout, epoch: int) -> None:
        self.windows: list[ShuffleWindow] = []
        self.deals: list[RowRanges] = []
        """Windows that are assigned to one worker together."""
        self.row_count = 0
        for deal in self._deal_blocks(layout, epoch):
            first = len(self.windows)
            for blocks in filter(None, deal):
                lo = self.row_count
                self.row_count += sum(layout.rows[block] for block in blocks)
                self.windows.append(ShuffleWindow(lo, self.row_count, tuple(blocks)))
            if first < len(self.windows):
                self.deals.append(tuple((w.lo, w.hi) for w in self.windows[first:]))
        self._starts = [window.lo for window in self.windows]

    @classmethod
    def _deal_blocks(cls, layout: BlockLayout, epoch: int) -> list[list[list[int]]]:
        """Packs blocks into windows, and windows into deals; some may be empty."""
        deals: list[list[list[int]]] = [[[]]]
        rows = 0
        for unit in cls._order_units(layout, epoch):
            total = sum(layout.rows[block] for block in unit)
            if rows + total > layout.window:
                deals.append([[]])
                rows = 0
            for block in unit:
                if deals[-1][-1] and rows + layout.rows[block] > layout.window:
                    deals[-1].append([])
                    rows = 0
                deals[-1][-1].append(block)
                rows += layout.rows[block]
            if total > layout.window:  # A unit larger than a window is assigned separately.
                deals.append([[]])
                rows = 0
        return deals

    @staticmethod
    def _order_units(layout: BlockLayout, epoch: int) -> Iterable[list[int]]:
        units: dict[int, list[int]] = {}
        for block, unit in enumerate(layout.units):
            units.setdefault(unit, []).append(block)
        if not layout.window:
            return units.values()
        key = splitmix64(splitmix64(layout.seed) ^ epoch)
        ordered = sorted(units, key=lambda unit: (splitmix64(key ^ unit), unit))
        inner = splitmix64(key)
        return [
            sorted(units[u], key=lambda block: (splitmix64(inner ^ block), block)) for u in ordered
        ]

    def find_window(self, row: int) -> int:
        return bisect_right(self._starts, row) - 1


class BlockDealer:
    """Assigns an epoch's rows to workers, each exactly once unless it is returned."""

    def __init__(self, plan: EpochBlockPlan, left: Sequence[RowRange] | None = None) -> None:
        """Assigns all rows, or only those in `left`."""
        self.plan = plan
        self._fresh: deque[RowRanges] = deque(plan.deals)
        if left is not None:
            kept = (
                [(max(lo, a), min(hi, b)) for lo, hi in deal for a, b in left if a < hi and lo < b]
                for deal in plan.deals
            )
            self._fresh = deque(tuple(deal) for deal in kept if deal)
        self._queues: dict[int, deque[RowRange]] = {}

    def draw(self, worker: int, count: int) -> RowRanges:
        """Returns the next `count` rows for a worker; this many must be left."""
        worker_queue = self._queues.setdefault(worker, deque())
        taken = take_rows(worker_queue, count, lambda: self._refill(worker, worker_queue))
        if taken and len(worker_queue) < 2 and self._fresh:
            # Assigned early, so that it can be prefetched.
            worker_queue.extend(self._fresh.popleft())
        return taken

    def lookahead(self, worker: int) -> RowRanges:
        """Returns the rows that a worker will probably take next, for prefetching."""
        return tuple(self._queues.get(worker, ()))[:2]

    def return_rows(self, ranges: RowRanges) -> None:
        """Returns rows that were taken but not processed; the next worker receives them."""
        if ranges:
            self._fresh.appendleft(ranges)

    def drop_worker(self, worker: int) -> None:
        """Reassigns the queued rows of a worker to others."""
        self.return_rows(tuple(self._queues.pop(worker, ())))

    def drop_all_workers(self) -> None:
        """Reassigns the queued rows of all workers, whose numbers may change."""
        for worker in sorted(self._queues, reverse=True):
            self.drop_worker(worker)

    def remaining(self) -> list[RowRange]:
        """Returns all rows that were not taken yet, in order, as few ranges as possible."""
        return list(merge_ranges(sorted(chain(*self._fresh, *self._queues.values()))))

    def _refill(self, worker: int, worker_queue: deque[RowRange]) -> None:
        if self._fresh:
            worker_queue.extend(self._fresh.popleft())
            return
        others = {w: sum(hi - lo for lo, hi in ranges) for w, ranges in self._queues.items()}
        richest = max(others, key=lambda w: (others[w], -w), default=worker)
        assert others.get(richest), "more rows were taken than the epoch has"
        donor = self._queues[richest]
        if len(donor) > 1:
            taken = [donor.pop() for _ in range(len(donor) // 2)]
            worker_queue.extend(reversed(taken))
            return
        lo, hi = donor.pop()
        middle = (lo + hi) // 2
        if middle > lo:
            donor.append((lo, middle))
        worker_queue.append((middle, hi))


def merge_ranges(ranges: Iterable[RowRange]) -> RowRanges:
    """Merges adjacent ranges, preserving the order."""
    joined: list[RowRange] = []
    for lo, hi in ranges:
        if joined and joined[-1][1] == lo:
            joined[-1] = (joined[-1][0], hi)
        else:
            joined.append((lo, hi))
    return tuple(joined)


def take_rows(
    queue: deque[RowRange], count: int, refill: Callable[[], None] = lambda: None
) -> RowRanges:
    """Takes the first `count` rows of a queue; `refill` is called whenever it is empty."""
    taken: list[RowRange] = []
    while count:
        if not queue:
            refill()
        lo, hi = queue.popleft()
        stop = min(hi, lo + count)
        if stop < hi:
            queue.appendleft((stop, hi))
        taken.append((lo, stop))
        count -= stop - lo
    return tuple(taken)


def splitmix64(value: int) -> int:
    """Returns the finalizer of splitmix64, as a hash."""
    value = (value + 0x9E3779B97F4A7C15) & _MASK
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9 & _MASK
    value = (value ^ (value >> 27)) * 0x94D049BB133111EB & _MASK
    return value ^ (value >> 31)


def layout_fingerprint(layout: BlockLayout) -> str:
    digest = 0
    for number in (layout.window, layout.seed, *layout.rows, -1, *layout.units):
        digest = splitmix64(digest ^ (number & _MASK))
    return f"{digest:016x}"
