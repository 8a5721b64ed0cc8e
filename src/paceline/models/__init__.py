"""Built-in models, by name. Importing this package does not import torch."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from typing import TYPE_CHECKING, cast

from paceline.errors import UsageError
from paceline.models.catalog import Kind, ModelInfo, check_input_shape, find, names

if TYPE_CHECKING:
    import torch

__all__ = ["Kind", "ModelInfo", "build", "find", "names"]


def build(name: str, *, input_shape: Sequence[int], classes: int) -> torch.nn.Module:
    """Builds a model for samples of `input_shape` (without batch dimension) and `classes` outputs.

    Weights are drawn from torch's global generator; seed it for reproducible weights.
    """
    entry = find(name)
    shape = check_input_shape(entry, input_shape)
    if classes < 1:
        raise UsageError(
            f"classes={classes} for model {entry.name!r}: must be at least 1; "
            "give the number of classes, or of characters for text"
        )
    module_name, _, factory_name = entry.factory.partition(":")
    # Imported lazily, so that listing or checking models does not load torch.
    factory = getattr(import_module(f"{__name__}.{module_name}"), factory_name)
    return cast("torch.nn.Module", factory(input_shape=shape, classes=classes, **entry.options))
