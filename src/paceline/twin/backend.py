"""What happens to the weights while virtual time passes: real training, or nothing at all."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from paceline.protocol.messages import ApplyUpdate, Lease
from paceline.specs.strategy import Strategy


@dataclass(frozen=True)
class StepOutcome:
    """What a worker can say of a share it has computed."""

    predictions: int
    loss_sum: float | None
    correct: int | None
    norms: tuple[float, float, float, float] | None = None
    diverged: str | None = None
    """Why the loss means that training has diverged, where it does."""


class WeightsBackend(Protocol):
    """Called in the order of virtual time; one call for what one process would do."""

    uses_leases: bool
    """False where nobody looks at the leases."""

    def enter(self, strategy: Strategy, *, keep: bool, restore: bool) -> None:
        """A strategy comes into force; all replicas are equal now."""
        ...

    def step(self, leases: Sequence[Lease]) -> list[StepOutcome]:
        """Shares of one batch on all workers, and their updates: one together, or each its own."""
        ...

    def is_average_due(self) -> bool:
        """Whether replicas that step by themselves should meet now."""
        ...

    def average_replicas(self) -> None:
        """Replicas that stepped by themselves become equal again."""
        ...

    def pull(self, worker: int) -> None:
        """A worker takes the weights as they are on the servers now."""
        ...

    def compute(self, worker: int, lease: Lease, handle: int) -> StepOutcome:
        """A gradient on the weights that the worker pulled, kept under this handle."""
        ...

    def combine_gradients(self, parts: Sequence[tuple[int, int, float]]) -> None:
        """Gradients of a group (worker, handle, weight) become one, under the first's handle."""
        ...

    def grad_sq_norm(self, order: ApplyUpdate) -> float:
        """Squared norm of an update's summed gradient, before it is clipped."""
        ...

    def apply(self, order: ApplyUpdate, factor: float) -> None:
        """The servers make an update out of gradients that were computed."""
        ...

    def settle(self) -> float:
        """All work is done: the newest weights everywhere. Gives the learning rate."""
        ...

    def evaluate(self, split: str) -> tuple[float | None, int | None, int]: ...

    def save(self, name: str, memory: dict[str, Any]) -> str: ...

    def save_model(self, path: Path) -> None: ...


class TimeOnlyBackend:
    """Only time moves: no weights, no losses, nothing that is evaluated."""

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

    def save(self, name: str, memory: dict[str, Any]) -> str:
        return ""

    def save_model(self, path: Path) -> None:
        return


NOTHING = StepOutcome(0, None, None)
