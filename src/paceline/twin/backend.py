"""Backends that compute weights during a simulation: real training, or time only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from paceline.protocol.messages import ApplyUpdate, Lease
from paceline.specs.strategy import Strategy


@dataclass(frozen=True)
class StepOutcome:
    """Result of computing one share."""

    predictions: int
    loss_sum: float | None
    correct: int | None
    norms: tuple[float, float, float, float] | None = None
    diverged: str | None = None
    """Reason why training has diverged, if it has."""


class WeightsBackend(Protocol):
    """Called in the order of virtual time, once per action of a process."""

    uses_leases: bool
    """False if the backend ignores the leases."""

    def enter(self, strategy: Strategy, *, keep: bool, restore: bool) -> None:
        """Starts a strategy; all replicas are equal at this point."""
        ...

    def step(self, leases: Sequence[Lease]) -> list[StepOutcome]:
        """Computes one batch on all workers and updates the weights, jointly or per worker."""
        ...

    def is_average_due(self) -> bool:
        """Returns whether locally updated replicas should be averaged now."""
        ...

    def average_replicas(self) -> None:
        """Averages locally updated replicas."""
        ...

    def pull(self, worker: int) -> None:
        """Copies the current weights of the servers to a worker."""
        ...

    def compute(self, worker: int, lease: Lease, handle: int) -> StepOutcome:
        """Computes a gradient on the worker's pulled weights and stores it under `handle`."""
        ...

    def combine_gradients(self, parts: Sequence[tuple[int, int, float]]) -> None:
        """Combines gradients of a group (worker, handle, weight) under the first handle."""
        ...

    def grad_sq_norm(self, order: ApplyUpdate) -> float:
        """Returns the squared norm of an update's summed gradient before clipping."""
        ...

    def apply(self, order: ApplyUpdate, factor: float) -> None:
        """Applies an update of computed gradients on the servers."""
        ...

    def settle(self) -> float:
        """Copies the latest weights to all workers at a quiesce; returns the learning rate."""
        ...

    def evaluate(self, split: str) -> tuple[float | None, int | None, int]: ...

    def save(self, name: str, memory: Mapping[str, Any]) -> str: ...

    def save_model(self, path: Path) -> None: ...


class TimeOnlyBackend:
    """Simulates time only: no weights, no losses, no evaluation."""

    uses_leases = False

    def enter(self, strategy: Strategy, *, keep: bool, restore: bool) -> None:
        return

    def step(self, leases: Sequence[Lease]) -> list[StepOutcome]:
        return []

    def is_average_due(self) -> bool:
        return False

    def average_replicas(self) -> None:
        return

    def pull(self, worker: int) -> None:
        return

    def compute(self, worker: int, lease: Lease, handle: int) -> StepOutcome:
        return NOTHING

    def combine_gradients(self, parts: Sequence[tuple[int, int, float]]) -> None:
        return

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


NOTHING = StepOutcome(0, None, None)
