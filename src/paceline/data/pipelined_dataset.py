"""A dataset with the settings of its pipeline: sharding, shuffling and prefetching."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from paceline.data.dataset import MapDataset
from paceline.data.streaming import StreamingDataset


class PipelinedDataset:
    """Rows of an inner dataset; the pipeline's batch functions are applied to each batch."""

    def __init__(
        self,
        table: MapDataset,
        *,
        shard: str | None = None,
        shuffle_rows: int = 1,
        changes: tuple[Callable[[Any, Any], tuple[Any, Any]], ...] = (),
        depth: int | None = None,
        threads: int = 1,
    ) -> None:
        self.inner = table
        self.shard = shard
        self.shuffle_rows = shuffle_rows
        self.depth = depth
        self.threads = threads
        self._changes = changes

    @property
    def blocks(self) -> StreamingDataset | None:
        """The inner dataset if it is streamed, with its blocks leased individually; else None."""
        return self.inner if isinstance(self.inner, StreamingDataset) else None

    def __len__(self) -> int:
        return len(self.inner)

    def batch(
        self, indices: npt.NDArray[np.int64], *, epoch: int | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return self.change(*self.inner.batch(indices, epoch=epoch))

    def change(self, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        for change in self._changes:
            x, y = change(x, y)
        return x, y
