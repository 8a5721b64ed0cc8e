"""Base class of strategies that split the model across several workers."""

from __future__ import annotations

from paceline.errors import SpecError
from paceline.specs.strategy import StateFraction, Strategy


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
