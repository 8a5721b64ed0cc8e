"""Accuracy of a batch."""

from __future__ import annotations

import torch


def count_correct(output: torch.Tensor, target: torch.Tensor) -> tuple[int | None, int]:
    """Returns correct predictions (None without classes) and the number of predictions."""
    if target.is_floating_point() or output.dim() != target.dim() + 1:
        return None, int(target.shape[0])
    return int((output.argmax(-1) == target).sum()), target.numel()
