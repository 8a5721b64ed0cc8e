"""What every strategy states about itself, as data; concrete specs live in the strategy's slice.

Each default holds for equal data-parallel workers that take every step together.
"""

from __future__ import annotations

from dataclasses import dataclass

from paceline.errors import SpecError
from paceline.specs.base import Spec

WorkerGroups = tuple[tuple[int, ...], ...]
"""Workers that act as one, group by group; empty where each acts for itself."""


@dataclass(frozen=True)
class StateFraction:
    """The fraction of a model's weights, gradients and optimizer slots that a worker holds."""

    weights: float = 1.0
    gradients: float = 1.0
    slots: float = 1.0

    def floats_per_weight(self, slots: int) -> float:
        """Numbers held per weight of the model, with this many optimizer slots per weight."""
        return self.weights + self.gradients + slots * self.slots


class Strategy(Spec):
    """A strategy's facts; what it does is found through `paceline.strategies.registry`."""

    @property
    def exact(self) -> bool:
        """Equal to one process on the global batch, up to rounding."""
        return True

    @property
    def phases(self) -> tuple[Strategy, ...]:
        """The strategies that are active one after another; only a switch has more than one."""
        return (self,)

    @property
    def needs_worker_speeds(self) -> bool:
        """Workers measure their speed before training, for `worker_groups`."""
        return False

    def worker_count(self, requested: int) -> int:
        """The number of workers to start when this many are requested."""
        return requested

    def worker_variant(self, workers: int) -> str:
        """Which of its record's runners to use; empty where there is only one."""
        return ""

    def servers_for(self, workers: int) -> int:
        """Server processes needed in addition to the workers."""
        return 0

    def idle_workers(self, workers: int) -> frozenset[int]:
        """Workers that compute nothing while the strategy is active."""
        return frozenset()

    def worker_groups(self, workers: int, speeds: tuple[float, ...] | None) -> WorkerGroups:
        """Workers that push as one; `speeds` in samples per second where they are known."""
        return ()

    def batch_weights(self, workers: int) -> tuple[int, ...] | None:
        """How a batch is divided among the workers, in proportion; None divides it evenly."""
        return None

    def state_fraction(self, workers: int) -> StateFraction:
        """What a worker holds in memory: the largest fraction over all workers."""
        return StateFraction()

    def lag_bound(self, workers: int) -> float | None:
        """The most steps that a worker may be ahead of the slowest one; None: unbounded."""
        return 0.0

    def expected_staleness(self, workers: int) -> float:
        """Updates of others between a pull and its push, on equal machines."""
        return 0.0

    def check_workers(self, workers: int) -> None:
        """Raise SpecError when the strategy cannot run with this many workers."""

    def check_batch(self, batch: int, workers: int) -> None:
        """Raise SpecError when a global batch cannot be divided among this many workers."""
        if batch < workers:
            raise SpecError(
                f"--batch {batch} is smaller than --workers {workers}: "
                "the global batch must give every worker a sample"
            )

    def lr_description(self, workers: int) -> str:
        """The effective learning rate in words, for the start of a run and for a switch."""
        return "learning rate x1 an update of the global batch"
