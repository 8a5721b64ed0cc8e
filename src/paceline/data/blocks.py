"""Data as blocks: what is read at once, a row group or a range of bytes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from paceline.data.stores import StoredFile
from paceline.errors import DataError

Array = npt.NDArray[Any]
Rows = tuple[Array, Array]
"""Features and labels as they are stored: scaling and conversion come with the batch."""


@dataclass(frozen=True)
class DataBlock:
    """A run of rows of one file: `offset` says where, in the file's own terms."""

    file: int
    offset: int
    rows: int
    size: int
    """Bytes in the file."""


@dataclass(frozen=True)
class ColumnSelection:
    """Which columns are features and label, and how they are to be taken."""

    features: tuple[str, ...] = ()
    label: str | None = None
    shape: tuple[int, ...] | None = None
    """Of one row of features; without it as it is stored."""
    fill: float | None = None
    """In place of nulls; without it a null is refused."""
    skip_empty: bool = False
    """Leave files without rows out, as programs write that divide work by partitions."""


class BlockSource(Protocol):
    """Files that can be read block by block, from any thread."""

    files: tuple[StoredFile, ...]
    blocks: tuple[DataBlock, ...]

    def read(self, block: DataBlock) -> Rows:
        """The rows of a block; raises DataError that names the file and where in it."""
        ...

    def count_classes(self) -> int | None:
        """Labels are 0 to this number, exclusive; None where only reading all would tell."""
        ...


def bad_file(file: StoredFile, what: str, where: str = "") -> DataError:
    return DataError(f"{file.url}{where}: {' '.join(what.split())}")


def check_not_empty(files: list[StoredFile]) -> None:
    for file in files:
        if file.size == 0:
            raise bad_file(file, "is empty (0 bytes): write it again or take it away")


def stack_features(columns: list[Array], shape: tuple[int, ...] | None) -> Array:
    """Columns side by side, in the given shape; one column alone stays as it is stored."""
    if len(columns) == 1:
        joined = columns[0]
        if joined.ndim == 1 and shape is None:
            joined = joined.reshape(-1, 1)
    else:
        flat = [c.reshape(len(c), -1) for c in columns]
        joined = np.concatenate(flat, axis=1)
    if shape is None:
        # Two dimensions are a grey image: networks want to see its one channel.
        return joined.reshape(len(joined), 1, *joined.shape[1:]) if joined.ndim == 3 else joined
    have, need = int(np.prod(joined.shape[1:])), int(np.prod(shape))
    if have != need:
        raise ValueError(f"{have:,} values a row do not fit the shape {'x'.join(map(str, shape))}")
    return joined.reshape(len(joined), *shape)


def row_bytes(rows: Rows) -> int:
    """Bytes of one row in memory."""
    features, labels = rows
    return int((features.nbytes + labels.nbytes) / max(1, len(labels)))
