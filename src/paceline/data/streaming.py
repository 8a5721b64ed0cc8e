"""Streaming datasets: rows are read on demand, with a few blocks in memory at a time.

Decoded blocks may be cached, so that the next epoch does not read them again.
"""

import threading
import time
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate, chain
from typing import Any

import numpy as np
import torch

from paceline.data.array_cache import DiskBlockCache
from paceline.data.background import DaemonThreadPool, results_in_order
from paceline.data.blocks import Array, BlockSource, DataBlock, Rows
from paceline.data.dataset import MapDataset
from paceline.data.in_memory import Batch, BatchTransform, Indices, wrap_indices
from paceline.data.pipeline import Change, DataPipeline

READERS = 2
"""Threads that read blocks; one waits for the store while the other decodes."""
FETCHERS = 4
"""Threads that read an entire dataset at the start; they mostly wait for the store."""


@dataclass
class ReadTimes:
    """Total time and bytes of reading so far; thread-safe."""

    read_s: float = 0.0
    map_s: float = 0.0
    read_bytes: int = 0
    blocks: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def add(self, read_s: float, map_s: float, size: int) -> None:
        with self._lock:
            self.read_s += read_s
            self.map_s += map_s
            self.read_bytes += size
            self.blocks += 1


class MemoryBlockCache:
    """Keeps the blocks that arrive first, up to `max_bytes`.

    Every epoch needs each block once, so evicting the least recently used block would drop the one
    that is needed next.
    """

    def __init__(self, max_bytes: int) -> None:
        self._left = max_bytes
        self._kept: dict[DataBlock, Rows] = {}
        self._lock = threading.Lock()

    def get(self, block: DataBlock) -> Rows | None:
        return self._kept.get(block)

    def put(self, block: DataBlock, rows: Rows) -> None:
        size = rows[0].nbytes + rows[1].nbytes
        with self._lock:
            if size <= self._left and block not in self._kept:
                self._left -= size
                # Copied, because a view would keep the whole underlying buffer alive.
                self._kept[block] = (rows[0].copy(), rows[1].copy())


@dataclass
class BlockReader:
    """Reads, decodes and maps blocks; checks that each has the layout of the first."""

    source: BlockSource
    maps: Sequence[Change] = ()
    kept: MemoryBlockCache | None = None
    """In-process cache of mapped blocks."""
    stored: DiskBlockCache | None = None
    """On-disk cache of blocks as stored."""
    times: ReadTimes = field(default_factory=ReadTimes)
    _like: tuple[Any, ...] | None = None
    _like_file: str = ""

    def read(self, block: DataBlock) -> Rows:
        kept = self.kept.get(block) if self.kept is not None else None
        if kept is not None:
            return kept
        began = time.perf_counter()
        stored = self.stored.get(block) if self.stored is not None else None
        rows = stored or self.source.read(block)
        if stored is None and self.stored is not None:
            self.stored.put(block, rows)
        read = time.perf_counter()
        rows = self._map(rows)
        size = block.size if stored is None else 0
        self.times.add(read - began, time.perf_counter() - read, size)
        self._check(block, rows)
        if self.kept is not None:
            self.kept.put(block, rows)
        return rows

    def read_all(self, first: Rows, x: Array, y: Array) -> None:
        """Reads all blocks into arrays, up to `FETCHERS` ahead; the rows of the first are given."""
        background = DaemonThreadPool(FETCHERS, "paceline-fetch")
        tasks = (partial(self.read, block) for block in self.source.blocks[1:])
        start = 0
        try:
            for rows in chain([first], results_in_order(map(background.submit, tasks), FETCHERS)):
                stop = start + len(rows[1])
                x[start:stop], y[start:stop] = rows
                start = stop
        finally:
            background.close()

    def _map(self, rows: Rows) -> Rows:
        """Applies the user's functions to stored rows, as torch tensors that share memory."""
        if not self.maps:
            return rows
        x, y = (torch.from_numpy(part if part.flags.writeable else part.copy()) for part in rows)
        for change in self.maps:
            x, y = change(x, y)
        return x.numpy(), y.numpy()

    def _check(self, block: DataBlock, rows: Rows) -> None:
        x, y = rows
        file = self.source.files[block.file]
        if len(x) != block.rows or len(y) != block.rows:
            raise file.error(f"has {len(x):,} rows and {len(y):,} labels, expected {block.rows:,}")
        like = (x.dtype, x.shape[1:], y.dtype.kind, y.shape[1:])
        if self._like is None:
            self._like, self._like_file = like, file.url
        elif like != self._like:
            raise file.error(
                f"rows have {_name(like)}, but {_name(self._like)} in {self._like_file}; all "
                "rows must have the same layout",
                f" (at {block.offset:,})",
            )


def _name(like: tuple[Any, ...]) -> str:
    shape = "x".join(map(str, like[1])) or "one"
    kinds = {"i": "integer", "u": "integer", "f": "floating-point"}
    return f"{shape} {like[0]} values with {kinds.get(like[2], like[2])} labels"


@dataclass(eq=False)
class StreamingDataset:
    """A dataset whose rows are read and evicted block by block.

    Rows can be requested in any order, but sequential access is efficient: decoded blocks are kept
    up to `memory_bytes`, and at least two of them.
    """

    reader: BlockReader
    blocks: Sequence[DataBlock]
    finish: BatchTransform
    """Converts stored rows to a batch."""
    row_bytes: int
    memory_bytes: int
    threads: int

    def __post_init__(self) -> None:
        self.times = self.reader.times
        self._starts = [0, *accumulate(block.rows for block in self.blocks)]
        self._held: OrderedDict[int, Future[Rows]] = OrderedDict()
        self._background = DaemonThreadPool(self.threads, "paceline-read")
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return self._starts[-1]

    def batch(self, indices: Indices, *, epoch: int | None = None) -> Batch:
        indices = wrap_indices(indices, len(self))
        owners = np.searchsorted(np.asarray(self._starts), indices, side="right") - 1
        numbers = np.unique(owners)
        # Access is mostly sequential, so the following block is prefetched.
        following = int(numbers[-1]) + 1
        if following < len(self.blocks) and len(numbers) == 1:
            self.prefetch([following])
        first = self.block(int(numbers[0]))
        x, y = (np.empty((len(indices), *part.shape[1:]), part.dtype) for part in first)
        for number in numbers:
            positions = np.flatnonzero(owners == number)
            rows = indices[positions] - self._starts[number]
            block_x, block_y = self.block(int(number))
            x[positions], y[positions] = block_x[rows], block_y[rows]
        return self.finish(x, y, indices, epoch)

    def prefetch(self, numbers: Sequence[int]) -> None:
        """Starts to read these blocks, unless already started."""
        with self._lock:
            for number in numbers:
                if number in self._held:
                    self._held.move_to_end(number)
                    continue
                task = partial(self.reader.read, self.blocks[number])
                self._held[number] = self._background.submit(task)
            # Evicts the oldest blocks until the rest fits into the memory limit.
            size = sum(self.blocks[n].rows * self.row_bytes for n in self._held)
            while len(self._held) > max(2, len(numbers)) and size > self.memory_bytes:
                number, _ = self._held.popitem(last=False)
                size -= self.blocks[number].rows * self.row_bytes

    def block(self, number: int) -> Rows:
        """Waits for the rows of one block. Raises what reading them raised."""
        self.prefetch([number])
        with self._lock:
            future = self._held[number]
        try:
            return future.result()
        except BaseException:
            with self._lock:
                self._held.pop(number, None)
            raise

    def fetch(self, number: int) -> Future[Rows]:
        """Reads one block in the background, without caching it here."""
        return self._background.submit(partial(self.reader.read, self.blocks[number]))

    @property
    def rows_in_memory(self) -> int:
        """Maximum number of rows per window; three windows are in memory at a time."""
        return self.memory_bytes // (3 * self.row_bytes)

    def rows_of(self, number: int) -> Indices:
        return np.arange(self._starts[number], self._starts[number + 1], dtype=np.int64)

    def close(self) -> None:
        """Stops the reader threads and drops all blocks."""
        self._background.close()
        self._held.clear()


@dataclass(frozen=True, eq=False)
class PipelinedDataset:
    """Rows of an inner dataset, with its pipeline, whose functions are applied to each batch."""

    inner: MapDataset
    pipeline: DataPipeline = DataPipeline(urls=())
    shard: str | None = None
    """The chosen sharding."""

    @property
    def blocks(self) -> StreamingDataset | None:
        """The inner dataset if it is streamed, with its blocks leased individually; else None."""
        return self.inner if isinstance(self.inner, StreamingDataset) else None

    def __len__(self) -> int:
        return len(self.inner)

    def batch(self, indices: Indices, *, epoch: int | None = None) -> Batch:
        return self.change(*self.inner.batch(indices, epoch=epoch))

    def change(self, x: torch.Tensor, y: torch.Tensor) -> Batch:
        for change in self.pipeline.batches:
            x, y = change(x, y)
        return x, y
