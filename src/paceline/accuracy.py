"""What a batch's predictions are worth."""

from __future__ import annotations

import torch


def count_correct(output: torch.Tensor, target: torch.Tensor) -> tuple[int | None, int]:
    """Right predictions and all predictions; None is right where there are no classes."""
    if target.is_floating_point() or output.dim() != target.dim() + 1:
        return None, int(target.shape[0])
    return int((output.argmax(-1) == target).sum()), target.numel()
