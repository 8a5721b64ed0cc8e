"""Datasets with fewer rows than another one, or whose rows are fetched one at a time."""

from dataclasses import dataclass

import torch

from paceline.data.dataset import MapDataset
from paceline.data.in_memory import Batch, Indices


@dataclass(frozen=True)
class FirstRows:
    """The first rows of a dataset. Raises IndexError for others, like any dataset."""

    inner: MapDataset
    count: int

    def __len__(self) -> int:
        return min(self.count, len(self.inner))

    def batch(self, indices: Indices, *, epoch: int | None = None) -> Batch:
        if len(indices) and int(indices.max()) >= len(self):
            raise IndexError(f"row {int(indices.max())} of {len(self)} rows")
        return self.inner.batch(indices, epoch=epoch)


@dataclass(frozen=True)
class SingleRows:
    """The same rows, each fetched alone and then stacked, as from a generator of rows."""

    inner: MapDataset

    def __len__(self) -> int:
        return len(self.inner)

    def batch(self, indices: Indices, *, epoch: int | None = None) -> Batch:
        rows = [self.inner.batch(indices[i : i + 1], epoch=epoch) for i in range(len(indices))]
        return torch.cat([x for x, _ in rows]), torch.cat([y for _, y in rows])
