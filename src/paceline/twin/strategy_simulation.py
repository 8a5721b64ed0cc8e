"""Simulate facet of a strategy: what its workers and servers do while it is active."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from paceline.protocol.messages import LeaseGranted, Message, PlannedSteps
from paceline.specs.strategy import Strategy, WorkerGroups
from paceline.twin.timeline import Callback
from paceline.twin.updates import WeightUpdates

if TYPE_CHECKING:
    from paceline.state import Section
    from paceline.twin.gradient_backend import GradientBackend

StrategyT = TypeVar("StrategyT", bound=Strategy)


@dataclass(frozen=True)
class CompleteState:
    """The result of a complete update, from which a run continues after a loss."""

    samples: int
    """Samples of the run that it contains."""
    reached: int
    """The same for the last step of any worker, whose update need not be complete."""
    state: Section | None = None
    """None at depth `cost`, and if the backend's model holds it already."""


class StrategySimulation:
    """All workers (and servers) of one view while a strategy is active.

    A subclass is called with the spec, the `Simulator` and the groups of workers. Time and weights
    are separate, because both depths share the time. Workers are named by their rank.
    """

    bytes_sent = 0.0
    bytes_before = 0.0
    """Bytes without a codec."""
    halted_at = math.inf
    """Time at which the workers stopped; what they would have sent later is lost."""
    settled = CompleteState(0, 0)
    """State at the start or at the last quiesce."""

    @staticmethod
    def updates(spec: Any, backend: GradientBackend, groups: WorkerGroups) -> WeightUpdates:
        """Computes the weights at depth `learn`, in virtual-time order; by default exactly."""
        from paceline.twin.exact import ExactUpdate

        return ExactUpdate(backend)

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

    def settle(self, state: CompleteState) -> None:
        """Notes the state that all workers hold at the start and at a quiesce."""
        self.settled = state

    def lose(self, worker: int, now: float) -> None:
        """Continues without the events of a worker that is gone."""

    def resume_servers(self) -> None:
        """Continues with the copies of shards, after the loss of servers was noticed."""

    def halt(self, now: float) -> None:
        """Stops the workers, because the view ends; servers apply what was ordered."""
        self.halted_at = min(self.halted_at, now)

    def recover(
        self, version: int, now: float, then: Callable[[float, CompleteState], None]
    ) -> None:
        """Calls `then` with the time and the newest complete state, when it is available.

        `version` is that of the last update that servers were ordered to apply.
        """
        then(now, self.settled)

    def close(self) -> None:
        """Called before the next strategy, or at the end; adds up the times."""
