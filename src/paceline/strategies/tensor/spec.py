"""Spec of tensor: each layer in slices, one per worker."""

from dataclasses import dataclass
from typing import ClassVar

from paceline.specs.base import int_field, spec_field
from paceline.specs.strategy import ModelParallel
from paceline.strategies.registry import StrategyRecord


@dataclass(frozen=True)
class TensorParallel(ModelParallel):
    """Tensor parallelism: each worker computes some outputs of a layer; all receive all of them."""

    name: ClassVar[str] = "tensor"
    size: int = spec_field(int_field(1, 1024), 2)

    @property
    def accumulates_gradients(self) -> bool:
        return False

    @property
    def model_parts(self) -> int:
        return self.size


RECORD = StrategyRecord(
    spec=TensorParallel,
    pace="paceline.protocol.pace:make_planned_pace",
    worker="paceline.strategies.tensor.worker:TensorRunner",
    simulate="paceline.strategies.tensor.simulate:TensorSimulation",
    cost="paceline.strategies.tensor.cost:TensorParallelCost",
    examples=("tensor(size=2)",),
    memory_saving=("tensor(size={workers})",),
)
