"""Caches of decoded blocks, so that the next epoch does not read them again.

The memory cache keeps the blocks that arrive first until it is full: every epoch needs each block
once, so evicting the least recently used block would drop the one that is needed next. The disk
cache keeps all blocks as files under `~/.cache/paceline/decoded`, shared by the processes of a
machine; they may be deleted at any time.
"""

from __future__ import annotations

import os
import threading
from contextlib import suppress
from pathlib import Path
from typing import Protocol

import numpy as np

from paceline.data.blocks import DataBlock, Rows


class BlockCache(Protocol):
    def get(self, block: DataBlock) -> Rows | None: ...

    def put(self, block: DataBlock, rows: Rows) -> None: ...


class MemoryBlockCache:
    """Keeps blocks up to `max_bytes`; later ones are not cached."""

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


class DiskBlockCache:
    """Stores one pair of files per block; caches nothing if the directory is not writable."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def _paths(self, block: DataBlock) -> tuple[Path, Path]:
        name = f"{block.file}-{block.offset}"
        return self._folder / f"{name}.x.npy", self._folder / f"{name}.y.npy"

    def get(self, block: DataBlock) -> Rows | None:
        try:
            x, y = (np.load(path, allow_pickle=False) for path in self._paths(block))
        except (OSError, ValueError, EOFError):
            return None
        return (x, y) if len(x) == len(y) == block.rows else None

    def put(self, block: DataBlock, rows: Rows) -> None:
        with suppress(OSError):
            self._folder.mkdir(parents=True, exist_ok=True)
            for path, part in zip(self._paths(block), rows, strict=True):
                partial = path.with_name(f"{path.name}.{os.getpid()}-{threading.get_ident()}")
                with partial.open("wb") as stream:
                    np.save(stream, part, allow_pickle=False)
                os.replace(partial, path)
