"""Spec of tensor: each layer in slices, one per worker."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from paceline.specs.base import int_field, spec_field
from paceline.specs.model_parallel import ModelParallel


@dataclass(frozen=True)
class TensorParallel(ModelParallel):
    """Tensor parallelism: each worker computes some outputs of a layer; all receive all of them."""

    name: ClassVar[str] = "tensor"
    size: int = spec_field(int_field(1, 1024), 2)

    @property
    def model_parts(self) -> int:
        return self.size
