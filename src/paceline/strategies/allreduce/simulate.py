"""Simulation of all-reduce: buckets overlap with backward, and all workers wait for the slowest."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from paceline.plan.cost_model import (
    BucketTiming,
    exposed_s,
    exposed_without_layers_s,
    fill_buckets,
)
from paceline.specs.strategy import WorkerGroups
from paceline.strategies.allreduce.cost import exchange_bytes
from paceline.strategies.allreduce.share_tree import cut_batch, worker_shares
from paceline.strategies.allreduce.spec import AllReduce
from paceline.twin.lockstep import LockstepSimulation
from paceline.twin.machines import Floats
from paceline.twin.updates import WeightUpdates

if TYPE_CHECKING:
    from paceline.twin.gradient_backend import GradientBackend


class AllReduceSimulation(LockstepSimulation[AllReduce]):
    def bytes_per_exchange(self) -> float:
        return exchange_bytes(self.spec, self.simulator.work, self.workers)

    def algorithm(self) -> str | None:
        return self.spec.message_algorithm

    @cached_property
    def _buckets(self) -> list[BucketTiming]:
        return fill_buckets(self.simulator.work, self.spec.bucket_bytes)

    def cut_batch(self, count: int, weights: tuple[int, ...] | None) -> list[int]:
        if not self.spec.shares:
            return super().cut_batch(count, weights)
        return cut_batch(count, self.spec.shares, self.workers)

    def compute_step(self, shares: Floats, epoch: float) -> tuple[Floats, Floats]:
        """Each fixed share is a separate pass, with the fixed time of a step."""
        ends, busy = super().compute_step(shares, epoch)
        if self.spec.shares:
            fixed = np.array([compute.fixed_s for compute in self.simulator.fleet.compute])
            more = fixed * (np.diff(worker_shares(self.spec.shares, self.workers)) - 1)
            ends, busy = ends + more, busy + more
        return ends, busy

    @staticmethod
    def updates(spec: AllReduce, backend: GradientBackend, groups: WorkerGroups) -> WeightUpdates:
        if spec.shares:
            from paceline.strategies.allreduce.simulated_shares import FixedSharesUpdate

            return FixedSharesUpdate(backend, spec.shares)
        from paceline.twin.exact import ExactUpdate

        return ExactUpdate(backend, codec=spec.codec, bucket_bytes=int(spec.bucket_bytes))

    def finish_step(self, ends: Floats, busy: Floats) -> None:
        longest, now = float(busy.max()), float(ends.max())
        if self.spec.shares:
            exposed = self.exchange_s(now)  # After the last share, not during backward.
        elif self.workers > 1 and self._buckets:
            exposed = exposed_s(
                longest,
                [
                    (b.ready, self.exchange_s(now, b.share * self.exchange_bytes))
                    for b in self._buckets
                ],
            )
        else:
            exposed = exposed_without_layers_s(
                self.exchange_s(now), longest, self.simulator.work.bytes, self.spec.bucket_bytes
            )
        self.wait_for_all(ends, exposed)
        self.update_weights()
