"""Weight initialization from torch's global generator, in the order of the layers."""

from __future__ import annotations

from torch import nn


def init_glorot(model: nn.Module) -> None:
    """Initializes convolution and dense layers: Glorot-uniform kernels, zero biases."""
    for layer in model.modules():
        if isinstance(layer, nn.Conv2d | nn.Linear):
            nn.init.xavier_uniform_(layer.weight)
            _zero_bias(layer)


def init_he(model: nn.Module) -> None:
    """Initializes convolution and dense layers: He-normal kernels (fan-in), zero biases."""
    for layer in model.modules():
        if isinstance(layer, nn.Conv2d | nn.Linear):
            nn.init.kaiming_normal_(layer.weight, mode="fan_in", nonlinearity="relu")
            _zero_bias(layer)


def _zero_bias(layer: nn.Conv2d | nn.Linear) -> None:
    if layer.bias is not None:
        nn.init.zeros_(layer.bias)
