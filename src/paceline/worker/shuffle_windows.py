"""Shuffle windows of a worker that reads in blocks: the current one and the next ones."""

import threading
import time
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.data.background import DaemonThreadPool, results_in_order
from paceline.data.hashing import hash_rows
from paceline.data.streaming import READERS, PipelinedDataset
from paceline.protocol.block_plan import (
    BlockDealer,
    BlockLayout,
    EpochBlockPlan,
    RowRanges,
    ShuffleWindow,
)
from paceline.protocol.messages import Lease

Key = tuple[int, int]
"""An epoch, and a window of it."""

MIN_WINDOWS = 16
"""Minimum number of windows per epoch, if there are enough blocks."""
MAX_WINDOWS = 3
"""Windows in memory at a time: the current one and the next ones."""


def block_layout_of(table: PipelinedDataset, seed: int) -> BlockLayout | None:
    """Returns the block layout of a dataset; None if all its rows are in memory."""
    blocks = table.blocks
    if blocks is None:
        return None
    window = 0
    shuffle_rows = table.pipeline.shuffle_rows
    if shuffle_rows:
        # Few large windows could not be distributed evenly. The size does not depend on the number
        # of workers, so that a run can be resumed with another number.
        limits = (shuffle_rows, blocks.rows_in_memory, len(blocks) // MIN_WINDOWS)
        window = max(1, min(limits))
    by_file = table.shard == "file"
    units = tuple(b.file if by_file else n for n, b in enumerate(blocks.blocks))
    return BlockLayout(tuple(b.rows for b in blocks.blocks), units, window, seed)


@dataclass(frozen=True)
class ShuffledRows:
    """Stored rows of a window, and their shuffled order."""

    lo: int
    x: NDArray[Any]
    y: NDArray[Any]
    rows: NDArray[np.int64]
    """Row indices in the dataset."""
    order: NDArray[np.int64]


class ShuffleWindowReader:
    """Reads windows ahead of time, and drops those that are not needed again.

    If all rows are in memory, it has no layout, leases have no row ranges, and it does nothing.
    """

    def __init__(self, table: PipelinedDataset, seed: int, *, rank: int, workers: int) -> None:
        self._blocks = table.blocks
        self.layout = block_layout_of(table, seed)
        self._rank, self._workers = rank, workers
        self._plans: dict[int, EpochBlockPlan] = {}
        self._held: dict[Key, Future[ShuffledRows]] = {}
        self._route: deque[Key] = deque()
        """Windows of all expected leases, in order."""
        self._guess: tuple[int, list[Key]] = (-1, [])
        self._background = DaemonThreadPool(1, "paceline-window")
        self._lock = threading.Lock()

    def warm_up(self) -> None:
        """Prefetches the window that this worker will probably start with."""
        if self.layout is not None:
            for key in self._guess_start(0):
                self._take(key)

    def prefetch(self, lease: Lease) -> None:
        """Adds a lease to the expected ones."""
        for key in self._find(lease.epoch, lease.row_ranges):
            if not self._route or self._route[-1] != key:
                self._route.append(key)

    def wait_for(self, lease: Lease) -> None:
        """Advances to this lease: prefetches the next windows and drops old ones."""
        wanted = self._find(lease.epoch, lease.row_ranges)
        if not wanted:
            return
        while self._route and self._route[0] not in wanted:
            self._route.popleft()
        upcoming = dict.fromkeys((*wanted, *self._route))
        if len(upcoming) < MAX_WINDOWS:
            following = self._find(lease.epoch, lease.next_ranges)
            upcoming |= dict.fromkeys(following or self._guess_start(lease.epoch + 1))
        near = list(upcoming)[: max(len(wanted), MAX_WINDOWS)]
        with self._lock:
            self._held = {key: rows for key, rows in self._held.items() if key in near}
            for key in near:
                self._begin(key)

    def is_near(self, lease: Lease) -> bool:
        """True if all rows of a lease have been read or are being read."""
        with self._lock:
            return all(key in self._held for key in self._find(lease.epoch, lease.row_ranges))

    def rows(self, lease: Lease) -> tuple[NDArray[Any], NDArray[Any], NDArray[np.int64], float]:
        """Returns the stored rows of a lease, their indices and the waiting time."""
        parts = []
        waited_s = 0.0
        for lo, hi in lease.row_ranges:
            for key, start, stop in self._cut(lease.epoch, lo, hi):
                began = time.perf_counter()
                mixed = self._take(key)
                waited_s += time.perf_counter() - began
                chosen = mixed.order[start - mixed.lo : stop - mixed.lo]
                parts.append((mixed.x[chosen], mixed.y[chosen], mixed.rows[chosen]))
        if len(parts) == 1:
            return (*parts[0], waited_s)
        x, y, rows = (np.concatenate([part[i] for part in parts]) for i in range(3))
        return x, y, rows, waited_s

    def close(self) -> None:
        self._background.close()
        if self._blocks is not None:
            self._blocks.close()

    def _plan(self, epoch: int) -> EpochBlockPlan:
        if epoch not in self._plans:
            # Only the current and the next epoch are kept; older ones are not needed again.
            self._plans = {e: p for e, p in self._plans.items() if e >= epoch - 1}
            assert self.layout is not None
            self._plans[epoch] = EpochBlockPlan(self.layout, epoch)
        return self._plans[epoch]

    def _cut(self, epoch: int, lo: int, hi: int) -> Iterator[tuple[Key, int, int]]:
        plan = self._plan(epoch)
        while lo < hi:
            index = plan.find_window(lo)
            stop = min(hi, plan.windows[index].hi)
            yield (epoch, index), lo, stop
            lo = stop

    def _find(self, epoch: int, pieces: RowRanges) -> list[Key]:
        found = (key for lo, hi in pieces for key, _, _ in self._cut(epoch, lo, hi))
        return list(dict.fromkeys(found))

    def _guess_start(self, epoch: int) -> list[Key]:
        """Returns the window with which this worker will probably start the next epoch."""
        if self._guess[0] != epoch:
            plan = self._plan(epoch)
            first: RowRanges = ()
            if plan.row_count >= self._workers:
                allotment = BlockDealer(plan)
                for worker in range(self._rank + 1):
                    first = allotment.draw(worker, 1)
            self._guess = (epoch, self._find(epoch, first))
        return self._guess[1]

    def _begin(self, key: Key) -> Future[ShuffledRows]:
        if key not in self._held:
            epoch, index = key
            window = self._plan(epoch).windows[index]
            self._held[key] = self._background.submit(partial(self._load, epoch, window))
        return self._held[key]

    def _take(self, key: Key) -> ShuffledRows:
        with self._lock:
            future = self._begin(key)
        try:
            return future.result()
        except BaseException:
            with self._lock:
                self._held.pop(key, None)
            raise

    def _load(self, epoch: int, window: ShuffleWindow) -> ShuffledRows:
        assert self._blocks is not None
        assert self.layout is not None
        count = window.hi - window.lo
        rows = np.concatenate([self._blocks.rows_of(number) for number in window.blocks])
        x = y = np.empty(0)
        start = 0
        for part_x, part_y in results_in_order(map(self._blocks.fetch, window.blocks), READERS):
            if start == 0:
                x = np.empty((count, *part_x.shape[1:]), part_x.dtype)
                y = np.empty((count, *part_y.shape[1:]), part_y.dtype)
            stop = start + len(part_y)
            x[start:stop], y[start:stop] = part_x, part_y
            start = stop
        order = np.arange(count, dtype=np.int64)
        if self.layout.window:
            order = np.argsort(hash_rows((self.layout.seed, epoch), rows), kind="stable")
        return ShuffledRows(window.lo, x, y, rows, order)
