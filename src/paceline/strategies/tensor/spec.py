"""tensor as data: each layer in slices, one per worker."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from paceline.specs.base import int_field, spec_field
from paceline.specs.model_parallel import ModelParallel


@dataclass(frozen=True)
class TensorParallel(ModelParallel):
    """Layers in slices: each worker has some of a layer's outputs, and all get all of them."""

    name: ClassVar[str] = "tensor"
    size: int = spec_field(int_field(1, 1024), 2)

    @property
    def model_parts(self) -> int:
        return self.size
