"""Multi-layer perceptrons."""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch import Tensor, nn

from paceline.models.initializers import init_glorot


class MLP(nn.Module):
    """Dense layers with ReLU in between, on the flattened sample."""

    def __init__(self, *, input_shape: Sequence[int], classes: int, hidden: Sequence[int]) -> None:
        super().__init__()
        layers: list[nn.Module] = [nn.Flatten()]
        width = math.prod(input_shape)
        for next_width in hidden:
            layers += [nn.Linear(width, next_width), nn.ReLU()]
            width = next_width
        layers.append(nn.Linear(width, classes))
        self.layers = nn.Sequential(*layers)
        init_glorot(self)

    def forward(self, samples: Tensor) -> Tensor:
        """Logits (batch, classes)."""
        logits: Tensor = self.layers(samples)
        return logits
