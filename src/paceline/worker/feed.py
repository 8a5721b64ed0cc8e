"""From a lease to a batch: the epoch's seeded order, and the rows behind it."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from paceline.data import Table
from paceline.data.keys import hash_rows
from paceline.protocol.messages import Lease


def epoch_order(samples: int, seed: int, epoch: int) -> NDArray[np.int64]:
    """The order of an epoch: it depends on seed and epoch alone, on every machine alike."""
    keys = hash_rows((seed, epoch), np.arange(samples, dtype=np.int64))
    return np.argsort(keys, kind="stable").astype(np.int64)


class Feed:
    """Batches of the training table by lease."""

    def __init__(self, table: Table, seed: int, device: torch.device) -> None:
        self._table = table
        self.samples = len(table)
        self._seed = seed
        self._device = device
        self._epoch = -1
        self._order = np.empty(0, dtype=np.int64)

    def batch(self, lease: Lease) -> tuple[torch.Tensor, torch.Tensor]:
        inputs, targets = self._table.batch(self.rows(lease), epoch=lease.epoch)
        return inputs.to(self._device), targets.to(self._device)

    def rows(self, lease: Lease) -> NDArray[np.int64]:
        if lease.epoch != self._epoch:
            self._order = epoch_order(len(self._table), self._seed, lease.epoch)
            self._epoch = lease.epoch
        return self._order[lease.lo : lease.hi]
