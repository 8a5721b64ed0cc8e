"""Blocks of data that are read at once (a row group or a byte range), and sources by format."""

from __future__ import annotations

import math
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from paceline.data.dataset import DatasetSplits
from paceline.data.stores import StoredFile
from paceline.errors import DataError, UsageError, suggest_name

Array = npt.NDArray[Any]
Bytes = npt.NDArray[np.uint8]
Rows = tuple[Array, Array]
"""Features and labels as stored; batches are scaled and converted later."""

FORMATS: dict[str, tuple[str, tuple[str, ...]]] = {
    "parquet": ("arrow_sources:ParquetSource", (".parquet", ".pq")),
    "tfrecord": (
        "tfrecord:TFRecordSource",
        (".tfrecord", ".tfrecords", ".tfrecord.gz", ".tfrecords.gz", ".tfrecord.zlib"),
    ),
    "arrow": ("hub_datasets:ArrowFileSource", (".arrow", ".feather")),
    "npz": ("npz:NpzSource", (".npz",)),
    "webdataset": ("webdataset:WebDatasetSource", (".tar",)),
    "csv": ("arrow_sources:CsvSource", (".csv", ".tsv", ".csv.gz", ".tsv.gz")),
    "idx": ("idx:IdxSource", ("idx3-ubyte", "idx3-ubyte.gz", "idx1-ubyte", "idx1-ubyte.gz")),
    "cifar": ("cifar:CifarSource", (".bin",)),
    "images": (
        "image_folder:ImageFolderSource",
        (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp"),
    ),
    "text": ("text:TextSource", (".txt",)),
}
"""The "module:class" of each source, called with files and selection, and lower-case suffixes."""


_NUMBER = re.compile(r"-\d{5}-of-\d{5}$")
"""Ending of the files of TensorFlow Datasets, after the suffix."""


class RowError(ValueError):
    """Raised for a value that cannot be decoded; `row` counts within the block."""

    def __init__(self, text: str, row: int | None = None) -> None:
        super().__init__(text)
        self.row = row


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
    images: tuple[str, ...] = ()
    """Features that contain encoded images by the dataset's description; others are recognized."""

    @property
    def names(self) -> tuple[str, ...]:
        """All selected columns; the label, if there is one, is the last."""
        return (*self.features, self.label) if self.label else self.features

    def resolve(
        self,
        file: StoredFile,
        known: Sequence[str],
        unit: str,
        images: Sequence[str] = (),
        classes: Sequence[str] = (),
    ) -> ColumnSelection:
        """Fills in the default columns: of `images`, if there are any, else all.

        The label is `label`, or else the only one of `classes`. Raises DataError for a missing one.
        """
        label = self.label
        for likely in ("label", *(classes if len(classes) == 1 else ())):
            if label is None and likely in known and likely not in self.features:
                label = likely
        features = self.features or tuple(name for name in images or known if name != label)
        if not self.features and len(images) > 1:
            raise UsageError(f"{file.url}: several images ({', '.join(images)}); use --features")
        if not features:
            left = "for features" if unit == "column" else "besides the label"
            raise UsageError(f"{file.url}: no {unit} is left {left}; use --features")
        found = replace(self, features=features, label=label)
        for name in found.names:
            if name not in known:
                raise file.error(f"has no {unit} {name!r}: {suggest_name(name, known)}")
        return found


class BlockSource(ABC):
    """Files that are read block by block, from any thread."""

    blocks: tuple[DataBlock, ...] = ()
    columns: tuple[str, ...] = ()
    """All columns, in formats in which one of them is selected as the label."""
    reads_when_opened = True
    """Opening reads every file, at least a part of it."""
    decodes_images = False
    """Decoding costs more than reading, and decoded rows should be stored."""

    def __init__(self, files: tuple[StoredFile, ...], selection: ColumnSelection) -> None:
        self.files = files
        self.selection = selection

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
        self, find: Callable[[StoredFile, int], list[DataBlock]], unit: str = "row"
    ) -> None:
        """Sets `blocks`, and `files` to those with rows; `find` returns a file's, given its number.

        Raises DataError for files without rows, unless the selection skips them.
        """
        files, skip = self.files, self.selection.skip_empty
        if not skip:
            self._check_not_empty()
        kept: list[StoredFile] = []
        blocks: list[DataBlock] = []
        for file in files:
            found = find(file, len(kept)) if file.size else []
            if found:
                blocks += found
                kept.append(file)
            elif not skip:
                raise file.error(f"contains no {unit}s; remove it or use --skip-empty")
        if not blocks:
            raise DataError(f"{files[0].url}: none of {len(files)} files contains a {unit}")
        self.files, self.blocks = tuple(kept), tuple(blocks)

    def _check_not_empty(self) -> None:
        for file in self.files:
            if file.size == 0:
                raise file.error("is empty (0 bytes); rewrite or remove it")

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
            raise self.files[block.file].error(what, where)
        return joined.reshape(len(joined), *shape)


def row_bytes(rows: Rows) -> int:
    """Returns the size of one row in memory, in bytes, at least one."""
    features, labels = rows
    return max(1, int((features.nbytes + labels.nbytes) / max(1, len(labels))))


def check_format(name: str) -> str:
    if name not in FORMATS:
        raise UsageError(f"unknown format {name!r}; {suggest_name(name, FORMATS)}")
    return name


def guess_format(url: str, files: tuple[StoredFile, ...]) -> str:
    """Returns the format by file names. Raises UsageError if it is unknown or ambiguous."""
    names = [_NUMBER.sub("", file.name.lower()) for file in files]
    known = sorted(
        form for form, (_, suffixes) in FORMATS.items() if any(n.endswith(suffixes) for n in names)
    )
    if len(known) > 1:
        raise UsageError(
            f"{url}: files of several formats ({', '.join(known)}); use a pattern such as "
            f"'*{FORMATS[known[0]][1][0]}', or --format"
        )
    suffixes = FORMATS[known[0]][1] if known else ()
    for file, name in zip(files, names, strict=True):
        if not name.endswith(suffixes):
            raise UsageError(
                f"{url}: cannot infer the format of {file.name}; use --format "
                f"({', '.join(sorted(FORMATS))})"
            )
    return known[0]
