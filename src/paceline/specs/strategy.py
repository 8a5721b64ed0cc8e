"""Base class of strategy specs; concrete specs are in the package of each strategy.

The defaults apply to equal data-parallel workers that take every step together.
"""

from __future__ import annotations

from dataclasses import dataclass

from paceline.errors import SpecError
from paceline.specs.base import Spec

MAX_COPIES = 4
"""Maximum number of servers that hold the same shard."""
WorkerGroups = tuple[tuple[int, ...], ...]
"""Groups of workers that act as one; empty if each worker acts individually."""


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
    """Properties of a strategy; its behavior is found through `paceline.strategies.registry`."""

    @property
    def exact(self) -> bool:
        """True if the result equals one process on the global batch, up to rounding."""
        return True

    @property
    def phases(self) -> tuple[Strategy, ...]:
        """The strategies that are active in sequence; only a switch has more than one."""
        return (self,)

    @property
    def survives_losses(self) -> bool:
        """True if the remaining workers hold all of the state when one is lost."""
        return False

    @property
    def needs_worker_speeds(self) -> bool:
        """True if workers measure their speed before training, for `worker_groups`."""
        return False

    @property
    def needs_exchange_probe(self) -> bool:
        """True if workers measure an exchange before training, to compare strategies."""
        return False

    @property
    def balances_speeds(self) -> bool:
        """True if shares of a batch follow the measured speeds of the workers."""
        return False

    @property
    def measures_noise(self) -> bool:
        """True if workers measure the gradient noise scale, which adapts the global batch."""
        return False

    @property
    def accumulates_gradients(self) -> bool:
        """True if a worker can compute its share in several parts."""
        return True

    def worker_count(self, requested: int) -> int:
        """Returns the number of workers to start if this many are requested."""
        return requested

    def worker_variant(self, workers: int) -> str:
        """Returns the name of the runner variant to use; empty if there is only one."""
        return ""

    def servers_for(self, workers: int) -> int:
        """Returns the number of shards of the weights on servers."""
        return 0

    def copies_of_shards(self, *, elastic: bool) -> int:
        """Returns the number of servers that hold each shard; `elastic` if workers may be lost."""
        return 1

    def idle_workers(self, workers: int) -> frozenset[int]:
        """Returns the workers that compute nothing while the strategy is active."""
        return frozenset()

    def worker_groups(self, workers: int, speeds: tuple[float, ...] | None) -> WorkerGroups:
        """Returns groups of workers that push together; `speeds` are in samples per second."""
        return ()

    def batch_weights(self, workers: int) -> tuple[int, ...] | None:
        """Returns the proportions of the workers' shares of a batch; None if they are equal."""
        return None

    def state_fraction(self, workers: int) -> StateFraction:
        """Returns the fraction of the state that a worker holds, at most over all workers."""
        return StateFraction()

    def lag_bound(self, workers: int) -> float | None:
        """Returns the maximum lag of a worker, in steps; None if unbounded."""
        return 0.0

    def expected_staleness(self, workers: int) -> float:
        """Returns the number of other updates between a pull and its push, on equal machines."""
        return 0.0

    def check_workers(self, workers: int) -> None:
        """Raises SpecError if the strategy does not support this many workers."""

    def check_batch(self, batch: int, workers: int) -> None:
        """Raises SpecError if a global batch cannot be split across this many workers."""
        if batch < workers:
            raise SpecError(
                f"--batch {batch} is smaller than --workers {workers}; "
                "the global batch must cover at least one sample per worker"
            )

    def lr_description(self, workers: int) -> str:
        """Describes the effective learning rate, for the start of a run and for a switch."""
        return "learning rate x1 per global-batch update"


SPREAD = 20.0
"""(h - 1) (n - 1) of n workers at which local steps are worth half as much as synchronous ones."""
SPREAD_EXPONENT = 2.7
"""Exponent of the loss of worth around it.

Both were fitted to simulated runs with real gradients, of 2 to 32 workers: 23 scenarios, next to
three that were held out (bench/local_steps.py).
"""


class LocalSteps(Strategy):
    """A strategy whose replicas differ between two synchronizations."""

    @property
    def survives_losses(self) -> bool:
        return True

    @property
    def exact(self) -> bool:
        return False

    @property
    def steps_between_syncs(self) -> int:
        """Local steps between two synchronizations; the expected number if it is not fixed."""
        raise NotImplementedError

    @property
    def syncs_by_drift(self) -> bool:
        """True if the weights decide when replicas are averaged."""
        return False

    def spread(self, workers: int) -> float:
        """Returns how far replicas are apart when they are synchronized, in units of `SPREAD`.

        Their variance grows with the local steps, and with the workers, because the share of a
        batch is noisier than the whole.
        """
        return (self.steps_between_syncs - 1) * (workers - 1) / SPREAD

    def efficiency(self, workers: int) -> float:
        """Returns the progress per sample, relative to synchronous training."""
        return float(1 / (1 + self.spread(workers) ** SPREAD_EXPONENT))

    def inner_rate(self, workers: int) -> float:
        """Returns the factor on the learning rate of local steps.

        The learning rate was chosen for the whole batch. With one local step the average of the
        replicas is a step on the whole batch; with many, each replica follows the noise of its
        share of the batch, and a rate that is stable for the batch may not be for the share.
        """
        return 1.0


class ModelParallel(Strategy):
    """The model in parts, one per worker; all parts work on the same rows."""

    @property
    def model_parts(self) -> int:
        """Number of workers that hold one model together."""
        raise NotImplementedError

    @property
    def loss_part(self) -> int:
        """The part that computes the loss and holds the replica's rows in the ledger."""
        return 0

    def state_fraction(self, workers: int) -> StateFraction:
        """Assumes that layers can be divided evenly."""
        part = 1 / self.model_parts
        return StateFraction(part, part, part)

    def batch_weights(self, workers: int) -> tuple[int, ...] | None:
        return tuple(int(w % self.model_parts == self.loss_part) for w in range(workers))

    def check_batch(self, batch: int, workers: int) -> None:
        replicas = workers // self.model_parts
        if batch < replicas:
            raise SpecError(
                f"--batch {batch} is smaller than the {replicas} replicas of the model; "
                "the global batch must cover at least one sample per replica"
            )

    def check_workers(self, workers: int) -> None:
        if workers % self.model_parts:
            raise SpecError(
                f"{self} does not support {workers} workers; "
                f"use {self.model_parts} workers, or a multiple for replicas"
            )
