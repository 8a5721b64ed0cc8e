"""Blocks of data that are read at once (a row group or a byte range), and sources of blocks."""

from __future__ import annotations

import gzip
import math
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from paceline.data.stores import StoredFile, read_bytes
from paceline.errors import DataError, UsageError, suggest_name

if TYPE_CHECKING:
    from paceline.data.dataset import DatasetSplits

Array = npt.NDArray[Any]
Rows = tuple[Array, Array]
"""Features and labels as stored; batches are scaled and converted later."""

GZIP_MAGIC = b"\x1f\x8b"


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

    @property
    def names(self) -> tuple[str, ...]:
        """All selected columns; the label, if there is one, is the last."""
        return (*self.features, self.label) if self.label else self.features

    def resolve(self, file: StoredFile, known: Sequence[str], unit: str) -> ColumnSelection:
        """Fills in the default columns. Raises DataError for a missing one."""
        label = self.label
        if label is None and "label" in known and "label" not in self.features:
            label = "label"
        features = self.features or tuple(name for name in known if name != label)
        if not features:
            left = "for features" if unit == "column" else "besides the label"
            raise UsageError(f"{file.url}: no {unit} is left {left}; use --features")
        found = replace(self, features=features, label=label)
        for name in found.names:
            if name not in known:
                raise bad_file(file, f"has no {unit} {name!r}: {suggest_name(name, known)}")
        return found


class BlockSource(ABC):
    """Files that are read block by block, from any thread."""

    files: tuple[StoredFile, ...]
    blocks: tuple[DataBlock, ...]
    selection: ColumnSelection

    @property
    def row_count(self) -> int:
        return sum(block.rows for block in self.blocks)

    @abstractmethod
    def read(self, block: DataBlock) -> Rows:
        """Returns the rows of a block. Raises DataError with the file and the position in it."""

    def count_classes(self) -> int | None:
        """Returns the number of classes, or None if that requires reading all data."""
        return None

    def derive_splits(self, hold_out: bool) -> DatasetSplits | None:
        """Returns the dataset of a format whose rows are derived from all files, else None."""
        return None

    def _find_blocks(
        self,
        files: tuple[StoredFile, ...],
        find: Callable[[StoredFile, int], list[DataBlock]],
        unit: str = "row",
    ) -> None:
        """Sets `files` and `blocks`; `find` returns the blocks of one file, given its number.

        Raises DataError for files without rows, unless the selection skips them.
        """
        skip = self.selection.skip_empty
        if not skip:
            check_not_empty(files)
        kept: list[StoredFile] = []
        blocks: list[DataBlock] = []
        for file in files:
            found = find(file, len(kept)) if file.size else []
            if found:
                blocks += found
                kept.append(file)
            elif not skip:
                raise bad_file(file, f"contains no {unit}s; remove it or use --skip-empty")
        if not blocks:
            raise DataError(f"{files[0].url}: none of {len(files)} files contains a {unit}")
        self.files, self.blocks = tuple(kept), tuple(blocks)

    def _make_rows(self, block: DataBlock, columns: list[Array], where: str = "") -> Rows:
        """Separates the label, which is the last column if one is selected, from the features."""
        labels: Array = np.zeros(block.rows, np.int64)
        if self.selection.label is not None:
            *columns, labels = columns
            if labels.ndim == 2 and labels.shape[1] == 1:
                labels = labels[:, 0]
        return self._shape_features(block, columns, where), labels

    def _shape_features(self, block: DataBlock, columns: list[Array], where: str = "") -> Array:
        """Concatenates columns and reshapes them; a single column keeps its stored shape."""
        shape = self.selection.shape
        if len(columns) == 1:
            joined = columns[0]
            if joined.ndim == 1 and shape is None:
                joined = joined.reshape(-1, 1)
        else:
            joined = np.concatenate([c.reshape(len(c), -1) for c in columns], axis=1)
        if shape is None:
            # Two dimensions are a gray image; models expect a channel dimension.
            return joined[:, None] if joined.ndim == 3 else joined
        have = math.prod(joined.shape[1:])
        if have != math.prod(shape):
            text = "x".join(map(str, shape))
            what = f"{have:,} values per row do not match the shape {text}"
            raise bad_file(self.files[block.file], what, where)
        return joined.reshape(len(joined), *shape)


def bad_file(file: StoredFile, what: str, where: str = "") -> DataError:
    return DataError(f"{file.url}{where}: {' '.join(what.split())}")


def check_not_empty(files: Sequence[StoredFile]) -> None:
    for file in files:
        if file.size == 0:
            raise bad_file(file, "is empty (0 bytes); rewrite or remove it")


def read_block(file: StoredFile, block: DataBlock) -> bytes:
    return read_bytes(file.url, block.offset, block.offset + block.size)


def unpack(
    file: StoredFile, content: bytes, decompress: Callable[[bytes], bytes] = gzip.decompress
) -> bytes:
    """Decompresses a file. Raises DataError if it is truncated or damaged."""
    try:
        return decompress(content)
    except (EOFError, OSError, zlib.error) as error:
        raise bad_file(file, f"is truncated or damaged ({error})") from None


def row_bytes(rows: Rows) -> int:
    """Returns the size of one row in memory, in bytes."""
    features, labels = rows
    return int((features.nbytes + labels.nbytes) / max(1, len(labels)))
