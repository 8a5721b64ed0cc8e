"""Spec of diloco: many local steps, then an outer step."""

from dataclasses import dataclass
from typing import ClassVar

from paceline.specs.base import float_field, int_field, read_lr_scale, spec_field
from paceline.specs.expression import Call, Value
from paceline.specs.strategy import LocalSteps
from paceline.strategies.registry import StrategyRecord

MAX_OUTER_MOMENTUM = 0.9


def read_momentum(value: Value, where: str) -> float | None:
    """Parses an outer momentum; None, written `auto`, lets the strategy choose."""
    if value == Call("auto"):
        return None
    momentum: float = float_field(0.0, 1.0)(value, where)
    return momentum


@dataclass(frozen=True)
class DiLoCo(LocalSteps):
    """Many local steps of the job's optimizer, then an outer Nesterov step on their result."""

    name: ClassVar[str] = "diloco"
    h: int = spec_field(int_field(1), 50)
    outer_lr: float = spec_field(float_field(0.0, above=True), 0.7)
    outer_momentum: float | None = spec_field(read_momentum, None)
    inner_lr: float | None = spec_field(read_lr_scale, None)

    @property
    def steps_between_syncs(self) -> int:
        return self.h

    def inner_rate(self, workers: int) -> float:
        """Returns that of a batch n times smaller: the outer momentum enlarges the steps again."""
        if self.inner_lr is not None:
            return self.inner_lr
        return max(1 / (1 + self.spread(workers)), 1 / workers)

    def outer_momentum_after(self, steps: int, inner: float) -> float:
        """Returns the outer momentum of a synchronization after some local steps.

        The optimizer's own momentum, `inner`, remembers `1 / (1 - inner)` steps, also across
        synchronizations. If the outer one remembers as long or longer, the two oscillate: on a
        quadratic, 0.9 in both with `h=4` is stable up to a thousandth of the learning rate of
        synchronous training. The rule keeps more than half of it for momenta up to 0.95.
        """
        if self.outer_momentum is not None:
            return self.outer_momentum
        return min(MAX_OUTER_MOMENTUM, steps * (1 - inner))

    def lr_description(self, workers: int) -> str:
        rate = self.inner_rate(workers)
        return f"learning rate x{rate:.3g} inside, {self.outer_lr:g} outside every {self.h} steps"


RECORD = StrategyRecord(
    spec=DiLoCo,
    pace="paceline.protocol.pace:make_planned_pace",
    worker="paceline.strategies.diloco.worker:DiLoCoRunner",
    simulate="paceline.strategies.local_sgd.simulate:LocalStepsSimulation",
    cost="paceline.strategies.local_sgd.cost:LocalStepsCost",
    examples=("diloco(h=4)",),
    candidates=("diloco",),
)
