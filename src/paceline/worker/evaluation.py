"""Evaluates a model on (a share of) a dataset."""

from collections.abc import Callable

import numpy as np
import torch

from paceline.data import MapDataset
from paceline.errors import UsageError
from paceline.protocol.balance import split_batch
from paceline.strategies.runner import LossOf, count_correct

BATCH = 256

EvalShard = tuple[int, int]
"""Index of a part of the rows, and the number of parts."""
Predict = Callable[[torch.Tensor], torch.Tensor | None]
"""Returns the model's outputs; None if another worker has them."""


def evaluate_shard(
    model: torch.nn.Module,
    loss_of: LossOf,
    table: MapDataset,
    *,
    share: EvalShard = (0, 1),
    predict: Predict | None = None,
    device: torch.device | None = None,
    alive: Callable[[], None] = lambda: None,
) -> tuple[float, int | None, int]:
    """Returns the sum of losses, correct predictions and predictions on a share of the rows.

    `alive` is called before each batch: a long evaluation is not a stuck worker.
    """
    if len(table) == 0:
        raise UsageError("an empty dataset cannot be evaluated")
    part, parts = share
    cuts = split_batch(len(table), parts)
    loss_sum, count = 0.0, 0
    correct: int | None = 0
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            for start in range(cuts[part], cuts[part + 1], BATCH):
                rows = np.arange(start, min(start + BATCH, cuts[part + 1]), dtype=np.int64)
                alive()
                inputs, targets = table.batch(rows)
                if device is not None:
                    inputs, targets = inputs.to(device), targets.to(device)
                output = model(inputs) if predict is None else predict(inputs)
                if output is None:
                    continue
                right, made = count_correct(output, targets)
                loss_sum += float(loss_of(output, targets)) * made
                correct = None if right is None or correct is None else correct + right
                count += made
    finally:
        model.train(was_training)
    return loss_sum, correct, count
