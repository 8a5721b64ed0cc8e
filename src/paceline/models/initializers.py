"""Weight initialization from torch's global generator, in the order of the layers."""

from __future__ import annotations

from collections.abc import Callable

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
