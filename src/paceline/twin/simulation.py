"""Interface of a strategy's simulate facet: the time its workers take, and what they compute."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Generic, TypeVar

from paceline.protocol.messages import LeaseGranted, Message, PlannedSteps
from paceline.specs.strategy import Strategy
from paceline.twin.timeline import Callback

if TYPE_CHECKING:
    from paceline.twin.gradient_backend import GradientBackend
    from paceline.twin.simulator import Simulator
    from paceline.twin.updates import WeightUpdates

Groups = tuple[tuple[int, ...], ...]
StrategyT = TypeVar("StrategyT", bound=Strategy)


class StrategySimulation:
    """Simulates all workers (and servers) while one strategy is active."""

    bytes_sent = 0.0
    bytes_before = 0.0
    """Bytes without a codec."""

    def on_steps(self, worker: int, steps: PlannedSteps, now: float) -> None:
        raise AssertionError("planned steps under a parameter server")

    def on_lease(self, worker: int, granted: LeaseGranted, now: float) -> None:
        raise AssertionError("a lease for one worker under a planned strategy")

    def on_order(self, message: Message, now: float) -> None:
        """Handles a message from the coordinator to the servers."""
        raise AssertionError("an order to servers under a planned strategy")

    def sync_weights(self, worker: int, version: int, now: float, then: Callback) -> None:
        """Brings a worker to the newest weights, then calls `then` with the time."""
        then(now)

    def close(self) -> None:
        """Called before the next strategy, or at the end; adds up the times."""


class SimulateFacet(ABC, Generic[StrategyT]):
    """Behavior of a strategy in the twin. Time and weights are separate: both depths share time."""

    @abstractmethod
    def simulation(
        self, spec: StrategyT, simulator: Simulator, groups: Groups
    ) -> StrategySimulation:
        """Simulates the time that workers and servers take."""

    def updates(self, spec: StrategyT, backend: GradientBackend, groups: Groups) -> WeightUpdates:
        """Computes the weights at depth `learn`, in virtual-time order; by default exactly."""
        from paceline.twin.exact import ExactUpdate

        return ExactUpdate(backend)
