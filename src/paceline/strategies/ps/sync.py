"""Synchronization modes: when a worker may continue, and which gradients make an update."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from paceline.errors import SpecError
from paceline.protocol import clock
from paceline.specs.base import Spec, float_field, int_field, spec_field, spec_from_call
from paceline.specs.expression import Value


@dataclass(frozen=True)
class SyncMode(Spec):
    """A rule for parameter servers; `make_clock` is what the coordinator runs."""

    positional: ClassVar[bool] = True
    aggregates: ClassVar[bool] = False
    """One update is made of several workers' gradients."""
    blocks_workers: ClassVar[bool] = True
    """A worker may be held until others have come: it cannot compute ahead meanwhile."""
    includes_own_update: ClassVar[bool] = True
    """A worker continues from weights that have its own gradient in them."""
    exact: ClassVar[bool] = False
    """Equal to one process on the global batch, up to rounding."""
    full_batch_updates: ClassVar[bool] = False
    """An update is worth a global batch, so that its learning rate needs no scaling."""

    def make_clock(self, units: int) -> clock.Clock:
        """The clock for this many units (workers, or groups of them) that push."""
        raise NotImplementedError

    @property
    def lag_bound(self) -> float | None:
        """The most steps that a worker may be ahead of the slowest one; None: unbounded."""
        return None

    def gradient_weight(self, staleness: int) -> float:
        """The factor on a gradient that is this many updates old."""
        return 1.0

    def check_workers(self, workers: int) -> None:
        """Raise SpecError when this many workers cannot keep this clock."""

    def expected_staleness(self, workers: int) -> float:
        """Updates of others between a pull and its push, on equal machines."""
        return workers - 1.0


@dataclass(frozen=True)
class Asp(SyncMode):
    """Asynchronous parallel: no worker waits."""

    name: ClassVar[str] = "asp"
    blocks_workers: ClassVar[bool] = False

    def make_clock(self, units: int) -> clock.Clock:
        return clock.AspClock(units)


@dataclass(frozen=True)
class Bsp(SyncMode):
    """Bulk synchronous parallel: all workers wait for each other."""

    name: ClassVar[str] = "bsp"
    aggregates: ClassVar[bool] = True
    exact: ClassVar[bool] = True
    full_batch_updates: ClassVar[bool] = True

    def make_clock(self, units: int) -> clock.Clock:
        return clock.BspClock(units)

    @property
    def lag_bound(self) -> float | None:
        return 0.0

    def expected_staleness(self, workers: int) -> float:
        return 0.0


@dataclass(frozen=True)
class Ssp(SyncMode):
    """Stale synchronous parallel: at most `bound` steps ahead of the slowest."""

    name: ClassVar[str] = "ssp"
    explicit: ClassVar[bool] = True
    bound: float = spec_field(float_field(0.0), 3.0)

    def __post_init__(self) -> None:
        if self.bound < 0 or self.bound != self.bound:
            raise SpecError(f"ssp({self.bound}): the bound must be at least 0")

    def make_clock(self, units: int) -> clock.Clock:
        return clock.SspClock(units, self.bound)

    @property
    def lag_bound(self) -> float | None:
        return self.bound if math.isfinite(self.bound) else None


@dataclass(frozen=True)
class Dssp(SyncMode):
    """Dynamic SSP: the bound moves between `low` and `high` with the measured speeds."""

    name: ClassVar[str] = "dssp"
    explicit: ClassVar[bool] = True
    low: int = spec_field(int_field(0), 3)
    high: int = spec_field(int_field(0), 15)

    def __post_init__(self) -> None:
        if not 0 <= self.low <= self.high:
            raise SpecError(
                f"dssp({self.low}, {self.high}): bounds must be at least 0, and low at most high"
            )

    def make_clock(self, units: int) -> clock.Clock:
        return clock.DsspClock(units, self.low, self.high)

    @property
    def lag_bound(self) -> float | None:
        return self.high


@dataclass(frozen=True)
class KAsync(SyncMode):
    """An update is made of the first `k` gradients that come."""

    name: ClassVar[str] = "kasync"
    aggregates: ClassVar[bool] = True
    k: int = spec_field(int_field(1), 2)

    def __post_init__(self) -> None:
        if self.k < 1:
            raise SpecError(f"kasync({self.k}): k must be at least 1")

    def make_clock(self, units: int) -> clock.Clock:
        return clock.KAsyncClock(units, self.k)

    def check_workers(self, workers: int) -> None:
        if self.k > workers:
            raise SpecError(
                f"kasync({self.k}) waits for {self.k} gradients, but there are only {workers} "
                "workers; lower k, or add workers"
            )


@dataclass(frozen=True)
class Gba(SyncMode):
    """Global batch aggregation: no worker waits, an update is worth a global batch.

    A gradient more than `stale` versions old counts `decay` times less for each version beyond.
    """

    name: ClassVar[str] = "gba"
    aggregates: ClassVar[bool] = True
    blocks_workers: ClassVar[bool] = False
    includes_own_update: ClassVar[bool] = False
    full_batch_updates: ClassVar[bool] = True
    stale: int = spec_field(int_field(0), 4)
    decay: float = spec_field(float_field(0.0, 1.0), 0.5)

    def make_clock(self, units: int) -> clock.Clock:
        return clock.GbaClock(units)

    def gradient_weight(self, staleness: int) -> float:
        beyond = max(0, staleness - self.stale)
        return float(self.decay**beyond) if beyond else 1.0


SYNC_MODES: Mapping[str, type[SyncMode]] = {c.name: c for c in (Asp, Bsp, Ssp, Dssp, KAsync, Gba)}


def read_sync(value: Value, where: str) -> SyncMode:
    return spec_from_call(value, SYNC_MODES, "sync mode")
