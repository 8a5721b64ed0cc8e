"""Densely connected networks with bottlenecks and compression (DenseNet-BC)."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from paceline.models.sequential import initialize

DENSE_BLOCKS = 3
BOTTLENECK_FACTOR = 4


class DenseLayer(nn.Module):
    """Adds `growth` channels to its input, through a 1x1 bottleneck."""

    def __init__(self, channels: int, *, growth: int, dropout: float) -> None:
        super().__init__()
        inner = BOTTLENECK_FACTOR * growth
        # No biases: the following normalization would cancel them.
        self.new_channels = nn.Sequential(
            nn.BatchNorm2d(channels),
            nn.ReLU(),
            nn.Conv2d(channels, inner, 1, bias=False),
            nn.Dropout(dropout),
            nn.BatchNorm2d(inner),
            nn.ReLU(),
            nn.Conv2d(inner, growth, 3, padding=1, bias=False),
            nn.Dropout(dropout),
        )

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([x, self.new_channels(x)], dim=1)


def make_transition(channels: int, channels_out: int, *, dropout: float) -> nn.Sequential:
    """Compresses the channels and halves height and width."""
    return nn.Sequential(
        nn.BatchNorm2d(channels),
        nn.ReLU(),
        nn.Conv2d(channels, channels_out, 1, bias=False),
        nn.Dropout(dropout),
        nn.AvgPool2d(2),
    )


class DenseNetBC(nn.Module):
    """Three dense blocks with transitions in between."""

    def __init__(
        self,
        *,
        input_shape: Sequence[int],
        classes: int,
        depth: int,
        growth: int,
        reduction: float,
        dropout: float,
    ) -> None:
        super().__init__()
        # Stem, dense layer and two transitions count as 4; each layer has two convolutions.
        layers_per_block = (depth - 4) // (2 * DENSE_BLOCKS)
        channels = 2 * growth
        self.stem = nn.Conv2d(input_shape[0], channels, 3, padding=1, bias=False)
        parts: list[nn.Module] = []
        for block in range(DENSE_BLOCKS):
            for _ in range(layers_per_block):
                parts.append(DenseLayer(channels, growth=growth, dropout=dropout))
                channels += growth
            if block < DENSE_BLOCKS - 1:
                compressed = int(channels * reduction)
                parts.append(make_transition(channels, compressed, dropout=dropout))
                channels = compressed
        self.blocks = nn.Sequential(*parts)
        self.last_norm = nn.BatchNorm2d(channels)
        self.head = nn.Linear(channels, classes)
        initialize(self, nn.init.kaiming_normal_)

    def forward(self, images: Tensor) -> Tensor:
        """Logits (batch, classes)."""
        x = F.relu(self.last_norm(self.blocks(self.stem(images))))
        logits: Tensor = self.head(x.mean(dim=(2, 3)))
        return logits
