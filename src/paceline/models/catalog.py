"""Catalog of built-in models: names, accepted inputs and factories. Does not import torch."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from paceline.errors import UsageError, suggest_name

Kind = Literal["image", "vector-or-image", "text"]


@dataclass(frozen=True)
class ModelInfo:
    """A model. `factory` is "module:class", called with shape, classes and `options`."""

    name: str
    kind: Kind
    factory: str
    description: str
    options: Mapping[str, Any] = field(default_factory=dict)
    min_side_pixels: int = 1
    """Minimum height and width of an image, given by unpadded convolutions and pooling."""


def _mlp(name: str, *hidden: int) -> ModelInfo:
    widths = "-".join(map(str, hidden))
    text = f"perceptron, ReLU, hidden layers {widths}; flattens any input"
    return ModelInfo(name, "vector-or-image", "sequential:MLP", text, {"hidden": hidden})


def _resnet_v1(depth: int) -> ModelInfo:
    text = f"CIFAR ResNet v1 of depth {depth}: three stages of basic blocks, 16/32/64 filters"
    # Two convolutions per block in three stages, plus the stem and the final dense layer.
    options = {"blocks_per_stage": (depth - 2) // 6}
    return ModelInfo(f"resnet{depth}", "image", "resnet:ResNetV1", text, options)


def _densenet_bc(depth: int, growth: int) -> ModelInfo:
    text = f"DenseNet-BC of depth {depth}, growth {growth}, reduction 0.5, dropout 0.1"
    options = {"depth": depth, "growth": growth, "reduction": 0.5, "dropout": 0.1}
    name = f"densenet-bc-{depth}-{growth}"
    return ModelInfo(name, "image", "densenet:DenseNetBC", text, options, min_side_pixels=4)


_ENTRIES = {
    entry.name: entry
    for entry in (
        _mlp("mlp-128", 128),
        _mlp("mlp-300-100", 300, 100),
        _mlp("mlp-wide", 4096, 2048),
        ModelInfo(
            "cnn-small",
            "image",
            "sequential:SmallCNN",
            "one 3x3 convolution of 32 filters, max pooling, dense 64",
            min_side_pixels=4,
        ),
        ModelInfo(
            "cnn-keras",
            "image",
            "sequential:KerasCNN",
            "two 3x3 convolutions of 32 and 64 filters, max pooling, dense 128, dropout",
            min_side_pixels=6,
        ),
        *(_resnet_v1(depth) for depth in (8, 20, 32, 50, 56)),
        ModelInfo(
            "resnet56v2",
            "image",
            "resnet:ResNetV2",
            "CIFAR ResNet v2 of depth 56: pre-activation bottlenecks, 64/128/256 outputs, L2",
            {"blocks_per_stage": 6, "l2": 1e-4},
        ),
        *(_densenet_bc(depth, growth=12) for depth in (22, 40)),
        ModelInfo(
            "char-transformer",
            "text",
            "transformer:CharTransformer",
            "causal transformer over characters: 4 layers, width 128, 4 heads, tied embedding",
        ),
    )
}


def names() -> list[str]:
    """Returns all model names in catalog order: small to large within a family."""
    return list(_ENTRIES)


def find(name: str) -> ModelInfo:
    """Returns the entry of a name. Raises UsageError with the nearest known name."""
    try:
        return _ENTRIES[name]
    except KeyError:
        raise UsageError(f"unknown model {name!r}; {suggest_name(name, _ENTRIES)}") from None


def check_input_shape(entry: ModelInfo, input_shape: Sequence[int]) -> tuple[int, ...]:
    """Returns the shape as a tuple. Raises UsageError if the model does not accept it."""
    shape = tuple(int(size) for size in input_shape)
    if not shape or min(shape) < 1:
        raise UsageError(
            f"input shape {shape} of model {entry.name!r}: all sizes must be at least 1; "
            "give the shape of one sample without the batch dimension"
        )
    if entry.kind == "text" and len(shape) != 1:
        problem = f"is not supported by model {entry.name!r}: it reads text as (time,)"
        remedy = f"a text dataset or {_others('image')}"
    elif entry.kind == "image" and len(shape) != 3:
        problem = (
            f"is not supported by model {entry.name!r}: it reads images as "
            "(channels, height, width)"
        )
        remedy = f"an image dataset or {_others('vector-or-image')}"
    elif entry.kind == "image" and min(shape[1:]) < entry.min_side_pixels:
        problem = (
            f"is too small for model {entry.name!r}: height and width must be at least "
            f"{entry.min_side_pixels}"
        )
        remedy = f"larger images or {_others('vector-or-image')}"
    else:
        return shape
    raise UsageError(f"input shape {shape} {problem}; use {remedy}")


def _others(kind: Kind) -> str:
    """Suggests models that accept the other kind of data."""
    matching = [entry.name for entry in _ENTRIES.values() if entry.kind == kind]
    return "a model such as " + " or ".join(matching[:2])
