"""Interface of a strategy's cost facet: the expected time of a step on given hosts."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from paceline.plan.pool_arrays import Floats, Ints, PoolArrays
from paceline.specs.strategy import Strategy

StrategyT = TypeVar("StrategyT", bound=Strategy)


@dataclass(frozen=True)
class StepEstimate:
    """Expected cost of one global batch (or the same number of samples)."""

    step_s: float
    busy: Floats
    """Seconds that each host computes during the step."""
    staleness: float = 0.0
    """Mean staleness of a gradient, in updates."""
    doubt: float = 0.0
    """Relative uncertainty beyond that of the machines, for example of a switch point."""
    efficiency: float = 1.0
    """Progress per sample, relative to synchronous training on global batches."""


@dataclass(frozen=True)
class RecordedStep:
    """Timings of one worker's step in a recorded run."""

    busy_s: float
    comm_s: float
    """Communication that was not overlapped with computation."""


class CostFacet(ABC, Generic[StrategyT]):
    """Cost of a strategy for the planner. Times are means over many steps."""

    @abstractmethod
    def step(self, arrays: PoolArrays, hosts: Ints, spec: StrategyT) -> StepEstimate:
        """Estimates a step with one worker on each of these hosts."""

    def fits(self, arrays: PoolArrays, hosts: Ints, spec: StrategyT) -> bool:
        """Returns whether the model fits in memory. By default every host holds all of it."""
        return bool(arrays.fits[hosts].all())

    def on_hosts(self, spec: StrategyT, count: int) -> StrategyT:
        """Returns the strategy for another number of hosts; by default it is the same."""
        return spec

    def splits(self, arrays: PoolArrays, count: int) -> Iterator[StrategyT]:
        """Yields strategies that split a model over `count` hosts if it does not fit on one."""
        return iter(())

    def calibrate(
        self, spec: StrategyT, steps: Sequence[Sequence[RecordedStep]], nbytes: float
    ) -> dict[str, float]:
        """Returns pool fields that describe the measured exchange, from recorded steps per worker.

        Empty by default: the recorded steps do not show what an exchange costs.
        """
        return {}
