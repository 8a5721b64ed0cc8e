"""What every optimizer's description has."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

from paceline.specs.base import Spec

_SLOTS = {"sgd": 0, "adam": 2, "adamw": 2, "adagrad": 1, "rmsprop": 1, "adadelta": 2}


def count_slots(word: str, options: Mapping[str, Any]) -> int:
    """Numbers that an optimizer keeps for each weight; two where it is not known by name."""
    further = sum(bool(options.get(name)) for name in ("momentum", "centered", "amsgrad"))
    return _SLOTS.get(word.lower(), 2) + further


class OptimizerSpec(Spec):
    torch_class: ClassVar[str] = ""
    """Where the implementation lives, as module:Class."""

    def options(self) -> dict[str, Any]:
        """Keyword arguments of the torch class, the learning rate apart."""
        given = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        # Not asked for is left to torch, not forbidden.
        return {k: v for k, v in given.items() if k != "fused" or v}
