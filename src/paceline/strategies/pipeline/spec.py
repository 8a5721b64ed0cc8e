"""Spec of pipeline: the model in stages, each on its own worker."""

from dataclasses import dataclass
from typing import ClassVar

from paceline.errors import SpecError
from paceline.specs.base import bool_field, choice_field, int_field, spec_field
from paceline.specs.expression import Call, Value
from paceline.specs.strategy import ModelParallel
from paceline.strategies.registry import StrategyRecord


def _read_cut(value: Value, where: str) -> str | tuple[str, ...]:
    """`even`, `auto`, or names of layers."""
    parts = value if isinstance(value, tuple) else (value,)
    names = []
    for part in parts:
        if not isinstance(part, Call) or part.args or part.named:
            raise SpecError(f"{where} must be even, auto, or names of layers, got {part}")
        names.append(part.name)
    return names[0] if names in (["even"], ["auto"]) else tuple(names)


@dataclass(frozen=True)
class PipelineParallel(ModelParallel):
    """The model in stages, each on its own worker; micro-batches pass through them."""

    name: ClassVar[str] = "pipeline"
    stages: int = spec_field(int_field(1, 1024), 2)
    micro: int = spec_field(int_field(1, 65536), 4)
    schedule: str = spec_field(choice_field("1f1b", "gpipe"), "1f1b")
    cut: str | tuple[str, ...] = spec_field(_read_cut, "even")
    recompute: bool = spec_field(bool_field, False)
    """Recompute activations in the backward pass instead of keeping them."""

    def __post_init__(self) -> None:
        if self.cuts and len(self.cuts) != self.stages - 1:
            raise SpecError(
                f"pipeline(stages={self.stages}) requires {self.stages - 1} cuts, "
                f"but {len(self.cuts)} were given"
            )

    @property
    def accumulates_gradients(self) -> bool:
        return False

    @property
    def cuts(self) -> tuple[str, ...]:
        return () if isinstance(self.cut, str) else self.cut

    @property
    def model_parts(self) -> int:
        return self.stages

    @property
    def loss_part(self) -> int:
        return self.stages - 1

    def check_batch(self, batch: int, workers: int) -> None:
        count = workers // self.stages * self.micro
        if batch % count:
            raise SpecError(
                f"--batch {batch} cannot be divided into {count} micro-batches "
                f"({workers // self.stages} x {self.micro}); use a multiple of {count}"
            )


RECORD = StrategyRecord(
    spec=PipelineParallel,
    pace="paceline.protocol.pace:make_planned_pace",
    worker="paceline.strategies.pipeline.worker:PipelineRunner",
    simulate="paceline.strategies.pipeline.simulate:PipelineSimulation",
    cost="paceline.strategies.pipeline.cost:PipelineParallelCost",
    examples=("pipeline(stages=2)",),
    memory_saving=("pipeline(stages={workers})",),
)
