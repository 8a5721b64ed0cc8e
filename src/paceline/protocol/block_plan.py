"""Who reads which part of the data: an epoch's blocks in order, dealt to workers as they go.

The layout says how many rows each block has and which blocks belong together. An epoch orders the
blocks by seed and epoch, and packs them into windows, whose rows are mixed; the rows in this order
are the epoch's *places* 0, 1, 2, ... A worker is dealt whole windows (a whole file's, where files
stay together) and works through their places; whoever is through takes the next. When all are
dealt, a worker without work takes over the end of what another still has.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from paceline.protocol.record import record

RowRange = tuple[int, int]
"""Places [lo, hi) of an epoch."""
RowRanges = tuple[RowRange, ...]

_MASK = (1 << 64) - 1


@record
class BlockLayout:
    """Rows of each block, the unit it belongs to, and how many rows are mixed at a time."""

    rows: tuple[int, ...]
    units: tuple[int, ...]
    """The same number for blocks that one worker reads: a file's, or each its own."""
    window: int
    """0 keeps blocks and rows in their order."""
    seed: int


@record
class ShuffleWindow:
    """Places [lo, hi) are the rows of these blocks, mixed."""

    lo: int
    hi: int
    blocks: tuple[int, ...]


class EpochBlockPlan:
    """The windows of one epoch: a function of layout and epoch alone."""

    def __init__(self, layout: BlockLayout, epoch: int) -> None:
        self.windows: list[ShuffleWindow] = []
        self.deals: list[RowRanges] = []
        """Windows that go to one worker together."""
        self._at = 0
        self._blocks: list[int] = []
        self._rows = 0
        self._deal: list[RowRange] = []
        for unit in self._order_units(layout, epoch):
            self._add(layout, unit)
        self._close_window()
        self._close_deal()
        self.row_count = self._at
        self._starts = [window.lo for window in self.windows]

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

    def _add(self, layout: BlockLayout, blocks: list[int]) -> None:
        total = sum(layout.rows[block] for block in blocks)
        fits = self._rows + total <= layout.window
        if not fits:
            self._close_window()
            self._close_deal()
        for block in blocks:
            if self._blocks and self._rows + layout.rows[block] > layout.window:
                self._close_window()
            self._blocks.append(block)
            self._rows += layout.rows[block]
        if total > layout.window:
            # A unit larger than a window is dealt by itself.
            self._close_window()
            self._close_deal()

    def _close_window(self) -> None:
        if self._blocks:
            lo, hi = self._at, self._at + self._rows
            self.windows.append(ShuffleWindow(lo, hi, tuple(self._blocks)))
            self._deal.append((lo, hi))
            self._at, self._blocks, self._rows = hi, [], 0

    def _close_deal(self) -> None:
        if self._deal:
            self.deals.append(tuple(self._deal))
            self._deal = []

    def find_window(self, place: int) -> int:
        return bisect_right(self._starts, place) - 1


class BlockDealer:
    """Deals an epoch's places to workers; each is dealt exactly once, unless it is given back."""

    def __init__(self, plan: EpochBlockPlan, left: Sequence[RowRange] | None = None) -> None:
        self.plan = plan
        deals = plan.deals if left is None else _keep(plan.deals, left)
        self._fresh: deque[RowRanges] = deque(deals)
        self._queues: dict[int, deque[RowRange]] = {}

    def draw(self, worker: int, count: int) -> RowRanges:
        """The next `count` places for a worker; there must be as many left."""
        lane = self._queues.setdefault(worker, deque())
        drawn: list[RowRange] = []
        while count:
            if not lane:
                self._refill(worker, lane)
            lo, hi = lane.popleft()
            cut = min(hi, lo + count)
            if cut < hi:
                lane.appendleft((cut, hi))
            drawn.append((lo, cut))
            count -= cut - lo
        if drawn and len(lane) < 2 and self._fresh:
            # Known ahead, it can be read ahead.
            lane.extend(self._fresh.popleft())
        return tuple(drawn)

    def lookahead(self, worker: int) -> RowRanges:
        """What a worker will draw next, as things stand: worth reading now."""
        return tuple(self._queues.get(worker, ()))[:2]

    def return_rows(self, pieces: RowRanges) -> None:
        """Places that were drawn but not worked on: whoever is next gets them."""
        if pieces:
            self._fresh.appendleft(pieces)

    def drop_worker(self, worker: int) -> None:
        """What lies ready for a worker goes to others."""
        self.return_rows(tuple(self._queues.pop(worker, ())))

    def remaining(self) -> list[RowRange]:
        """All places not drawn yet, in order, as few pieces as possible."""
        pieces = [piece for deal in self._fresh for piece in deal]
        pieces += [piece for lane in self._queues.values() for piece in lane]
        return list(merge_ranges(sorted(pieces)))

    def _refill(self, worker: int, lane: deque[RowRange]) -> None:
        if self._fresh:
            lane.extend(self._fresh.popleft())
            return
        others = {w: sum(hi - lo for lo, hi in pieces) for w, pieces in self._queues.items()}
        richest = max(others, key=lambda w: (others[w], -w), default=worker)
        assert others.get(richest), "more was drawn than the epoch has"
        theirs = self._queues[richest]
        if len(theirs) > 1:
            taken = [theirs.pop() for _ in range(len(theirs) // 2)]
            lane.extend(reversed(taken))
            return
        lo, hi = theirs.pop()
        middle = (lo + hi) // 2
        if middle > lo:
            theirs.append((lo, middle))
        lane.append((middle, hi))


def _keep(deals: list[RowRanges], left: Sequence[RowRange]) -> Iterator[RowRanges]:
    """Of each deal what lies in `left`."""
    for deal in deals:
        kept = tuple(
            (max(lo, a), min(hi, b)) for lo, hi in deal for a, b in left if a < hi and lo < b
        )
        if kept:
            yield kept


def merge_ranges(pieces: Iterable[RowRange]) -> RowRanges:
    """The same places in the same order, in as few pieces as possible."""
    joined: list[RowRange] = []
    for lo, hi in pieces:
        if joined and joined[-1][1] == lo:
            joined[-1] = (joined[-1][0], hi)
        else:
            joined.append((lo, hi))
    return tuple(joined)


class RangeCutter:
    """Pieces cut into consecutive counts: what a block of batches gives each of them."""

    def __init__(self, pieces: RowRanges) -> None:
        self._pieces = deque(pieces)

    def cut(self, count: int) -> RowRanges:
        taken: list[RowRange] = []
        while count:
            lo, hi = self._pieces.popleft()
            stop = min(hi, lo + count)
            if stop < hi:
                self._pieces.appendleft((stop, hi))
            taken.append((lo, stop))
            count -= stop - lo
        return tuple(taken)


def splitmix64(word: int) -> int:
    """splitmix64's finish: a number that looks like no other's."""
    word = (word + 0x9E3779B97F4A7C15) & _MASK
    word = (word ^ (word >> 30)) * 0xBF58476D1CE4E5B9 & _MASK
    word = (word ^ (word >> 27)) * 0x94D049BB133111EB & _MASK
    return word ^ (word >> 31)


def layout_to_checkpoint(layout: BlockLayout, left: list[RowRange]) -> dict[str, Any]:
    """For a checkpoint: what is left of the epoch, and of which layout."""
    return {"layout": layout_fingerprint(layout), "left": [list(piece) for piece in left]}


def layout_fingerprint(layout: BlockLayout) -> str:
    digest = 0
    for number in (layout.window, layout.seed, *layout.rows, -1, *layout.units):
        digest = splitmix64(digest ^ (number & _MASK))
    return f"{digest:016x}"
