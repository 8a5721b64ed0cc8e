"""What specs share whose strategy splits the model over several workers."""

from __future__ import annotations

from paceline.errors import SpecError
from paceline.specs.strategy import StateFraction, Strategy


class ModelParallel(Strategy):
    """The model in parts, each on a worker of its own; all of them work on the same rows."""

    @property
    def model_parts(self) -> int:
        """Workers that hold one model together."""
        raise NotImplementedError

    @property
    def loss_part(self) -> int:
        """The part that has a replica's rows in the ledger: it computes the loss."""
        return 0

    def state_fraction(self, workers: int) -> StateFraction:
        """As far as layers can be shared out evenly."""
        part = 1 / self.model_parts
        return StateFraction(part, part, part)

    def batch_weights(self, workers: int) -> tuple[int, ...] | None:
        return tuple(int(w % self.model_parts == self.loss_part) for w in range(workers))

    def check_batch(self, batch: int, workers: int) -> None:
        replicas = workers // self.model_parts
        if batch < replicas:
            raise SpecError(
                f"--batch {batch} is smaller than the {replicas} replicas of the model: "
                "the global batch must give each a sample"
            )

    def check_workers(self, workers: int) -> None:
        if workers % self.model_parts:
            raise SpecError(
                f"{self} with {workers} workers: "
                f"use {self.model_parts} workers, or a multiple of it for replicas"
            )
