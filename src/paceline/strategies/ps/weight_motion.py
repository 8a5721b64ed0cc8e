"""Alignment of a worker's gradients with the motion of its weights, on a sample of the elements."""

from __future__ import annotations

import torch

MAX_ELEMENTS = 1 << 14
"""Elements compared: their cosine has a standard error below 0.01, and costs little."""


class WeightMotion:
    """The last change of the weights that a worker pulled; buffers have the layout of its pulls."""

    def __init__(self, parameters: list[torch.nn.Parameter]) -> None:
        """With parameters of several dtypes there is no alignment."""
        kinds = {p.dtype for p in parameters}
        self._dtype = kinds.pop() if len(kinds) == 1 else None
        self._before: torch.Tensor | None = None
        self.delta: torch.Tensor | None = None
        """Unit vector of the last change; None if the weights did not change."""

    def _sample(self, buffer: torch.Tensor) -> torch.Tensor:
        assert self._dtype is not None
        values = buffer.view(self._dtype)
        # Odd, so that the elements of a matrix come from all of its columns.
        stride = max(1, values.numel() // MAX_ELEMENTS) | 1
        return values[::stride].float()

    @torch.no_grad()
    def update(self, weights: torch.Tensor) -> None:
        """Takes the weights that were just pulled."""
        if self._dtype is None:
            return
        now = self._sample(weights).clone()
        if self._before is not None:
            change = now - self._before
            length = float(change.norm())
            self.delta = change.div_(length) if length > 0 else None
        self._before = now

    @torch.no_grad()
    def align(self, gradient: torch.Tensor, delta: torch.Tensor | None) -> float | None:
        """Returns the component of a gradient along a change; None if either is unknown."""
        if delta is None:
            return None
        return float(torch.dot(self._sample(gradient), delta))
