"""Two convolutional networks with the layers of the Keras introductory examples."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from paceline.models.initializers import init_glorot


class SmallCNN(nn.Module):
    """conv 32 - max pool - dense 64 - dense."""

    def __init__(self, *, input_shape: Sequence[int], classes: int) -> None:
        super().__init__()
        channels, height, width = input_shape
        self.layers = nn.Sequential(
            nn.Conv2d(channels, 32, 3),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(32 * _pooled(height, convolutions=1) * _pooled(width, convolutions=1), 64),
            nn.ReLU(),
            nn.Linear(64, classes),
        )
        init_glorot(self)

    def forward(self, images: Tensor) -> Tensor:
        """Logits (batch, classes)."""
        logits: Tensor = self.layers(images)
        return logits


class KerasCNN(nn.Module):
    """conv 32 - conv 64 - max pool - dropout - dense 128 - dropout - dense."""

    def __init__(self, *, input_shape: Sequence[int], classes: int) -> None:
        super().__init__()
        channels, height, width = input_shape
        self.layers = nn.Sequential(
            nn.Conv2d(channels, 32, 3),
            nn.ReLU(),
            nn.Conv2d(32, 64, 3),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Dropout(0.25),
            nn.Flatten(),
            nn.Linear(64 * _pooled(height, convolutions=2) * _pooled(width, convolutions=2), 128),
            nn.ReLU(),
            nn.Dropout(0.5),
            nn.Linear(128, classes),
        )
        init_glorot(self)

    def forward(self, images: Tensor) -> Tensor:
        """Logits (batch, classes)."""
        logits: Tensor = self.layers(images)
        return logits


def _pooled(side_pixels: int, *, convolutions: int) -> int:
    """Returns the side after unpadded 3x3 convolutions (2 pixels each) and 2x2 pooling."""
    return (side_pixels - 2 * convolutions) // 2
