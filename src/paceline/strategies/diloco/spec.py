"""Spec of diloco: many local steps, then an outer step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from paceline.specs.base import float_field, int_field, spec_field
from paceline.specs.strategy import LocalSteps
from paceline.strategies.registry import StrategyRecord


@dataclass(frozen=True)
class DiLoCo(LocalSteps):
    """Many local steps of the job's optimizer, then an outer Nesterov step on their result."""

    name: ClassVar[str] = "diloco"
    h: int = spec_field(int_field(1), 50)
    outer_lr: float = spec_field(float_field(0.0, above=True), 0.7)
    outer_momentum: float = spec_field(float_field(0.0, 1.0), 0.9)

    @property
    def steps_between_syncs(self) -> int:
        return self.h

    def lr_description(self, workers: int) -> str:
        return f"learning rate x1 inside, {self.outer_lr:g} outside every {self.h} steps"


RECORD = StrategyRecord(
    spec=DiLoCo,
    pace="paceline.protocol.pace:make_planned_pace",
    worker="paceline.strategies.diloco.worker:DiLoCoRunner",
    simulate="paceline.strategies.local_sgd.simulate:SIMULATE",
    cost="paceline.strategies.local_sgd.cost:COST",
    examples=("diloco(h=4)",),
)
