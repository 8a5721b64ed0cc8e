"""Spec of grouped: synchronous inside a group, asynchronous between groups."""

from dataclasses import dataclass
from typing import ClassVar

from paceline.errors import SpecError
from paceline.protocol.clock import AspClock
from paceline.protocol.pace import Pace, PaceContext
from paceline.protocol.push_pace import PushPace, PushRules
from paceline.specs.base import choice_field, int_field, read_lr_scale, spec_field
from paceline.specs.strategy import MAX_COPIES, Strategy, WorkerGroups
from paceline.strategies.registry import StrategyRecord


@dataclass(frozen=True)
class Grouped(Strategy):
    """Groups of workers: synchronous inside a group, asynchronous between groups."""

    name: ClassVar[str] = "grouped"
    size: int = spec_field(int_field(1), 2)
    by: str = spec_field(choice_field("rank", "speed"), "rank")
    servers: int = spec_field(int_field(1, 1024), 1)
    copies: int | None = spec_field(int_field(1, MAX_COPIES), None)
    lr_scale: float | None = spec_field(read_lr_scale, None)

    @property
    def survives_losses(self) -> bool:
        return True

    @property
    def exact(self) -> bool:
        return False

    @property
    def needs_worker_speeds(self) -> bool:
        return self.by == "speed"

    def servers_for(self, workers: int) -> int:
        return self.servers

    def copies_of_shards(self, *, elastic: bool) -> int:
        return self.copies or (2 if elastic else 1)

    def lag_bound(self, workers: int) -> float | None:
        return None

    def expected_staleness(self, workers: int) -> float:
        return -(-workers // self.size) - 1.0

    def check_workers(self, workers: int) -> None:
        if self.size > workers:
            raise SpecError(
                f"grouped(size={self.size}) does not support {workers} workers; "
                "a group cannot be larger than the number of workers"
            )

    def worker_groups(self, workers: int, speeds: tuple[float, ...] | None) -> WorkerGroups:
        """Returns groups by rank or by similar speed; the last may be smaller."""
        ranks = list(range(workers))
        if self.by == "speed" and speeds is not None:
            ranks.sort(key=lambda w: (-speeds[w], w))
        return tuple(tuple(sorted(ranks[i : i + self.size])) for i in range(0, workers, self.size))

    def lr_scale_for(self, share: float, staleness: int) -> float:
        """Returns the learning-rate factor of an update with this fraction of a global batch."""
        return share if self.lr_scale is None else self.lr_scale

    def lr_description(self, workers: int) -> str:
        share = min(1.0, self.size / workers)
        return f"learning rate x(samples of the group / global batch), about x{share:.4g}"


def make_pace(spec: Grouped, context: PaceContext) -> Pace:
    """Grants a group its next lease when all of its members have pushed."""
    rules = PushRules(
        servers=spec.servers_for(context.workers),
        lr_scale=spec.lr_scale_for,
        corrects=spec.lr_scale is None,
    )
    return PushPace(rules, AspClock(len(context.groups)), context)


RECORD = StrategyRecord(
    spec=Grouped,
    pace="paceline.strategies.grouped.spec:make_pace",
    worker="paceline.strategies.grouped.worker:GroupedRunner",
    simulate="paceline.strategies.grouped.simulate:GroupedSimulation",
    cost="paceline.strategies.grouped.cost:GroupedCost",
    examples=("grouped(size=2)",),
    candidates=("grouped(size=2)",),
)
