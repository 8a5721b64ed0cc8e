"""What a data set is to the rest of Paceline: three tables and the shape of their rows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    import torch

Kind = Literal["image", "table", "text"]


class MapDataset(Protocol):
    """Rows that can be fetched in any order, a batch at a time."""

    def __len__(self) -> int:
        """The number of rows, at least one."""
        ...

    def batch(
        self, indices: npt.NDArray[np.int64], *, epoch: int | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The features and labels of the rows at `indices`, in that order.

        An `epoch` makes it a training batch: it is augmented if the table does that, each row by
        a hash of (seed, epoch, row index) alone, so that the batch a row is in and its place
        there change nothing. Raises IndexError for a row that is not there.
        """
        ...


@dataclass(frozen=True)
class DatasetSplits:
    """A named data set, split; `notes` are what a reader of the results has to be told."""

    name: str
    input_shape: tuple[int, ...]
    classes: int | None
    """None where labels are no classes, or only reading all of them would tell."""
    kind: Kind
    train: MapDataset
    val: MapDataset | None
    test: MapDataset | None
    notes: tuple[str, ...] = ()
