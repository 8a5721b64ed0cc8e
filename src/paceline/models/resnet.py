"""CIFAR residual networks, as in the Keras example.

Convolutions have biases, and the shortcut is a 1x1 convolution where the shape changes. Batch
normalization uses torch's default momentum and epsilon. The last pooling is global, so that any
image size is supported; on 32x32 it equals the example's 8x8 pooling.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from paceline.models.sequential import initialize

STEM_FILTERS = 16
STAGES = 3


class BasicBlock(nn.Module):
    """Two 3x3 convolutions, each followed by normalization, with a shortcut."""

    def __init__(self, filters_in: int, filters: int, *, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(filters_in, filters, 3, stride=stride, padding=1)
        self.norm1 = nn.BatchNorm2d(filters)
        self.conv2 = nn.Conv2d(filters, filters, 3, padding=1)
        self.norm2 = nn.BatchNorm2d(filters)
        self.shortcut: nn.Module = nn.Identity()
        if filters_in != filters:
            self.shortcut = nn.Conv2d(filters_in, filters, 1, stride=stride)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.norm1(self.conv1(x)))
        y = self.norm2(self.conv2(y))
        return F.relu(y + self.shortcut(x))


class ResNetV1(nn.Module):
    """Depth 6n + 2 for n basic blocks in each of three stages."""

    def __init__(self, *, input_shape: Sequence[int], classes: int, blocks_per_stage: int) -> None:
        super().__init__()
        self.stem = nn.Conv2d(input_shape[0], STEM_FILTERS, 3, padding=1)
        self.norm = nn.BatchNorm2d(STEM_FILTERS)
        blocks: list[nn.Module] = []
        filters_in = STEM_FILTERS
        for stage in range(STAGES):
            filters = STEM_FILTERS * 2**stage
            for block in range(blocks_per_stage):
                stride = 2 if stage > 0 and block == 0 else 1
                blocks.append(BasicBlock(filters_in, filters, stride=stride))
                filters_in = filters
        self.blocks = nn.Sequential(*blocks)
        self.head = nn.Linear(filters_in, classes)
        initialize(self, nn.init.kaiming_normal_)

    def forward(self, images: Tensor) -> Tensor:
        """Logits (batch, classes)."""
        x = F.relu(self.norm(self.stem(images)))
        logits: Tensor = self.head(self.blocks(x).mean(dim=(2, 3)))
        return logits


class BottleneckBlock(nn.Module):
    """1x1, 3x3 and 1x1 convolutions, each preceded by normalization and activation."""

    def __init__(
        self,
        filters_in: int,
        filters: int,
        filters_out: int,
        *,
        stride: int,
        activated: bool,
        project: bool,
    ) -> None:
        super().__init__()
        # The stem's output is already normalized and activated.
        self.enter: nn.Module = nn.Identity()
        if not activated:
            self.enter = nn.Sequential(nn.BatchNorm2d(filters_in), nn.ReLU())
        self.conv1 = nn.Conv2d(filters_in, filters, 1, stride=stride)
        self.norm2 = nn.BatchNorm2d(filters)
        self.conv2 = nn.Conv2d(filters, filters, 3, padding=1)
        self.norm3 = nn.BatchNorm2d(filters)
        self.conv3 = nn.Conv2d(filters, filters_out, 1)
        self.shortcut: nn.Module = nn.Identity()
        if project:
            self.shortcut = nn.Conv2d(filters_in, filters_out, 1, stride=stride)

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv1(self.enter(x))
        y = self.conv2(F.relu(self.norm2(y)))
        y = self.conv3(F.relu(self.norm3(y)))
        total: Tensor = y + self.shortcut(x)
        return total


class ResNetV2(nn.Module):
    """Depth 9n + 2 for n bottleneck blocks in each of three stages, with L2 on the kernels.

    The loss to train is the data's loss plus `regularization()`.
    """

    def __init__(
        self, *, input_shape: Sequence[int], classes: int, blocks_per_stage: int, l2: float = 0.0
    ) -> None:
        super().__init__()
        self.l2 = l2
        self.stem = nn.Conv2d(input_shape[0], STEM_FILTERS, 3, padding=1)
        self.norm = nn.BatchNorm2d(STEM_FILTERS)
        blocks: list[nn.Module] = []
        filters_in = filters = STEM_FILTERS
        for stage in range(STAGES):
            filters_out = filters * (4 if stage == 0 else 2)
            for block in range(blocks_per_stage):
                blocks.append(
                    BottleneckBlock(
                        filters_in,
                        filters,
                        filters_out,
                        stride=2 if stage > 0 and block == 0 else 1,
                        activated=stage == 0 and block == 0,
                        project=block == 0,
                    )
                )
                filters_in = filters_out
            filters = filters_out
        self.blocks = nn.Sequential(*blocks)
        self.last_norm = nn.BatchNorm2d(filters)
        self.head = nn.Linear(filters, classes)
        initialize(self, nn.init.kaiming_normal_)

    def forward(self, images: Tensor) -> Tensor:
        """Logits (batch, classes)."""
        x = F.relu(self.norm(self.stem(images)))
        x = F.relu(self.last_norm(self.blocks(x)))
        logits: Tensor = self.head(x.mean(dim=(2, 3)))
        return logits

    def regularization(self) -> Tensor:
        """`l2` times the sum of squares of all convolution kernels.

        Biases, normalization and the final dense layer are excluded, as in the example.
        """
        kernels = [layer.weight for layer in self.modules() if isinstance(layer, nn.Conv2d)]
        return self.l2 * torch.stack([kernel.square().sum() for kernel in kernels]).sum()
