"""Chains of layers: perceptrons, and the CNNs of the Keras introductory examples.

Weights are drawn from torch's global generator, in the order of the layers.
"""

import math
from collections.abc import Callable, Sequence
from itertools import pairwise

from torch import Tensor, nn


def initialize(model: nn.Module, initialize_kernel: Callable[[Tensor], Tensor]) -> None:
    """Initializes the kernels of convolution and dense layers; biases are zero.

    `nn.init.xavier_uniform_` is Glorot-uniform, `nn.init.kaiming_normal_` is He-normal (fan-in).
    """
    for layer in model.modules():
        if isinstance(layer, nn.Conv2d | nn.Linear):
            initialize_kernel(layer.weight)
            if layer.bias is not None:
                nn.init.zeros_(layer.bias)


class SequentialNet(nn.Module):
    """Layers that are applied one after another, with Glorot-uniform kernels."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.Sequential(*layers)
        initialize(self, nn.init.xavier_uniform_)

    def forward(self, samples: Tensor) -> Tensor:
        """Logits (batch, classes)."""
        logits: Tensor = self.layers(samples)
        return logits


class MLP(SequentialNet):
    """Dense layers with ReLU in between, on the flattened sample."""

    def __init__(self, *, input_shape: Sequence[int], classes: int, hidden: Sequence[int]) -> None:
        widths = (math.prod(input_shape), *hidden)
        layers: list[nn.Module] = [nn.Flatten()]
        for width, next_width in pairwise(widths):
            layers += [nn.Linear(width, next_width), nn.ReLU()]
        super().__init__(*layers, nn.Linear(widths[-1], classes))


class SmallCNN(SequentialNet):
    """conv 32 - max pool - dense 64 - dense."""

    def __init__(self, *, input_shape: Sequence[int], classes: int) -> None:
        super().__init__(
            nn.Conv2d(input_shape[0], 32, 3),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(32 * _pooled_pixels(input_shape, convolutions=1), 64),
            nn.ReLU(),
            nn.Linear(64, classes),
        )


class KerasCNN(SequentialNet):
    """conv 32 - conv 64 - max pool - dropout - dense 128 - dropout - dense."""

    def __init__(self, *, input_shape: Sequence[int], classes: int) -> None:
        super().__init__(
            nn.Conv2d(input_shape[0], 32, 3),
            nn.ReLU(),
            nn.Conv2d(32, 64, 3),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Dropout(0.25),
            nn.Flatten(),
            nn.Linear(64 * _pooled_pixels(input_shape, convolutions=2), 128),
            nn.ReLU(),
            nn.Dropout(0.5),
            nn.Linear(128, classes),
        )


def _pooled_pixels(input_shape: Sequence[int], *, convolutions: int) -> int:
    """Returns the pixels after unpadded 3x3 convolutions (2 per side each) and 2x2 pooling."""
    return math.prod((side - 2 * convolutions) // 2 for side in input_shape[1:])
