"""Loads the batch of a lease, with prefetching.

Datasets that fit in memory follow the epoch's seeded order, so the positions of a lease define its
rows. If workers read in blocks, a lease contains row ranges, and this worker holds the shuffle
windows that contain them: the current one, and the next one, which is read in the background.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from paceline.data import MapDataset, TorchDatasetAdapter
from paceline.data.background import DaemonThreadPool
from paceline.data.hashing import hash_rows
from paceline.data.streaming import PipelinedDataset
from paceline.protocol.messages import Lease
from paceline.strategies.runner import Batch
from paceline.worker.shuffle_windows import ShuffleWindowReader

WAIT_FRACTION = 0.005
"""Fraction of the step time spent waiting for a batch above which batches are prefetched."""
MAX_AHEAD = 32
MAX_AHEAD_BYTES = 64 << 20
"""Memory limit of prefetched batches; at least one batch is allowed."""
IDLE_STEPS_BEFORE_SHRINK = 256
"""Steps without waiting after which the prefetch depth is reduced by one."""
WINDOW_S = 1.0
ORDER_STRIDE = 2**32
"""Distance of the seeds of workers' own orders, larger than any seed of a job."""


def epoch_order(samples: int, seed: int, epoch: int) -> NDArray[np.int64]:
    """Returns the order of an epoch, which depends only on seed and epoch."""
    keys = hash_rows((seed, epoch), np.arange(samples, dtype=np.int64))
    return np.argsort(keys, kind="stable").astype(np.int64)


class EpochOrder:
    """Maps positions of an epoch to rows: in a seeded order, or unchanged."""

    def __init__(self, count: int, seed: int, *, shuffle: bool = True) -> None:
        self.shuffle, self.seed = shuffle, seed
        self._epoch = -1
        self._order: NDArray[np.int64] = np.arange(count, dtype=np.int64)

    def rows(self, epoch: int, lo: int, hi: int) -> NDArray[np.int64]:
        if self.shuffle and epoch != self._epoch:
            self._order = epoch_order(len(self._order), self.seed, epoch)
            self._epoch = epoch
        return self._order[lo:hi]


class ReplicatedOrder:
    """Maps positions of an epoch in which every worker trains on all rows, in different orders.

    Positions are dealt in shares of `share`, one for each worker in turn: a global batch that is
    divided equally gives worker k the next rows of order k, and in every case an epoch contains
    each row once per worker.
    """

    def __init__(self, count: int, seed: int, copies: int, share: int, *, shuffle: bool) -> None:
        self._count, self._copies, self._share = count, copies, max(1, min(share, count))
        self._orders = [
            EpochOrder(count, seed + copy * ORDER_STRIDE, shuffle=shuffle) for copy in range(copies)
        ]

    def rows(self, epoch: int, lo: int, hi: int) -> NDArray[np.int64]:
        positions = np.arange(lo, hi, dtype=np.int64)
        full = self._count // self._share * self._share
        in_tail = positions >= full * self._copies
        # The last shares of all workers are shorter, and equal.
        share = np.where(in_tail, max(1, self._count - full), self._share)
        turn, offset = np.divmod(positions - np.where(in_tail, full * self._copies, 0), share)
        rows = np.where(in_tail, full, turn // self._copies * share) + offset
        found = np.empty_like(rows)
        for copy, order in enumerate(self._orders):
            mine = turn % self._copies == copy
            if mine.any():
                found[mine] = order.rows(epoch, 0, self._count)[rows[mine]]
        return found


class PrefetchDepth:
    """Number of batches to prefetch: 0 while the loop never waits, more while it does."""

    def __init__(self, fixed: int | None) -> None:
        self.now = fixed or 0
        self._fixed = fixed is not None
        self._least = 0
        self._calm = 0

    def update(self, waited_s: float, step_s: float, batch_bytes: int) -> None:
        """Records the waiting time for a batch and the duration of the step."""
        if self._fixed or step_s <= 0:
            return
        if waited_s > WAIT_FRACTION * step_s:
            self._calm = 0
            # A depth that was too small is not tried again.
            self._least = max(self._least, min(self.now + 1, 2))
            most = max(1, min(MAX_AHEAD, MAX_AHEAD_BYTES // max(1, batch_bytes)))
            self.now = min(max(1, 2 * self.now), most)
        else:
            self._calm += 1
            if self._calm >= IDLE_STEPS_BEFORE_SHRINK and self.now > self._least:
                self.now -= 1
                self._calm = 0


@dataclass
class InputTimes:
    """Cost of the input pipeline since the start."""

    batches: int = 0
    wait_s: float = 0.0
    """Time that the training loop waited for a batch."""
    make_s: float = 0.0
    """Time to join, scale and convert rows, in any thread."""
    queue: int = 0
    """Sum, over batches, of the batches that were ready when one was requested."""

    def minus(self, other: InputTimes) -> InputTimes:
        return InputTimes(*(vars(self)[name] - value for name, value in vars(other).items()))

    def describe(self) -> dict[str, Any]:
        return {
            "batches": self.batches,
            "wait_s": round(self.wait_s, 6),
            "make_s": round(self.make_s, 6),
            "queue": round(self.queue / self.batches, 3) if self.batches else 0.0,
        }


class BatchLoader:
    """Loads batches of the training dataset by lease."""

    def __init__(
        self,
        table: MapDataset,
        seed: int,
        device: torch.device,
        *,
        rank: int = 0,
        workers: int = 1,
        share: int = 1,
        tell: Callable[[dict[str, Any]], None] | None = None,
    ) -> None:
        """`tell` receives input statistics about once per second.

        `share` is that of a worker in a global batch, if all have the same.
        """
        self._table = table if isinstance(table, PipelinedDataset) else PipelinedDataset(table)
        copies = workers if self._table.shard == "off" else 1
        self.samples = len(table) * copies
        self._device = device
        shuffle = bool(self._table.pipeline.shuffle_rows)
        self._order: EpochOrder | ReplicatedOrder = EpochOrder(len(table), seed, shuffle=shuffle)
        if copies > 1:
            self._order = ReplicatedOrder(len(table), seed, copies, share, shuffle=shuffle)
        self._windows = ShuffleWindowReader(self._table, seed, rank=rank, workers=workers)
        self.layout = self._windows.layout
        # A custom dataset may not be thread-safe, and may use torch's generator.
        own = isinstance(self._table.inner, TorchDatasetAdapter)
        depth = self._table.pipeline.depth
        self._depth = PrefetchDepth(0 if own and depth is None else depth)
        self._expected: deque[Lease] = deque()
        self._made: deque[tuple[Lease, Future[Batch]]] = deque()
        self._background = DaemonThreadPool(self._table.pipeline.map_threads, "paceline-batch")
        self._totals = InputTimes()
        self._told = InputTimes()
        self._tell = tell
        self._tell_due = time.monotonic() + WINDOW_S
        self._last = time.perf_counter()

    def warm_up(self) -> None:
        """Prefetches the first rows before the first epoch."""
        self._windows.warm_up()

    def prefetch(self, leases: Sequence[Lease]) -> None:
        """Announces the next leases, in order."""
        self._expected.extend(leases)
        for lease in leases:
            self._windows.prefetch(lease)
        self._make_ahead()

    def batch(self, lease: Lease) -> Batch:
        """Returns the rows of a lease, waiting if necessary. Raises what reading them raised."""
        began = time.perf_counter()
        self._totals.queue += sum(future.done() for _, future in self._made)
        self._windows.wait_for(lease)
        if self._made and self._made[0][0] == lease:
            inputs, targets = self._made.popleft()[1].result()
        else:
            if self._expected and self._expected[0] == lease:
                self._expected.popleft()
            else:
                self._made.clear()
                self._expected.clear()
            inputs, targets = self._make(lease)
        now = time.perf_counter()
        self._totals.batches += 1
        self._totals.wait_s += now - began
        self._depth.update(now - began, now - self._last, inputs.nbytes + targets.nbytes)
        self._last = now
        self._make_ahead()
        if self._tell is not None and time.monotonic() >= self._tell_due:
            self._tell_due = time.monotonic() + WINDOW_S
            totals = replace(self._totals)
            self._tell({**totals.minus(self._told).describe(), "depth": self._depth.now})
            self._told = totals
        return inputs.to(self._device), targets.to(self._device)

    def _make_ahead(self) -> None:
        while self._expected and len(self._made) < self._depth.now:
            if not self._windows.is_near(self._expected[0]):
                return  # It would evict rows that are needed sooner.
            lease = self._expected.popleft()
            self._made.append((lease, self._background.submit(partial(self._make, lease))))

    def _make(self, lease: Lease) -> Batch:
        began = time.perf_counter()
        waited_s = 0.0
        if lease.row_ranges and self._table.blocks is not None:
            x, y, rows, waited_s = self._windows.rows(lease)
            batch = self._table.change(*self._table.blocks.finish(x, y, rows, lease.epoch))
        else:
            batch = self._table.batch(self.rows(lease), epoch=lease.epoch)
        self._totals.make_s += time.perf_counter() - began - waited_s
        return batch

    def rows(self, lease: Lease) -> NDArray[np.int64]:
        if self.layout is not None:
            # Blocks are read in the order of their rows unless a lease requires otherwise.
            return np.arange(lease.lo, lease.hi, dtype=np.int64)
        return self._order.rows(lease.epoch, lease.lo, lease.hi)

    def totals(self) -> dict[str, Any]:
        """Returns the totals of the run: seconds, bytes and the mean prefetch depth."""
        facts = {**self._totals.describe(), "depth": self._depth.now}
        if self._table.blocks is not None:
            times = self._table.blocks.times
            facts |= {"read_s": round(times.read_s, 6), "map_s": round(times.map_s, 6)}
            facts |= {"read_bytes": times.read_bytes, "blocks": times.blocks}
        return facts

    def close(self) -> None:
        """Stops the threads."""
        self._background.close()
        self._windows.close()
