"""Simulation of model-parallel strategies: each replica of the model spans several workers."""

import math
from abc import abstractmethod
from collections.abc import Sequence
from typing import TypeVar

import numpy as np

from paceline.plan.cost_model import allreduce_s
from paceline.specs.strategy import ModelParallel, WorkerGroups
from paceline.strategies.model_parallel_cost import StageHost
from paceline.twin.lockstep import LockstepSimulation
from paceline.twin.machines import Floats
from paceline.twin.simulator import Simulator

ModelParallelT = TypeVar("ModelParallelT", bound=ModelParallel)


class ModelParallelSimulation(LockstepSimulation[ModelParallelT]):
    """Replicas advance in lock-step; equal parts of different replicas sum their gradients."""

    def __init__(self, spec: ModelParallelT, simulator: Simulator, groups: WorkerGroups) -> None:
        super().__init__(spec, simulator, groups)
        parts = self.parts = spec.model_parts
        self.stage_hosts = [
            StageHost(c.fixed_s, c.per_sample_s, math.inf, link.bytes_per_s, link.latency_s)
            for c, link in zip(simulator.fleet.compute, simulator.fleet.links, strict=True)
        ]
        self._replica_hosts = simulator.fleet.hosts[::parts]

    @property
    def micro_batches(self) -> int:
        return 1

    @property
    @abstractmethod
    def compute_fractions(self) -> Floats:
        """Fraction of the model's compute time that each worker has."""

    @abstractmethod
    def replica_s(self, hosts: Sequence[StageHost], busy: Floats, samples: float) -> float:
        """Step time of one replica whose workers compute for `busy` seconds each."""

    def compute_step(self, shares: Floats, epoch: float) -> tuple[Floats, Floats]:
        """All parts of a replica process the samples that the ledger gave to one of them."""
        fleet, parts = self.simulator.fleet, self.parts
        samples = shares.reshape(-1, parts).sum(1).repeat(parts)
        began = self.free.reshape(-1, parts).max(1).repeat(parts)
        busy = fleet.compute_all(began, self._equivalent_samples(samples), epoch) - began
        durations = [
            self.replica_s(
                self.stage_hosts[first : first + parts],
                busy[first : first + parts],
                float(samples[first]),
            )
            for first in range(0, len(busy), parts)
        ]
        ends = began + np.repeat(durations, parts)
        self.simulator.clocks["wait"] += ends - self.free - busy
        return ends, busy

    def _equivalent_samples(self, samples: Floats) -> Floats:
        """Samples of the whole model that take a worker as long as its part of `samples` does."""
        fractions = self.compute_fractions
        fixed = np.array([h.fixed_s for h in self.stage_hosts])
        each = np.array([h.per_sample_s for h in self.stage_hosts])
        # The fixed cost of a stage is paid once per micro-batch.
        total = fractions * (self.micro_batches * fixed + samples * each)
        equivalent: Floats = (total - fixed) / each
        return np.where(samples > 0, np.maximum(equivalent, 1e-9), 0.0)

    def finish_step(self, ends: Floats, busy: Floats) -> None:
        simulator, now = self.simulator, float(ends.max())
        nbytes = simulator.work.bytes / self.parts * simulator.fleet.link_slowness(now)
        exchange_s = allreduce_s(simulator.pool, self._replica_hosts, nbytes)
        if exchange_s:
            self.wait_for_all(ends, exchange_s)
        else:
            self.free = ends
        self.update_weights(self.parts)
