"""Weights of a simulated run. The base classes compute nothing; at depth `cost`, time passes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.protocol.messages import ApplyUpdate, Lease
from paceline.specs.strategy import Strategy, WorkerGroups

if TYPE_CHECKING:
    from paceline.state import Section


@dataclass(frozen=True)
class StepOutcome:
    """A worker's report about a computed share."""

    predictions: int
    loss_sum: float | None
    correct: int | None
    norms: tuple[float, float, float, float] | None = None
    diverged: str | None = None
    """Why the loss indicates divergence; None if it does not."""


NOTHING = StepOutcome(0, None, None)
EMPTY = StepOutcome(0, 0.0, 0)
"""Outcome of a worker without samples."""


class WeightUpdates:
    """Turns a strategy's gradients into weights, in the order of virtual time.

    Each call does what one process would do. Strategies whose workers share every global batch use
    `step` and the averages; those with servers use `pull`, `compute`, `push` and `apply`.
    """

    uses_leases = False
    """True if `step` uses the leases."""

    def step(self, leases: Sequence[Lease]) -> list[StepOutcome]:
        """Computes all workers' shares of one batch and updates the weights."""
        return []

    def is_average_due(self) -> bool:
        """Returns whether the replicas were averaged after the last step."""
        return False

    def average_replicas(self) -> None:
        """Averages replicas that took steps since the last average."""

    def pull(self, worker: int) -> None:
        """Gives a worker the servers' current weights."""

    def compute(self, worker: int, lease: Lease) -> StepOutcome:
        """Computes a gradient on the worker's weights."""
        return NOTHING

    def push(self, worker: int, lease: Lease, handle: int) -> None:
        """Sends the computed gradient to the servers as number `handle` of this worker."""

    def push_group(
        self, members: Sequence[int], leases: Sequence[Lease], handle: int
    ) -> list[StepOutcome]:
        """Computes a group's gradients; its first worker pushes their sum as `handle`."""
        return [NOTHING for _ in members]

    def grad_sq_norm(self, order: ApplyUpdate) -> float:
        """Squared norm of an update's summed gradient before clipping."""
        return 0.0

    def apply(self, order: ApplyUpdate, factor: float) -> None:
        """Applies an update of pushed gradients on the servers."""

    def recover_state(self) -> Section | None:
        """Returns a copy of the state of the last complete update."""
        return None

    def keep_local_state(self) -> None:
        """Keeps what belongs to single workers, such as residuals, before the view ends."""

    def sync(self) -> None:
        """Puts the newest weights into the backend's model."""

    def export(self) -> None:
        """Puts the whole state into the backend's model, optimizer and residuals."""

    def close(self) -> None:
        """Releases resources; the state is lost unless it was exported."""


class WeightsBackend:
    """The model of a simulated run: evaluation, checkpoints, and the updates of each strategy."""

    lr_gain = 1.0
    """Factor of the learning rate because of an adapted batch."""

    def enter(
        self, strategy: Strategy, groups: WorkerGroups, *, keep: bool, restore: bool, best: bool
    ) -> WeightUpdates:
        """Activates a strategy; all replicas are equal now."""
        return WeightUpdates()

    def regroup(
        self, workers: Sequence[int], kept: Sequence[int | None], state: Section | None
    ) -> None:
        """Continues with these workers from a state; None is that of the model.

        `kept` is the former rank of each worker; None for one that joins.
        """

    def keep(self) -> None:
        """Keeps a copy of the current state, as the best so far."""

    def settle(self) -> float:
        """Brings the newest weights to all workers; returns the learning rate."""
        return 0.0

    def evaluate(self, split: str) -> tuple[float | None, int | None, int]:
        """Returns the sum of losses, the correct predictions and the number of predictions."""
        return None, None, 0

    def save(self, name: str, memory: Mapping[str, Any]) -> str:
        """Writes a checkpoint with the coordinator's memory; returns its path in the run folder."""
        return ""

    def save_model(self, path: Path) -> None:
        """Writes the trained weights."""

    def close(self) -> None:
        """Releases resources at the end of the run."""
