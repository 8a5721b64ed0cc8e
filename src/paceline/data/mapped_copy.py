"""Decoded copy of a dataset on the local disk, memory-mapped by all processes of the machine.

Used when rows are leased individually from data that exceeds memory: they are needed in any order,
which a remote store or a compressed file cannot provide. The copy is built once, block by block,
and may be deleted at any time.
"""

from __future__ import annotations

import hashlib
import shutil
import tempfile
from pathlib import Path

import numpy as np

from paceline.data import array_cache
from paceline.data.blocks import Rows
from paceline.data.pipeline import DataPipeline
from paceline.data.streaming import BlockReader
from paceline.errors import DataError, UsageError


def open_mapped_copy(pipeline: DataPipeline, reader: BlockReader, first: Rows) -> Rows:
    """Returns the memory-mapped rows; builds the copy if needed. Raises what reading raises."""
    if pipeline.maps:
        raise UsageError(
            "map() cannot be combined with a cache on disk, which cannot identify the function; "
            "use batch(), or cache('memory')"
        )
    folder = array_cache.root() / name_copy(pipeline, reader)
    found = _open(folder)
    if found is not None:
        return found
    with array_cache.build_lock(folder):
        found = _open(folder)
        if found is None:
            _build(folder, reader, first)
            found = _open(folder)
    if found is None:
        raise DataError(f"{folder}: the copy was removed right after it was created")
    return found


def name_copy(pipeline: DataPipeline, reader: BlockReader) -> str:
    """Returns a name that depends on the files, their modification times and the columns."""
    keys = [repr(pipeline.selection), repr(pipeline.format)]
    keys += [f"{file.url} {file.size} {file.stamp}" for file in reader.source.files]
    return f"rows-{hashlib.sha256(chr(10).join(keys).encode()).hexdigest()[:24]}"


def _open(folder: Path) -> Rows | None:
    try:
        x, y = (
            np.load(folder / f"{name}.npy", mmap_mode="r", allow_pickle=False)
            for name in ("x", "y")
        )
    except Exception:
        # A copy with any defect is rebuilt.
        return None
    return x.view(np.ndarray), y.view(np.ndarray)


def _build(folder: Path, reader: BlockReader, first: Rows) -> None:
    from paceline.data.dataset_builder import read_all_blocks

    count = sum(block.rows for block in reader.source.blocks)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        fresh = Path(tempfile.mkdtemp(prefix=".new-", dir=folder.parent))
    except OSError as error:
        raise DataError(f"{folder}: cannot create a copy ({error.strerror})") from None
    try:
        x, y = (
            np.lib.format.open_memmap(
                fresh / f"{name}.npy", mode="w+", dtype=part.dtype, shape=(count, *part.shape[1:])
            )
            for name, part in zip(("x", "y"), first, strict=True)
        )
        read_all_blocks(reader, first, x, y)
        x.flush()
        y.flush()
        del x, y
        shutil.rmtree(folder, ignore_errors=True)
        fresh.rename(folder)
    except OSError as error:
        raise DataError(f"{folder}: cannot write the copy ({error.strerror})") from None
    finally:
        shutil.rmtree(fresh, ignore_errors=True)
