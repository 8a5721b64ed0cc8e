"""Evaluation of a model on (a share of) a table."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from paceline.data import Table
from paceline.errors import UsageError
from paceline.protocol.messages import split_batch
from paceline.scoring import count_correct
from paceline.worker.build import Loss

BATCH = 256


def evaluate_share(
    model: torch.nn.Module,
    loss_of: Loss,
    table: Table,
    *,
    rank: int = 0,
    size: int = 1,
    device: torch.device | None = None,
    alive: Callable[[], None] = lambda: None,
) -> tuple[float, int | None, int]:
    """Sum of losses, right predictions and predictions on this worker's share of the rows.

    `alive` is called before each batch: a long evaluation is not a stuck worker.
    """
    if len(table) == 0:
        raise UsageError("an empty table cannot be evaluated")
    cuts = split_batch(len(table), size)
    loss_sum, count = 0.0, 0
    correct: int | None = 0
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            for start in range(cuts[rank], cuts[rank + 1], BATCH):
                rows = np.arange(start, min(start + BATCH, cuts[rank + 1]), dtype=np.int64)
                alive()
                inputs, targets = table.batch(rows)
                if device is not None:
                    inputs, targets = inputs.to(device), targets.to(device)
                output = model(inputs)
                right, made = count_correct(output, targets)
                loss_sum += float(loss_of(output, targets)) * made
                correct = None if right is None or correct is None else correct + right
                count += made
    finally:
        model.train(was_training)
    return loss_sum, correct, count
