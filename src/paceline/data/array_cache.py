"""Disk cache of decoded arrays, because decoding is slower than reading them.

Entries are directories of .npy files under `~/.cache/paceline/decoded`. They may be deleted at any
time. Whole arrays are memory-mapped, so that the processes of one machine share the memory.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from paceline.data.blocks import Array, Bytes, DataBlock, Rows
from paceline.errors import DataError, UsageError

if TYPE_CHECKING:
    from paceline.data.pipeline import DataPipeline
    from paceline.data.streaming import BlockReader

ByteArrays = dict[str, Bytes]


def root() -> Path:
    return Path(os.path.expanduser("~/.cache/paceline/decoded"))


def load_or_build(
    data_set: str,
    archive: Path,
    names: tuple[str, ...],
    *,
    build: Callable[[], ByteArrays],
    fits: Callable[[ByteArrays], bool],
) -> ByteArrays:
    """Returns the arrays of an archive; builds and stores them if absent, truncated or invalid.

    Entries are named after the archive's size and modification time. If the directory is not
    writable, nothing is cached. Raises only what `build` raises.
    """
    status = archive.stat()
    folder = root() / f"{data_set}-{status.st_size}-{status.st_mtime_ns}"
    built: ByteArrays = {}

    def read() -> ByteArrays | None:
        found = _map_arrays(folder, names)
        if found is None or any(array.dtype != np.uint8 for array in found.values()):
            return None
        return found if fits(found) else None

    def store() -> None:
        built.update(build())
        with suppress(OSError), _new_entry(folder) as fresh:
            for name, array in built.items():
                np.save(fresh / f"{name}.npy", array, allow_pickle=False)

    # Reads the arrays back: mapped pages are shared and evictable, the built ones are not.
    return _read_or_build(folder, read, store) or built


def open_mapped_copy(pipeline: DataPipeline, reader: BlockReader, first: Rows) -> Rows:
    """Returns all rows from a memory-mapped copy, which is built block by block if needed.

    Used when rows are leased individually from data that exceeds memory: they are needed in any
    order, which a remote store or a compressed file cannot provide. Raises what reading raises.
    """
    if pipeline.maps:
        raise UsageError(
            "map() cannot be combined with a cache on disk, which cannot identify the function; "
            "use batch(), or cache('memory')"
        )
    folder = root() / name_copy(pipeline, reader)

    def build() -> None:
        task = "create a copy"
        try:
            with _new_entry(folder) as fresh:
                task = "write the copy"
                count = reader.source.row_count
                x, y = (
                    np.lib.format.open_memmap(
                        fresh / f"{name}.npy", "w+", part.dtype, (count, *part.shape[1:])
                    )
                    for name, part in zip("xy", first, strict=True)
                )
                reader.read_all(first, x, y)
                x.flush()
                y.flush()
        except OSError as error:
            raise DataError(f"{folder}: cannot {task} ({error.strerror})") from None

    found = _read_or_build(folder, partial(_map_arrays, folder, ("x", "y")), build)
    if found is None:
        raise DataError(f"{folder}: the copy was removed right after it was created")
    return found["x"], found["y"]


def name_copy(pipeline: DataPipeline, reader: BlockReader) -> str:
    """Returns a name that depends on the files, their modification times and the columns."""
    keys = [repr(pipeline.selection), repr(pipeline.format)]
    keys += [f"{file.url} {file.size} {file.stamp}" for file in reader.source.files]
    return f"rows-{hashlib.sha256(chr(10).join(keys).encode()).hexdigest()[:24]}"


@dataclass(frozen=True)
class DiskBlockCache:
    """Stores one pair of files per block; caches nothing if the directory is not writable."""

    folder: Path

    def _paths(self, block: DataBlock) -> list[Path]:
        return [self.folder / f"{block.file}-{block.offset}.{part}.npy" for part in "xy"]

    def get(self, block: DataBlock) -> Rows | None:
        try:
            x, y = (np.load(path, allow_pickle=False) for path in self._paths(block))
        except (OSError, ValueError, EOFError):
            return None
        return (x, y) if len(x) == len(y) == block.rows else None

    def put(self, block: DataBlock, rows: Rows) -> None:
        with suppress(OSError):
            self.folder.mkdir(parents=True, exist_ok=True)
            for path, part in zip(self._paths(block), rows, strict=True):
                partial = path.with_name(f"{path.name}.{os.getpid()}-{threading.get_ident()}")
                with partial.open("wb") as stream:
                    np.save(stream, part, allow_pickle=False)
                os.replace(partial, path)


def _map_arrays(folder: Path, names: tuple[str, ...]) -> dict[str, Array] | None:
    arrays: dict[str, Array] = {}
    for name in names:
        path = folder / f"{name}.npy"
        try:
            mapped = np.load(path, mmap_mode="r", allow_pickle=False)
            if path.stat().st_size != mapped.offset + mapped.nbytes:
                return None
        except Exception:
            # A cached file with any defect is rebuilt.
            return None
        arrays[name] = mapped.view(np.ndarray)
    return arrays


def _read_or_build(
    folder: Path, read: Callable[[], dict[str, Array] | None], build: Callable[[], None]
) -> dict[str, Array] | None:
    """Reads an entry. One process at a time builds it if needed, unless locking fails."""
    found = read()
    if found is None:
        with ExitStack() as stack:
            with suppress(OSError):
                folder.parent.mkdir(parents=True, exist_ok=True)
                stream = stack.enter_context((folder.parent / f".{folder.name}.lock").open("w"))
                # The lock ends with the process, so that no process waits for a dead one.
                fcntl.flock(stream, fcntl.LOCK_EX)
            found = read()
            if found is None:
                build()
                found = read()
    return found


@contextmanager
def _new_entry(folder: Path) -> Iterator[Path]:
    """Yields an empty directory, which replaces `folder` unless the block raises."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(
        prefix=".new-", dir=folder.parent, ignore_cleanup_errors=True
    ) as scratch:
        fresh = Path(scratch) / "new"
        fresh.mkdir(0o700)
        yield fresh
        if folder.exists():
            # A directory can only be renamed onto an empty one, so a broken entry is moved away.
            folder.rename(Path(scratch) / "old")
        fresh.rename(folder)
