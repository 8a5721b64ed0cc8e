"""Base class of optimizer specs."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

from paceline.specs.base import Spec

_SLOTS = {"sgd": 0, "adam": 2, "adamw": 2, "adagrad": 1, "rmsprop": 1, "adadelta": 2}


def count_slots(word: str, options: Mapping[str, Any]) -> int:
    """State values per weight; two for an optimizer that is not known by name."""
    further = sum(bool(options.get(name)) for name in ("momentum", "centered", "amsgrad"))
    return _SLOTS.get(word.lower(), 2) + further


class OptimizerSpec(Spec):
    torch_class: ClassVar[str] = ""
    """Implementation, as module:Class."""

    def options(self) -> dict[str, Any]:
        """Returns the keyword arguments of the torch class, without the learning rate."""
        given = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        # Not asked for is left to torch, not forbidden.
        return {k: v for k, v in given.items() if k != "fused" or v}
