"""Blocks of data that are read at once: a row group or a byte range."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from paceline.data.stores import StoredFile
from paceline.errors import DataError

Array = npt.NDArray[Any]
Rows = tuple[Array, Array]
"""Features and labels as stored; batches are scaled and converted later."""


@dataclass(frozen=True)
class DataBlock:
    """Consecutive rows of one file. The meaning of `offset` depends on the format."""

    file: int
    offset: int
    rows: int
    size: int
    """Size in the file, in bytes."""


@dataclass(frozen=True)
class ColumnSelection:
    """Feature and label columns, and how to read them."""

    features: tuple[str, ...] = ()
    label: str | None = None
    shape: tuple[int, ...] | None = None
    """Shape of one row of features. Default: as stored."""
    fill: float | None = None
    """Value that replaces nulls. By default, nulls are an error."""
    skip_empty: bool = False
    """Skip files without rows, which programs that write by partition produce."""


class BlockSource(Protocol):
    """Files that are read block by block, from any thread."""

    files: tuple[StoredFile, ...]
    blocks: tuple[DataBlock, ...]

    def read(self, block: DataBlock) -> Rows:
        """Returns the rows of a block. Raises DataError with the file and the position in it."""
        ...

    def count_classes(self) -> int | None:
        """Returns the number of classes, or None if that requires reading all data."""
        ...


def bad_file(file: StoredFile, what: str, where: str = "") -> DataError:
    return DataError(f"{file.url}{where}: {' '.join(what.split())}")


def check_not_empty(files: list[StoredFile]) -> None:
    for file in files:
        if file.size == 0:
            raise bad_file(file, "is empty (0 bytes); rewrite or remove it")


def stack_features(columns: list[Array], shape: tuple[int, ...] | None) -> Array:
    """Concatenates columns and reshapes them; a single column keeps its stored shape."""
    if len(columns) == 1:
        joined = columns[0]
        if joined.ndim == 1 and shape is None:
            joined = joined.reshape(-1, 1)
    else:
        flat = [c.reshape(len(c), -1) for c in columns]
        joined = np.concatenate(flat, axis=1)
    if shape is None:
        # Two dimensions are a gray image; models expect a channel dimension.
        return joined.reshape(len(joined), 1, *joined.shape[1:]) if joined.ndim == 3 else joined
    have, need = int(np.prod(joined.shape[1:])), int(np.prod(shape))
    if have != need:
        raise ValueError(
            f"{have:,} values per row do not match the shape {'x'.join(map(str, shape))}"
        )
    return joined.reshape(len(joined), *shape)


def row_bytes(rows: Rows) -> int:
    """Returns the size of one row in memory, in bytes."""
    features, labels = rows
    return int((features.nbytes + labels.nbytes) / max(1, len(labels)))
