"""Simulation of tensor parallelism."""

from collections.abc import Sequence

import numpy as np

from paceline.strategies.model_parallel_cost import StageHost
from paceline.strategies.model_parallel_simulate import ModelParallelSimulation
from paceline.strategies.tensor.cost import tensor_step_s
from paceline.strategies.tensor.spec import TensorParallel
from paceline.twin.machines import Floats


class TensorSimulation(ModelParallelSimulation[TensorParallel]):
    @property
    def compute_fractions(self) -> Floats:
        return np.full(self.workers, 1 / self.parts)

    def replica_s(self, hosts: Sequence[StageHost], busy: Floats, samples: float) -> float:
        """The slowest slice as simulated, plus the exchanges of the cost model."""
        expected = max(h.fixed_s + samples * h.per_sample_s / self.parts for h in hosts)
        return float(busy.max()) + tensor_step_s(self.simulator.work, hosts, samples) - expected
