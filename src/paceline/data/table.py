"""Tables held in memory: rows of numbers or images, and the windows of a text."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from paceline.data.augment import Augmentation
from paceline.errors import DataError, UsageError

DTYPES: dict[str, torch.dtype] = {"float32": torch.float32, "float64": torch.float64}


def check_dtype(dtype: str) -> torch.dtype:
    """The torch dtype of this name; raises UsageError if features cannot be of it."""
    if dtype not in DTYPES:
        raise UsageError(f"dtype {dtype!r} is not one of {', '.join(DTYPES)}")
    return DTYPES[dtype]


@dataclass(frozen=True)
class Scaling:
    """From stored bytes to features: (byte / full - mean) / std, mean and std by channel."""

    full: float
    mean: tuple[float, ...]
    std: tuple[float, ...]

    def factors(self, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """The same as one multiplication and one addition, shaped (C, 1, 1)."""
        mean = torch.tensor(self.mean, dtype=torch.float64).view(-1, 1, 1)
        std = torch.tensor(self.std, dtype=torch.float64).view(-1, 1, 1)
        return (1 / (self.full * std)).to(dtype), (-mean / std).to(dtype)


class ArrayTable:
    """Rows of a NumPy array, made into features when a batch is asked for.

    With `scaling` the array holds images as bytes, (N, C, H, W). `rows` selects and orders rows
    of a larger array without copying it. Raises DataError if it is empty or x and y differ in
    length, and UsageError for an unknown dtype.
    """

    def __init__(
        self,
        x: npt.NDArray[Any],
        y: npt.NDArray[Any],
        *,
        dtype: str = "float32",
        rows: npt.NDArray[np.int64] | None = None,
        scaling: Scaling | None = None,
        augmentation: Augmentation | None = None,
        seed: int = 0,
    ) -> None:
        if len(x) != len(y):
            raise DataError(f"table with {len(x):,} rows of features but {len(y):,} labels")
        if len(x) == 0 or (rows is not None and len(rows) == 0):
            raise DataError("empty table: expected at least one row")
        self._dtype = check_dtype(dtype)
        self._x = x if scaling else x.astype(dtype, copy=False)
        self._y = y.astype(np.int64, copy=False)
        self._rows = rows
        self._factors = scaling.factors(self._dtype) if scaling else None
        self._augmentation = augmentation
        self._seed = seed

    def __len__(self) -> int:
        return len(self._y) if self._rows is None else len(self._rows)

    def batch(
        self, indices: npt.NDArray[np.int64], *, epoch: int | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        rows = indices if self._rows is None else self._rows[indices]
        x = self._x[rows]
        if epoch is not None and self._augmentation is not None:
            x = self._augmentation.apply(x, indices, seed=self._seed, epoch=epoch)
        features = torch.from_numpy(x)
        if self._factors is not None:
            factor, offset = self._factors
            features = features.to(self._dtype).mul_(factor).add_(offset)
        return features, torch.from_numpy(self._y[rows])


class WindowTable:
    """Windows of a sequence, side by side: row n is characters n*size to (n+1)*size.

    The label is the same window one character on. Characters at the end that do not fill a window
    are left out. Raises DataError if the sequence does not fill one.
    """

    def __init__(self, sequence: npt.NDArray[Any], size: int) -> None:
        self._count = (len(sequence) - 1) // size
        if self._count < 1:
            raise DataError(
                f"empty table: {len(sequence):,} characters, expected at least {size + 1}"
            )
        self._sequence = sequence
        self._size = size
        self._steps = np.arange(size + 1)

    def __len__(self) -> int:
        return self._count

    def batch(
        self, indices: npt.NDArray[np.int64], *, epoch: int | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if len(indices) and (indices.max() >= self._count or indices.min() < -self._count):
            raise IndexError(f"row out of range: the table has {self._count} rows")
        starts = (indices % self._count) * self._size
        windows = self._sequence[starts[:, None] + self._steps].astype(np.int64)
        x, y = np.ascontiguousarray(windows[:, :-1]), np.ascontiguousarray(windows[:, 1:])
        return torch.from_numpy(x), torch.from_numpy(y)
