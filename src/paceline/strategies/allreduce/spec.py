"""Spec of allreduce: gradients averaged over all workers at every step."""

from dataclasses import dataclass
from typing import ClassVar

from paceline.codecs.registry import read_codec
from paceline.codecs.spec import Codec
from paceline.errors import SpecError
from paceline.specs.base import choice_field, float_field, int_field, spec_field
from paceline.specs.collectives import ALGORITHMS, AUTO, FLAT
from paceline.specs.strategy import StateFraction, Strategy
from paceline.strategies.registry import StrategyRecord


@dataclass(frozen=True)
class AllReduce(Strategy):
    """Synchronous: gradients averaged over all workers by collectives at every step."""

    name: ClassVar[str] = "allreduce"
    bucket_mb: float = spec_field(float_field(0.0, above=True), 25.0)
    balance: str = spec_field(choice_field("even", "auto"), "even")
    codec: Codec | None = spec_field(read_codec, None)
    via: str = spec_field(choice_field("auto", "shared", "network"), "auto")
    shard: str = spec_field(choice_field("none", "optimizer", "full"), "none")
    shares: int = spec_field(int_field(0, 1024), 0)
    """Fixed shares of a batch, for the same bits with any number of workers; 0: one per worker."""
    algorithm: str = spec_field(choice_field(*ALGORITHMS), AUTO)

    def worker_variant(self, workers: int) -> str:
        if self.shares:
            return "shares"
        if workers == 1:  # Nothing to exchange, but a codec still changes the gradients.
            return "single" if self.codec is None else "none"
        return self.shard

    def state_fraction(self, workers: int) -> StateFraction:
        part = 1 / workers
        return {
            "none": StateFraction(),
            "optimizer": StateFraction(slots=part),
            "full": StateFraction(part, part, part),
        }[self.shard]

    def __post_init__(self) -> None:
        others = {
            "codec": self.codec is not None,
            "balance=auto": self.balance != "even",
            f"shard={self.shard}": self.shard != "none",
            "via=shared": self.via == "shared",
            f"algorithm={self.algorithm}": self.algorithm != AUTO,
        }
        if self.shares and any(others.values()):
            other = next(name for name, given in others.items() if given)
            raise SpecError(
                f"allreduce: shares and {other} cannot be combined: fixed shares are summed "
                "exactly, in one order; remove one of them"
            )
        if self.shard == "full" and (self.codec is not None or self.via != "auto"):
            raise SpecError(
                "allreduce(shard=full) uses torch collectives and does not support codec or via; "
                "remove them"
            )
        if self.algorithm not in (AUTO, "ring"):
            self._check_algorithm()
        if self.algorithm in FLAT and self.via == "shared":
            raise SpecError(
                f"allreduce: algorithm={self.algorithm} and via=shared cannot be combined (nothing "
                "is sent between workers that share memory); remove one of them"
            )
        if self.via == "shared" and self.codec is not None:
            raise SpecError(
                "allreduce: via=shared and codec cannot be combined (nothing is sent over the "
                "network); remove one of them"
            )

    def _check_algorithm(self) -> None:
        if self.codec is not None:
            raise SpecError(
                f"allreduce: algorithm={self.algorithm} and codec cannot be combined (encoded "
                "gradients are gathered along a ring); remove one of them"
            )
        if self.shard == "full":
            raise SpecError(
                f"allreduce: algorithm={self.algorithm} and shard=full cannot be combined (shards "
                "are exchanged by torch); remove one of them"
            )

    @property
    def via_network(self) -> bool:
        """Gradients are sent as messages even between workers that can share memory."""
        return self.via == "network" or self.algorithm in FLAT

    @property
    def message_algorithm(self) -> str | None:
        """Algorithm of messages; None where torch alone exchanges gradients."""
        by_torch = self.codec is not None or self.shard == "full" or self.shares > 0
        return None if by_torch else self.algorithm

    @property
    def survives_losses(self) -> bool:
        return self.shard == "none"

    @property
    def bucket_bytes(self) -> float:
        return self.bucket_mb * (1 << 20)

    @property
    def exact(self) -> bool:
        return self.codec is None

    @property
    def balances_speeds(self) -> bool:
        return self.balance == "auto"

    @property
    def measures_noise(self) -> bool:
        return not self.shares and self.shard == "none" and self.codec is None

    def check_workers(self, workers: int) -> None:
        if self.shares and workers > self.shares:
            raise SpecError(
                f"{self} does not support {workers} workers: each computes at least one share; "
                f"use at most {self.shares} workers, or more shares"
            )

    @property
    def accumulates_gradients(self) -> bool:
        return self.shard != "full"

    @property
    def needs_worker_speeds(self) -> bool:
        return self.balance == "auto"


RECORD = StrategyRecord(
    spec=AllReduce,
    pace="paceline.protocol.pace:make_planned_pace",
    worker={
        "single": "paceline.strategies.single.worker:SingleRunner",
        "none": "paceline.strategies.allreduce.worker:AllReduceRunner",
        "optimizer": "paceline.strategies.allreduce.sharded:ShardedOptimizerRunner",
        "full": "paceline.strategies.allreduce.sharded:FullyShardedRunner",
        "shares": "paceline.strategies.allreduce.fixed_shares:FixedSharesRunner",
    },
    simulate="paceline.strategies.allreduce.simulate:AllReduceSimulation",
    cost="paceline.strategies.allreduce.cost:AllReduceCost",
    candidates=("allreduce", "allreduce(balance=auto)", "allreduce(codec=int8)"),
    examples=("allreduce", "allreduce(balance=auto)"),
    memory_saving=("allreduce(shard=optimizer)", "allreduce(shard=full)"),
)
