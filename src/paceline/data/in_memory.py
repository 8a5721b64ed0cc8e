"""Datasets in memory: rows of numbers or images, and windows of a text."""

from collections.abc import Sized
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from paceline.data.blocks import Array, Bytes, Rows
from paceline.data.dataset import FeatureOptions
from paceline.data.hashing import hash_rows
from paceline.errors import DataError, UsageError

Indices = npt.NDArray[np.int64]
Batch = tuple[torch.Tensor, torch.Tensor]
"""Features and labels."""

DTYPES: dict[str, torch.dtype] = {"float32": torch.float32, "float64": torch.float64}


def check_dtype(dtype: str) -> torch.dtype:
    """Returns the torch dtype of this name. Raises UsageError if it is not supported."""
    if dtype not in DTYPES:
        raise UsageError(f"dtype {dtype!r} is not supported; use {' or '.join(DTYPES)}")
    return DTYPES[dtype]


def check_lengths(x: Sized, y: Sized, rows: Sized | None = None) -> None:
    """Raises DataError if features and labels differ in length, or there are no rows."""
    if len(x) != len(y):
        raise DataError(f"dataset with {len(x):,} rows of features but {len(y):,} labels")
    if len(x if rows is None else rows) == 0:
        raise DataError("empty dataset: expected at least one row")


def wrap_indices(indices: Indices, count: int) -> Indices:
    """Maps negative indices to rows from the end. Raises IndexError for a row out of range."""
    if len(indices) and (indices.max() >= count or indices.min() < -count):
        raise IndexError(f"row out of range: the dataset has {count} rows")
    return indices % count


@dataclass(frozen=True)
class PixelScaling:
    """Maps stored bytes to features: (byte / full - mean) / std, with mean and std per channel."""

    full: float
    mean: tuple[float, ...]
    std: tuple[float, ...]

    def factors(self, dtype: torch.dtype, dimensions: int) -> Batch:
        """Returns the factor and offset of an equivalent multiply-add, shaped for the rows."""
        broadcast = (-1, *[1] * (dimensions - 1))
        mean = torch.tensor(self.mean, dtype=torch.float64).view(broadcast)
        std = torch.tensor(self.std, dtype=torch.float64).view(broadcast)
        return (1 / (self.full * std)).to(dtype), (-mean / std).to(dtype)


@dataclass(frozen=True)
class Augmentation:
    """Shifts images by up to `pad` pixels, and flips half of them horizontally if `flip`.

    Each image is changed by a hash of (seed, epoch, row index). Uncovered pixels are black, as in
    the usual "pad, then crop".
    """

    pad: int
    flip: bool

    def apply(self, images: Bytes, indices: Indices, *, seed: int, epoch: int) -> Bytes:
        """Returns an augmented copy of images (N, C, H, W); the n-th is keyed by `indices[n]`."""
        count, channels, height, width = images.shape
        pad, span = self.pad, np.uint64(2 * self.pad + 1)
        bits = hash_rows((seed, epoch), indices)
        low, sixteen = np.uint64(0xFFFF), np.uint64(16)
        down = (((bits & low) * span) >> sixteen).astype(np.intp)
        right = ((((bits >> sixteen) & low) * span) >> sixteen).astype(np.intp)
        padded = np.zeros((count, channels, height + 2 * pad, width + 2 * pad), np.uint8)
        padded[:, :, pad : pad + height, pad : pad + width] = images
        windows = np.lib.stride_tricks.sliding_window_view(padded, (height, width), axis=(2, 3))
        cropped: Bytes = windows[np.arange(count), :, down, right]
        if self.flip:
            flipped = ((bits >> np.uint64(32)) & np.uint64(1)).astype(np.bool_)
            cropped[flipped] = cropped[flipped, :, :, ::-1]
        return cropped


COLOR = Augmentation(pad=4, flip=True)
GRAY = Augmentation(pad=2, flip=False)
"""Gray images are never flipped, because a flipped digit or letter is another symbol."""


def choose_augmentation(shape: tuple[int, ...], options: FeatureOptions) -> Augmentation | None:
    """Returns the augmentation of rows of this shape. Raises UsageError if they are not images."""
    if not options.augment:
        return None
    if len(shape) != 3:
        raise UsageError(f"augment: rows of shape {'x'.join(map(str, shape))} are not images")
    return COLOR if shape[0] == 3 else GRAY


@dataclass
class BatchTransform:
    """Final conversion of a batch, for all datasets: augment, scale, convert.

    `dimensions` is that of a row of features. Integer labels become int64, others `dtype`.
    Raises UsageError for an unknown dtype.
    """

    dtype: str
    dimensions: int = 1
    scaling: PixelScaling | None = None
    augmentation: Augmentation | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        self._dtype = check_dtype(self.dtype)
        scaling = self.scaling
        self._factors = scaling.factors(self._dtype, self.dimensions) if scaling else None

    def __call__(self, x: Array, y: Array, rows: Indices, epoch: int | None) -> Batch:
        """Converts the stored rows with indices `rows` to tensors; may modify both arrays."""
        if epoch is not None and self.augmentation is not None:
            x = self.augmentation.apply(x, rows, seed=self.seed, epoch=epoch)
        features = torch.from_numpy(x).to(self._dtype)
        if self._factors is not None:
            factor, offset = self._factors
            features = features.mul_(factor).add_(offset)
        labels = torch.from_numpy(y)
        return features, labels.to(self._dtype if labels.is_floating_point() else torch.int64)


class ArrayDataset:
    """Rows of a NumPy array, converted to features batch by batch.

    With `scaling`, the array contains bytes: images (N, C, H, W) or vectors. `rows` selects and
    orders rows of a larger array without copying it. Raises DataError if it is empty or x and y
    differ in length, and UsageError for an unknown dtype.
    """

    def __init__(
        self,
        x: Array,
        y: Array,
        *,
        dtype: str = "float32",
        rows: Indices | None = None,
        scaling: PixelScaling | None = None,
        augmentation: Augmentation | None = None,
        seed: int = 0,
    ) -> None:
        check_lengths(x, y, rows)
        self._x, self._y = x, y
        self._rows = rows
        self._finish = BatchTransform(dtype, x.ndim - 1, scaling, augmentation, seed)

    def __len__(self) -> int:
        return len(self._y) if self._rows is None else len(self._rows)

    def batch(self, indices: Indices, *, epoch: int | None = None) -> Batch:
        return self._finish(*self.stored(indices), indices, epoch)

    def stored(self, indices: Indices) -> Rows:
        """Returns a copy of rows as stored, neither scaled nor augmented."""
        rows = indices if self._rows is None else self._rows[indices]
        return self._x[rows], self._y[rows]


class TextWindowDataset:
    """Adjacent windows of a sequence: row n is characters n*size to (n+1)*size.

    The label is the same window shifted by one character. An incomplete window at the end is
    dropped. Raises DataError if the sequence is shorter than one window.
    """

    def __init__(self, sequence: Array, size: int) -> None:
        self._count = (len(sequence) - 1) // size
        if self._count < 1:
            raise DataError(
                f"empty dataset: {len(sequence):,} characters, expected at least {size + 1}"
            )
        self._sequence = sequence
        self._size = size
        self._steps = np.arange(size + 1)

    def __len__(self) -> int:
        return self._count

    def batch(self, indices: Indices, *, epoch: int | None = None) -> Batch:
        starts = wrap_indices(indices, self._count) * self._size
        windows = self._sequence[starts[:, None] + self._steps].astype(np.int64)
        x, y = np.ascontiguousarray(windows[:, :-1]), np.ascontiguousarray(windows[:, 1:])
        return torch.from_numpy(x), torch.from_numpy(y)
