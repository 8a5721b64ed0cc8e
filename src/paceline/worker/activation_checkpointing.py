"""Activation checkpointing: only the inputs of each block are kept until backward."""

from __future__ import annotations

import functools

import torch
from torch.utils.checkpoint import checkpoint

from paceline.errors import UsageError


def find_blocks(model: torch.nn.Module) -> list[torch.nn.Module]:
    """Returns the outermost members of a Sequential or ModuleList that have submodules."""
    inside: set[torch.nn.Module] = set()
    blocks = []
    for row in model.modules():
        if not isinstance(row, torch.nn.Sequential | torch.nn.ModuleList) or row in inside:
            continue
        for block in row.children():
            if block not in inside and any(True for _ in block.children()):
                blocks.append(block)
                inside.update(block.modules())
    return blocks


def checkpoint_activations(model: torch.nn.Module) -> None:
    """Recomputes each block in backward, with the same random numbers. Raises UsageError."""
    blocks = find_blocks(model)
    if not blocks:
        raise UsageError(
            "recompute: the model has no blocks to recompute (modules with parts in "
            "a Sequential or ModuleList); remove it"
        )
    for block in blocks:
        again = functools.partial(checkpoint, block.forward, use_reentrant=False)
        block.forward = again
