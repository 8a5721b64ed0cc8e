"""When a parameter server lets a worker go on, and what makes an update."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from paceline.errors import SpecError
from paceline.specs.base import Spec, float_field, int_field, spec_field, spec_from_call
from paceline.specs.expression import Value


@dataclass(frozen=True)
class SyncMode(Spec):
    positional: ClassVar[bool] = True
    aggregates: ClassVar[bool] = False
    """One update is made of several workers' gradients."""
    blocks_workers: ClassVar[bool] = True
    """A worker may be held until others have come: it cannot compute ahead meanwhile."""
    includes_own_update: ClassVar[bool] = True
    """A worker goes on from weights that have its own gradient in them."""

    def check_workers(self, workers: int) -> None:
        """Raise SpecError when this many workers cannot keep this clock."""

    def expected_staleness(self, workers: int) -> float:
        """Updates of others between a pull and its push, on equal machines."""
        return workers - 1.0


@dataclass(frozen=True)
class Asp(SyncMode):
    """Asynchronous parallel: nobody waits."""

    name: ClassVar[str] = "asp"
    blocks_workers: ClassVar[bool] = False


@dataclass(frozen=True)
class Bsp(SyncMode):
    """Bulk synchronous parallel: everybody waits for everybody."""

    name: ClassVar[str] = "bsp"
    aggregates: ClassVar[bool] = True

    def expected_staleness(self, workers: int) -> float:
        return 0.0


@dataclass(frozen=True)
class Ssp(SyncMode):
    """Stale synchronous parallel: at most `bound` steps ahead of the slowest."""

    name: ClassVar[str] = "ssp"
    bound: float = spec_field(float_field(0.0), 3.0)

    def __post_init__(self) -> None:
        if self.bound < 0 or self.bound != self.bound:
            raise SpecError(f"ssp({self.bound}): the bound must be at least 0")


@dataclass(frozen=True)
class Dssp(SyncMode):
    """Dynamic SSP: the bound moves between `low` and `high` with the measured speeds."""

    name: ClassVar[str] = "dssp"
    low: int = spec_field(int_field(0), 3)
    high: int = spec_field(int_field(0), 15)

    def __post_init__(self) -> None:
        if not 0 <= self.low <= self.high:
            raise SpecError(
                f"dssp({self.low}, {self.high}): bounds must be at least 0, the low one first"
            )


@dataclass(frozen=True)
class KAsync(SyncMode):
    """An update is made of the first `k` gradients that come."""

    name: ClassVar[str] = "kasync"
    aggregates: ClassVar[bool] = True
    k: int = spec_field(int_field(1), 2)

    def __post_init__(self) -> None:
        if self.k < 1:
            raise SpecError(f"kasync({self.k}): at least one gradient makes an update")

    def check_workers(self, workers: int) -> None:
        if self.k > workers:
            raise SpecError(
                f"kasync({self.k}) waits for {self.k} gradients, but there are {workers} workers: "
                "lower k, or add workers"
            )


@dataclass(frozen=True)
class Gba(SyncMode):
    """Global batch aggregation: nobody waits, an update is worth a global batch.

    A gradient more than `stale` versions old counts `decay` times less for each version beyond.
    """

    name: ClassVar[str] = "gba"
    aggregates: ClassVar[bool] = True
    blocks_workers: ClassVar[bool] = False
    includes_own_update: ClassVar[bool] = False
    stale: int = spec_field(int_field(0), 4)
    decay: float = spec_field(float_field(0.0, 1.0), 0.5)

    def weight_of(self, staleness: int) -> float:
        beyond = max(0, staleness - self.stale)
        return float(self.decay**beyond) if beyond else 1.0


SYNCS: Mapping[str, type[SyncMode]] = {c.name: c for c in (Asp, Bsp, Ssp, Dssp, KAsync, Gba)}


def read_sync(value: Value, where: str) -> SyncMode:
    return spec_from_call(value, SYNCS, "sync mode")
