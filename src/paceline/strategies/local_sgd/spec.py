"""Spec of local_sgd: local steps, then an average of the weights."""

from dataclasses import dataclass
from typing import ClassVar

from paceline.errors import SpecError
from paceline.specs.base import float_field, int_field, read_lr_scale, spec_field
from paceline.specs.strategy import LocalSteps
from paceline.strategies.registry import StrategyRecord


@dataclass(frozen=True)
class LocalSgd(LocalSteps):
    """Local steps; weights averaged every `h` of them, or when replicas drift too far apart."""

    name: ClassVar[str] = "local_sgd"
    h: int | None = spec_field(int_field(1), None)
    drift: float | None = spec_field(float_field(0.0, above=True), None)
    inner_lr: float | None = spec_field(read_lr_scale, None)

    def __post_init__(self) -> None:
        if self.h is not None and self.drift is not None:
            raise SpecError("local_sgd: h and drift cannot be combined; remove one of them")
        if self.h is not None and self.h < 1:
            raise SpecError(f"local_sgd(h={self.h}): h must be at least 1")

    @property
    def steps_between_syncs(self) -> int:
        return self.h if self.h is not None else 8

    @property
    def syncs_by_drift(self) -> bool:
        return self.drift is not None

    def inner_rate(self, workers: int) -> float:
        """The square root of the rule for noise, which a batch n times smaller would follow."""
        if self.inner_lr is not None:
            return self.inner_lr
        return float(max((1 + self.spread(workers)) ** -0.5, workers**-0.5))

    def lr_description(self, workers: int) -> str:
        rate = self.inner_rate(workers)
        return f"learning rate x{rate:.3g} on every worker's own share of the batch"


RECORD = StrategyRecord(
    spec=LocalSgd,
    pace="paceline.protocol.pace:make_planned_pace",
    worker="paceline.strategies.local_sgd.worker:LocalSgdRunner",
    simulate="paceline.strategies.local_sgd.simulate:LocalStepsSimulation",
    cost="paceline.strategies.local_sgd.cost:LocalStepsCost",
    candidates=("local_sgd(h=4)", "local_sgd(h=16)"),
    examples=("local_sgd(h=3)",),
)
