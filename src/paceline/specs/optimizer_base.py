"""What every optimizer's description has."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

from paceline.specs.base import Spec


class Optimizer(Spec):
    torch_class: ClassVar[str] = ""
    """Where the implementation lives, as module:Class."""

    def options(self) -> dict[str, Any]:
        """Keyword arguments of the torch class, the learning rate apart."""
        return {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
