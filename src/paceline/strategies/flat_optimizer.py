"""An optimizer's work on many small tensors as work on a few long ones.

Pieces that lie side by side in one buffer, with their gradients side by side in another, are one
long row of numbers to an optimizer that treats numbers one by one. It then takes a handful of calls
a step, however many tensors the model has. The pieces' own optimizer keeps the options and is the
one whose slots are read and written; while rows are in use its slots are brought up to date on
demand.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from paceline.strategies.optimizer_traits import optimizer_traits


@dataclass
class FlatSegment:
    """Neighbouring pieces of one type and one group of the optimizer; what lies between is 0."""

    weights: torch.nn.Parameter
    pieces: list[tuple[torch.nn.Parameter, int]]
    """And where each begins."""
    group: int


class FlatOptimizer:
    """Steps rows in place of the pieces of `optimizer`."""

    def __init__(self, optimizer: torch.optim.Optimizer, rows: Sequence[FlatSegment]) -> None:
        self._pieces = optimizer
        self._rows = rows
        self._used = sorted({row.group for row in rows})
        kind: Any = type(optimizer)
        self._flat: torch.optim.Optimizer = kind(
            [
                {**optimizer.param_groups[g], "params": [r.weights for r in rows if r.group == g]}
                for g in self._used
            ]
        )

    @classmethod
    def from_optimizer(
        cls, optimizer: torch.optim.Optimizer, rows: Sequence[FlatSegment]
    ) -> FlatOptimizer | None:
        """With what the pieces' optimizer remembers; None where pieces of a row differ in it."""
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
                made._flat.state[row.weights] = slots
        made.write_back()  # what the pieces had of their own is not kept beside the rows
        return made

    def step(self, gradients: Sequence[torch.Tensor | None]) -> None:
        """One gradient a row (None: it stays as it is), with the options of the pieces."""
        for row, gradient in zip(self._rows, gradients, strict=True):
            row.weights.grad = gradient
        for mine, group in zip(self._flat.param_groups, self._used, strict=True):
            told = self._pieces.param_groups[group]
            mine.update({k: v for k, v in told.items() if k != "params"})
        self._flat.step()

    def write_back(self) -> None:
        """The pieces' slots as they are now: parts of the rows', where they are as long."""
        for row in self._rows:
            kept = self._flat.state.get(row.weights, {})
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
    """Slots of a row, made of its pieces'; None where they cannot be one."""
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
