"""Runs an element-wise optimizer on a few long tensors instead of many small ones.

Parameters that are adjacent in one buffer, with adjacent gradients in another, are one long row to
an element-wise optimizer. It then needs a few calls per step, regardless of the number of tensors.
The original optimizer keeps the options, and its slots are the ones that are read and written;
while rows are in use, its slots are updated on demand.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from paceline.strategies.optimizer_traits import optimizer_traits
from paceline.strategies.runner import copy_options


@dataclass
class FlatSegment:
    """Adjacent parameters of one dtype and parameter group; the padding between them is 0."""

    weights: torch.nn.Parameter
    pieces: list[tuple[torch.nn.Parameter, int]]
    """Parameters and their offsets."""
    group: int


class FlatOptimizer:
    """Steps rows instead of the parameters of `optimizer`."""

    def __init__(self, optimizer: torch.optim.Optimizer, rows: Sequence[FlatSegment]) -> None:
        self._pieces = optimizer
        self._rows = rows
        self._used = sorted({row.group for row in rows})
        kind: Any = type(optimizer)
        self.optimizer: torch.optim.Optimizer = kind(
            [
                {**optimizer.param_groups[g], "params": [r.weights for r in rows if r.group == g]}
                for g in self._used
            ]
        )

    @classmethod
    def from_optimizer(
        cls, optimizer: torch.optim.Optimizer, rows: Sequence[FlatSegment]
    ) -> FlatOptimizer | None:
        """Creates it with the optimizer's state; None if states within a row differ."""
        # The slot of a scalar cannot be distinguished from a step count that is kept next to it.
        scalar = any(piece.dim() == 0 for row in rows for piece, _ in row.pieces)
        if scalar or not optimizer_traits(optimizer).flattenable:
            return None
        made = cls(optimizer, rows)
        for row in rows:
            states = [optimizer.state.get(piece, {}) for piece, _ in row.pieces]
            slots = _join(row, states)
            if slots is None:
                return None
            if slots:
                made.optimizer.state[row.weights] = slots
        made.write_back()  # the original slots are replaced by views of the rows
        return made

    def prepare(self, gradients: Sequence[torch.Tensor | None]) -> torch.optim.Optimizer:
        """Returns the optimizer of the rows, with gradients (None skips a row) and options."""
        for row, gradient in zip(self._rows, gradients, strict=True):
            row.weights.grad = gradient
        copy_options(self.optimizer, (self._pieces.param_groups[group] for group in self._used))
        return self.optimizer

    def write_back(self) -> None:
        """Writes the current slots of the rows back to the parameters, as views where possible."""
        for row in self._rows:
            kept = self.optimizer.state.get(row.weights, {})
            if not kept:
                continue
            for piece, start in row.pieces:
                self._pieces.state[piece] = {
                    slot: _part(value, row, piece, start) for slot, value in kept.items()
                }


def _part(value: Any, row: FlatSegment, piece: torch.nn.Parameter, start: int) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    if value.shape != row.weights.shape:
        return value.clone()
    return value[start : start + piece.numel()].view_as(piece)


def _join(row: FlatSegment, states: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
    """Joins the slots of a row's parameters; None if they cannot be joined."""
    joined: dict[str, Any] = {}
    first = states[0]
    if any(state.keys() != first.keys() for state in states):
        return None
    for slot, example in first.items():
        values = [state[slot] for state in states]
        parts = list(zip(row.pieces, values, strict=True))
        if all(isinstance(v, torch.Tensor) and v.shape == p.shape for (p, _), v in parts):
            whole = torch.zeros_like(row.weights, dtype=example.dtype)
            for (piece, start), value in parts:
                whole[start : start + piece.numel()] = value.reshape(-1)
            joined[slot] = whole.detach()
        elif isinstance(example, torch.Tensor):
            if any(v.shape != example.shape or not torch.equal(v, example) for v in values):
                return None
            joined[slot] = example.clone()
        elif any(value != example for value in values):
            return None
        else:
            joined[slot] = example
    return joined
