"""Rows that stay where they are until they are needed, a few blocks at a time in memory."""

from __future__ import annotations

import threading
import time
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from paceline.data.block_cache import BlockCache
from paceline.data.blocks import Array, BlockSource, DataBlock, Rows, bad_file
from paceline.data.in_memory import BatchTransform
from paceline.data.thread_pool import DaemonThreadPool

READERS = 2
"""Threads that read blocks: one waits for the store while the other decodes."""


@dataclass
class ReadTimes:
    """What reading has cost so far, in seconds and bytes; threads add to it under a lock."""

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


def apply_maps(rows: Rows, maps: Sequence[Callable[[Any, Any], tuple[Any, Any]]]) -> Rows:
    """A user's functions on stored rows, as torch tensors that share the arrays' memory."""
    if not maps:
        return rows
    x, y = (torch.from_numpy(part if part.flags.writeable else part.copy()) for part in rows)
    for change in maps:
        x, y = change(x, y)
    return x.numpy(), y.numpy()


class BlockReader:
    """Blocks of a source, decoded and mapped, each checked to be like the first."""

    def __init__(
        self, source: BlockSource, maps: Sequence[Callable[[Any, Any], tuple[Any, Any]]] = ()
    ) -> None:
        self.source = source
        self.times = ReadTimes()
        self._maps = tuple(maps)
        self.kept: BlockCache | None = None
        """Mapped blocks, in this process."""
        self.stored: BlockCache | None = None
        """Blocks as they are in the files, on this machine."""
        self._like: tuple[Any, ...] | None = None
        self._like_file = ""

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
        rows = apply_maps(rows, self._maps)
        size = block.size if stored is None else 0
        self.times.add(read - began, time.perf_counter() - read, size)
        self._check(block, rows)
        if self.kept is not None:
            self.kept.put(block, rows)
        return rows

    def _check(self, block: DataBlock, rows: Rows) -> None:
        x, y = rows
        file = self.source.files[block.file]
        if len(x) != block.rows or len(y) != block.rows:
            raise bad_file(
                file, f"gives {len(x):,} rows and {len(y):,} labels where {block.rows:,} should be"
            )
        like = (x.dtype, x.shape[1:], y.dtype.kind, y.shape[1:])
        if self._like is None:
            self._like, self._like_file = like, file.url
        elif like != self._like:
            raise bad_file(
                file,
                f"rows of {_name(like)}, but of {_name(self._like)} in {self._like_file}: all "
                "rows must be alike",
                f" (at {block.offset:,})",
            )


def _name(like: tuple[Any, ...]) -> str:
    shape = "x".join(map(str, like[1])) or "one"
    kinds = {"i": "integer", "u": "integer", "f": "floating-point"}
    return f"{shape} {like[0]} values with {kinds.get(like[2], like[2])} labels"


class StreamingDataset:
    """A table whose rows are read block by block, and forgotten block by block.

    Rows can be asked for in any order, but it is made for runs of them: of the blocks decoded,
    only as many are kept as `memory_bytes` allow, and at least two.
    """

    def __init__(
        self,
        reader: BlockReader,
        blocks: Sequence[DataBlock],
        finish: BatchTransform,
        *,
        row_bytes: int,
        memory_bytes: int,
        threads: int = READERS,
    ) -> None:
        self._reader = reader
        self.blocks = tuple(blocks)
        self._finish = finish
        self._starts = [0, *accumulate(block.rows for block in blocks)]
        self._row_bytes = max(1, row_bytes)
        self._memory_bytes = memory_bytes
        self._held: OrderedDict[int, Future[Rows]] = OrderedDict()
        self._background = DaemonThreadPool(threads, "paceline-read")
        self._lock = threading.Lock()

    @property
    def times(self) -> ReadTimes:
        return self._reader.times

    def __len__(self) -> int:
        return self._starts[-1]

    def batch(
        self, indices: npt.NDArray[np.int64], *, epoch: int | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        count = len(self)
        if len(indices) and (indices.max() >= count or indices.min() < -count):
            raise IndexError(f"row out of range: the table has {count} rows")
        indices = indices % count
        owners = np.searchsorted(np.asarray(self._starts), indices, side="right") - 1
        numbers = np.unique(owners)
        # Rows are mostly asked for in order: the block after the last one will be next.
        following = int(numbers[-1]) + 1
        if following < len(self.blocks) and len(numbers) == 1:
            self.prefetch([following])
        parts_x: Array | None = None
        parts_y: Array | None = None
        for number in numbers:
            x, y = self.block(int(number))
            mine = np.flatnonzero(owners == number)
            rows = indices[mine] - self._starts[number]
            if parts_x is None or parts_y is None:
                parts_x = np.empty((len(indices), *x.shape[1:]), x.dtype)
                parts_y = np.empty((len(indices), *y.shape[1:]), y.dtype)
            parts_x[mine], parts_y[mine] = x[rows], y[rows]
        assert parts_x is not None
        assert parts_y is not None
        return self._finish(parts_x, parts_y, indices, epoch)

    def prefetch(self, numbers: Sequence[int]) -> None:
        """Begin to read these blocks, if that has not begun yet."""
        with self._lock:
            for number in numbers:
                if number in self._held:
                    self._held.move_to_end(number)
                    continue
                task = partial(self._reader.read, self.blocks[number])
                self._held[number] = self._background.submit(task)
            self._drop(len(numbers))

    def _drop(self, needed: int) -> None:
        """The oldest blocks go, so that the rest keeps within the memory allowed."""
        size = sum(self.blocks[n].rows * self._row_bytes for n in self._held)
        while len(self._held) > max(2, needed) and size > self._memory_bytes:
            number, _ = self._held.popitem(last=False)
            size -= self.blocks[number].rows * self._row_bytes

    def block(self, number: int) -> Rows:
        """The rows of one block, waited for; raises what reading them raised."""
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
        """The rows of one block, read now and not kept here."""
        return self._background.submit(partial(self._reader.read, self.blocks[number]))

    @property
    def rows_in_memory(self) -> int:
        """How many rows a window may have: three of them are held at a time."""
        return self._memory_bytes // (3 * self._row_bytes)

    def rows_of(self, number: int) -> npt.NDArray[np.int64]:
        """The numbers of a block's rows in this table."""
        return np.arange(self._starts[number], self._starts[number + 1], dtype=np.int64)

    def find_block(self, row: int) -> int:
        return bisect_right(self._starts, row) - 1

    def finish(
        self, x: Array, y: Array, rows: npt.NDArray[np.int64], epoch: int | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return self._finish(x, y, rows, epoch)

    def close(self) -> None:
        """End the reading threads and forget what was read."""
        self._background.close()
        self._held.clear()
