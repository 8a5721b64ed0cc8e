"""Spec of ps: weights on parameter servers, and the synchronization mode."""

from dataclasses import dataclass
from typing import ClassVar

from paceline.codecs.registry import read_codec
from paceline.codecs.spec import Codec
from paceline.errors import SpecError
from paceline.protocol.pace import Pace, PaceContext
from paceline.protocol.push_pace import PushPace, PushRules
from paceline.specs.base import (
    bool_field,
    choice_field,
    int_field,
    parse_spec,
    read_lr_scale,
    spec_field,
)
from paceline.specs.strategy import MAX_COPIES, StateFraction, Strategy
from paceline.strategies.ps.sync import SYNC_MODES, Asp, SyncMode, read_sync
from paceline.strategies.registry import StrategyRecord

MIN_SHARD_KB = 64
"""Smaller shards cost more in messages than they save."""


@dataclass(frozen=True)
class ParameterServer(Strategy):
    """Weights and optimizer on servers; workers pull, compute and push."""

    name: ClassVar[str] = "ps"
    sync: SyncMode = spec_field(read_sync, Asp())
    servers: int = spec_field(int_field(1, 1024), 1)
    copies: int | None = spec_field(int_field(1, MAX_COPIES), None)
    lr_scale: float | None = spec_field(read_lr_scale, None)
    damp: str = spec_field(choice_field("auto", "none", "inverse"), "auto")
    overlap: bool = spec_field(bool_field, False)
    codec: Codec | None = spec_field(read_codec, None)
    via: str = spec_field(choice_field("auto", "shared", "network"), "auto")
    min_shard_kb: int = spec_field(int_field(1), MIN_SHARD_KB)
    max_shards: int | None = spec_field(int_field(1, 1024), None)

    def __post_init__(self) -> None:
        if self.via == "shared" and self.codec is not None:
            raise SpecError(
                "ps: via=shared and codec cannot be combined (nothing is sent over the network); "
                "remove one of them"
            )
        if isinstance(self.sync, str):
            object.__setattr__(self, "sync", parse_spec(self.sync, SYNC_MODES, "sync mode"))
        if not isinstance(self.sync, SyncMode):
            known = ", ".join(sorted(SYNC_MODES))
            raise SpecError(f"ps(sync=...) is {self.sync!r}: known: {known}")
        if self.overlap and self.sync.blocks_workers:
            raise SpecError(
                f"ps: overlap=true requires a mode in which workers never wait, and {self.sync} "
                "blocks them; use sync=asp or sync=gba"
            )

    @property
    def survives_losses(self) -> bool:
        return True

    @property
    def exact(self) -> bool:
        plain = self.codec is None and self.damp != "inverse"
        return self.sync.exact and self.lr_scale in (None, 1.0) and plain

    def servers_for(self, workers: int) -> int:
        return self.servers

    def copies_of_shards(self, *, elastic: bool) -> int:
        return self.copies or (2 if elastic else 1)

    def shards_of(self, nbytes: float) -> int:
        """Number of servers that hold a part of the weights; the others stay empty."""
        most = min(self.servers, self.max_shards or self.servers)
        return max(1, min(most, int(nbytes) // (self.min_shard_kb << 10)))

    def shards_in_estimates(self, nbytes: float) -> int:
        """As `shards_of`; all servers hold weights there unless one of the limits was changed."""
        is_limited = self.min_shard_kb != MIN_SHARD_KB or self.max_shards is not None
        return self.shards_of(nbytes) if is_limited else self.servers

    def state_fraction(self, workers: int) -> StateFraction:
        return StateFraction(slots=0.0)

    def lag_bound(self, workers: int) -> float | None:
        return self.sync.lag_bound

    def expected_staleness(self, workers: int) -> float:
        own = 1.0 if self.overlap else 0.0
        return self.sync.expected_staleness(workers) + own

    def check_workers(self, workers: int) -> None:
        self.sync.check_workers(workers)

    @property
    def corrects(self) -> bool:
        """True if updates are corrected for staleness."""
        return self.damp == "auto" and self.lr_scale is None

    def lr_scale_for(self, share: float, staleness: int) -> float:
        """Returns the learning-rate factor of an update with this fraction of a global batch."""
        scale = share if self.lr_scale is None else self.lr_scale
        return scale / (1 + staleness) if self.damp == "inverse" else scale

    def lr_description(self, workers: int) -> str:
        if self.lr_scale is not None:
            return f"learning rate x{self.lr_scale:g} per update (lr_scale)"
        if self.sync.full_batch_updates:
            return "learning rate x1 per global-batch update"
        return (
            f"learning rate x(samples of the update / global batch), "
            f"about x{1 / workers:.4g} with {workers} workers"
        )


def make_pace(spec: ParameterServer, context: PaceContext) -> Pace:
    """Grants each worker its next lease when its push, or the clock, allows it."""
    rules = PushRules(
        servers=spec.servers_for(context.workers),
        lr_scale=spec.lr_scale_for,
        corrects=spec.corrects,
        gradient_weight=spec.sync.gradient_weight,
        aggregates=spec.sync.aggregates,
        overlap=spec.overlap,
    )
    return PushPace(rules, spec.sync.make_clock(context.workers), context)


RECORD = StrategyRecord(
    spec=ParameterServer,
    pace="paceline.strategies.ps.spec:make_pace",
    worker="paceline.strategies.ps.worker:ParameterServerRunner",
    simulate="paceline.strategies.ps.simulate:ParameterServerSimulation",
    cost="paceline.strategies.ps.cost:ParameterServerCost",
    candidates=("ps", "ps(servers=8)", "ps(sync=ssp(3))"),
    examples=(
        "ps",
        "ps(sync=bsp)",
        "ps(sync=ssp(0))",
        "ps(sync=ssp(2))",
        "ps(sync=dssp(1, 4))",
        "ps(sync=kasync(2))",
        "ps(sync=gba, servers=2)",
        "ps(overlap=true)",
        "ps(sync=gba, overlap=true)",
    ),
)
