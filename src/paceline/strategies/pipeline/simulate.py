"""Simulation of pipeline parallelism."""

from collections.abc import Sequence
from functools import cached_property

import numpy as np

from paceline.strategies.model_parallel_cost import StageHost
from paceline.strategies.model_parallel_simulate import ModelParallelSimulation
from paceline.strategies.pipeline.cost import estimate_pipeline, pipeline_s
from paceline.strategies.pipeline.spec import PipelineParallel
from paceline.twin.machines import Floats


class PipelineSimulation(ModelParallelSimulation[PipelineParallel]):
    @property
    def micro_batches(self) -> int:
        return self.spec.micro

    @cached_property
    def compute_fractions(self) -> Floats:
        work, micro, fractions = self.simulator.work, self.micro_batches, list[float]()
        samples = work.batch / (self.workers // self.parts)
        for first in range(0, self.workers, self.parts):
            hosts = self.stage_hosts[first : first + self.parts]
            found = estimate_pipeline(work, self.spec, hosts, samples)
            assert found is not None  # memory was checked before the simulation started
            total = [micro * h.fixed_s + samples * h.per_sample_s for h in hosts]
            fractions += [c / t for c, t in zip(found.busy, total, strict=True)]
        return np.array(fractions)

    def replica_s(self, hosts: Sequence[StageHost], busy: Floats, samples: float) -> float:
        micro = self.micro_batches
        transfer = self._transfer_s(samples / micro)
        return pipeline_s([float(b) / micro + transfer for b in busy], micro)

    def _transfer_s(self, samples: float) -> float:
        """Seconds to send a micro-batch's activations to the next stage and gradients back."""
        passed = self.simulator.work.input_bytes_per_sample
        nbytes = samples * (sum(passed) / len(passed) if passed else 0.0)
        slowest = min(h.bytes_per_s for h in self.stage_hosts)
        return 2 * nbytes / slowest + 2 * max(h.latency_s for h in self.stage_hosts)
