"""Spec of single: one worker, no communication."""

from dataclasses import dataclass
from typing import ClassVar

from paceline.errors import SpecError
from paceline.specs.strategy import Strategy
from paceline.strategies.registry import StrategyRecord


@dataclass(frozen=True)
class Single(Strategy):
    """One worker, no communication; the reference of the exact strategies."""

    name: ClassVar[str] = "single"

    def worker_count(self, requested: int) -> int:
        return 1

    @property
    def survives_losses(self) -> bool:
        return True

    def idle_workers(self, workers: int) -> frozenset[int]:
        return frozenset(range(1, workers))

    def batch_weights(self, workers: int) -> tuple[int, ...] | None:
        return (1,) + (0,) * (workers - 1)

    def check_workers(self, workers: int) -> None:
        if workers != 1:
            raise SpecError(
                f"single trains on one worker, not {workers}; "
                "use --workers 1, or a strategy such as allreduce"
            )


RECORD = StrategyRecord(
    spec=Single,
    pace="paceline.protocol.pace:make_planned_pace",
    worker="paceline.strategies.single.worker:SingleRunner",
    simulate="paceline.strategies.single.simulate:SingleSimulation",
    cost="paceline.strategies.single.cost:SingleCost",
    examples=("single",),
)
