"""Interface for the weights of a simulated strategy at depth `learn`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from paceline.protocol.messages import ApplyUpdate, Lease
from paceline.twin.backend import StepOutcome

EMPTY = StepOutcome(0, 0.0, 0)
"""Outcome of a worker without samples."""


class WeightUpdates(ABC):
    """Turns gradients into weights, in the order of virtual time."""

    @abstractmethod
    def sync(self) -> None:
        """Puts the newest weights into the backend's model."""

    @abstractmethod
    def export(self) -> None:
        """Puts the whole state into the backend's model, optimizer and residuals."""

    def close(self) -> None:
        """Releases resources; the state is lost unless it was exported."""
        return


class LockstepUpdates(WeightUpdates):
    """Updates of a strategy whose workers share every global batch."""

    @abstractmethod
    def step(self, leases: Sequence[Lease]) -> list[StepOutcome]:
        """Computes all shares of one batch and updates the weights."""

    def is_average_due(self) -> bool:
        """Returns whether the replicas were averaged after the last step."""
        return False

    def average_replicas(self) -> None:
        """Averages replicas that took steps since the last average."""
        return


class PushPullUpdates(WeightUpdates):
    """Updates of a strategy whose workers push gradients to servers."""

    @abstractmethod
    def pull(self, worker: int) -> None:
        """Gives a worker the servers' current weights."""

    @abstractmethod
    def compute(self, worker: int, lease: Lease) -> StepOutcome:
        """Computes a gradient on the worker's weights."""

    @abstractmethod
    def push(self, worker: int, lease: Lease, handle: int) -> None:
        """Sends the computed gradient to the servers as number `handle` of this worker."""

    def push_group(
        self, members: Sequence[int], leases: Sequence[Lease], handle: int
    ) -> list[StepOutcome]:
        """Computes a group's gradients; its first worker pushes their sum as `handle`."""
        raise NotImplementedError

    @abstractmethod
    def grad_sq_norm(self, order: ApplyUpdate) -> float:
        """Squared norm of an update's gradient before clipping."""

    @abstractmethod
    def apply(self, order: ApplyUpdate, factor: float) -> None:
        """Applies an update on the servers."""
