"""The dataset interface of Paceline: training, validation and test rows, and their shape."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol

from paceline.errors import UsageError

if TYPE_CHECKING:
    from paceline.data.in_memory import Batch, Indices

Kind = Literal["image", "table", "text"]
PixelScale = tuple[float, tuple[float, ...], tuple[float, ...]]
"""Full scale, and mean and standard deviation per channel."""


class MapDataset(Protocol):
    """Rows that can be fetched in any order, one batch at a time."""

    def __len__(self) -> int:
        """Returns the number of rows, at least one."""

    def batch(self, indices: Indices, *, epoch: int | None = None) -> Batch:
        """Returns the features and labels of the rows at `indices`, in that order.

        With an `epoch` it is a training batch and is augmented, if the dataset supports that. Each
        row is augmented by a hash of (seed, epoch, row index), regardless of its batch and
        position. Raises IndexError for a row that does not exist.
        """


@dataclass(frozen=True)
class Validation:
    """The rows for validation: the test set, or some training rows that are held out."""

    held_out: float | int = 0.1
    """Fraction or number of training rows; 0 for none."""
    uses_test: bool = False

    def count(self, rows: int) -> int:
        """Returns the number of rows to hold out. Raises UsageError if too few remain."""
        count = self.held_out if isinstance(self.held_out, int) else int(rows * self.held_out)
        if count >= rows:
            raise UsageError(f"validation {self.held_out}: only {rows:,} training rows exist")
        return count


def parse_validation(text: str) -> Validation:
    """Parses `none`, `test`, a fraction or a number of rows. Raises UsageError."""
    if text in ("none", "test"):
        return Validation(0, text == "test")
    try:
        value = float(text)
        if 0 < value < 1:
            return Validation(value)
        if value >= 1 and value == int(value):
            return Validation(int(value))
    except (ValueError, OverflowError):
        pass
    raise UsageError(
        f"validation {text!r}: must be none, test, a fraction such as 0.1 or a number of rows"
    )


@dataclass(frozen=True, kw_only=True)
class FeatureOptions:
    """Conversion of rows to features, and the rows for validation."""

    dtype: str = "float32"
    augment: bool = False
    seed: int = 0
    scaling: str | None = None
    """Scaling of pixels: standard, unit or none. Default: that of the dataset's description."""
    validation: Validation | None = None
    """Default: the dataset's own validation rows, or a tenth of the training rows."""


def scale_pixels(
    name: str, known: PixelScale | None, scaling: str | None, full: float = 255.0
) -> PixelScale:
    """Returns full scale, means and deviations. Raises UsageError if they are unknown."""
    if known is not None:
        full = known[0]
    if scaling == "standard" and known is None:
        raise UsageError(
            f"{name}: scaling standard requires means and deviations, which are not known; use "
            "scaling unit, or read(scale=...) in Python"
        )
    plain = (0.0,), (1.0,)
    if scaling == "none":
        return (1.0, *plain)
    return (full, *plain) if known is None or scaling == "unit" else known


@dataclass(frozen=True)
class DatasetSplits:
    """A dataset, split; `notes` are caveats to show with the results."""

    name: str
    input_shape: tuple[int, ...]
    classes: int | None
    """None if labels are not classes, or if counting them requires reading all data."""
    kind: Kind
    train: MapDataset
    val: MapDataset | None
    test: MapDataset | None
    notes: tuple[str, ...] = ()
