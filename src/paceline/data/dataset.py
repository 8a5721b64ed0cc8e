"""The dataset interface of Paceline: training, validation and test rows, and their shape."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol

if TYPE_CHECKING:
    from paceline.data.in_memory import Batch, Indices

Kind = Literal["image", "table", "text"]


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


@dataclass(frozen=True, kw_only=True)
class FeatureOptions:
    """Conversion of rows to features, the same for all splits of a dataset."""

    dtype: str = "float32"
    augment: bool = False
    seed: int = 0


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
