"""Backends that compute weights during a simulation: real training, or time only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from paceline.protocol.messages import ApplyUpdate, Lease
from paceline.specs.strategy import Strategy
from paceline.twin.simulation import Groups


@dataclass(frozen=True)
class StepOutcome:
    """A worker's report about a computed share."""

    predictions: int
    loss_sum: float | None
    correct: int | None
    norms: tuple[float, float, float, float] | None = None
    diverged: str | None = None
    """Why the loss indicates divergence; None if it does not."""


class WeightsBackend(Protocol):
    """Called in virtual-time order; one call for what one process would do."""

    uses_leases: bool
    """True if `step` uses the leases."""

    def enter(self, strategy: Strategy, groups: Groups, *, keep: bool, restore: bool) -> None:
        """Activates a strategy; all replicas are equal now."""
        ...

    def step(self, leases: Sequence[Lease]) -> list[StepOutcome]:
        """Computes all workers' shares of one batch and updates the weights."""
        ...

    def is_average_due(self) -> bool:
        """Returns whether the replicas are averaged after the last step."""
        ...

    def average_replicas(self) -> None:
        """Averages replicas that took local steps."""
        ...

    def pull(self, worker: int) -> None:
        """Gives a worker the servers' current weights."""
        ...

    def compute(self, worker: int, lease: Lease) -> StepOutcome:
        """Computes a gradient on the worker's weights."""
        ...

    def push(self, worker: int, lease: Lease, handle: int) -> None:
        """Sends the computed gradient to the servers as number `handle` of this worker."""
        ...

    def push_group(
        self, members: Sequence[int], leases: Sequence[Lease], handle: int
    ) -> list[StepOutcome]:
        """Computes a group's gradients; its first worker pushes their sum as `handle`."""
        ...

    def grad_sq_norm(self, order: ApplyUpdate) -> float:
        """Squared norm of an update's summed gradient before clipping."""
        ...

    def apply(self, order: ApplyUpdate, factor: float) -> None:
        """Applies an update of pushed gradients on the servers."""
        ...

    def settle(self) -> float:
        """Brings the newest weights to all workers; returns the learning rate."""
        ...

    def evaluate(self, split: str) -> tuple[float | None, int | None, int]: ...

    def save(self, name: str, memory: Mapping[str, Any]) -> str: ...

    def save_model(self, path: Path) -> None: ...

    def close(self) -> None:
        """Releases resources at the end of the run."""
        ...


class TimeOnlyBackend:
    """Computes nothing: no weights, no losses, no evaluation."""

    uses_leases = False

    def enter(self, strategy: Strategy, groups: Groups, *, keep: bool, restore: bool) -> None:
        return

    def step(self, leases: Sequence[Lease]) -> list[StepOutcome]:
        return []

    def is_average_due(self) -> bool:
        return False

    def average_replicas(self) -> None:
        return

    def pull(self, worker: int) -> None:
        return

    def compute(self, worker: int, lease: Lease) -> StepOutcome:
        return NOTHING

    def push(self, worker: int, lease: Lease, handle: int) -> None:
        return

    def push_group(
        self, members: Sequence[int], leases: Sequence[Lease], handle: int
    ) -> list[StepOutcome]:
        return [NOTHING for _ in members]

    def grad_sq_norm(self, order: ApplyUpdate) -> float:
        return 0.0

    def apply(self, order: ApplyUpdate, factor: float) -> None:
        return

    def settle(self) -> float:
        return 0.0

    def evaluate(self, split: str) -> tuple[float | None, int | None, int]:
        return None, None, 0

    def save(self, name: str, memory: Mapping[str, Any]) -> str:
        return ""

    def save_model(self, path: Path) -> None:
        return

    def close(self) -> None:
        return


NOTHING = StepOutcome(0, None, None)
