"""Simulation of strategies whose workers take several local steps between two averages."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline.plan.cost_model import allreduce_s
from paceline.specs.strategy import LocalSteps, WorkerGroups
from paceline.twin.lockstep import LockstepSimulation
from paceline.twin.machines import Floats
from paceline.twin.simulator import Simulator
from paceline.twin.timeline import Callback
from paceline.twin.updates import WeightUpdates

if TYPE_CHECKING:
    from paceline.twin.gradient_backend import GradientBackend


class LocalStepsSimulation(LockstepSimulation[LocalSteps]):
    def __init__(self, spec: LocalSteps, simulator: Simulator, groups: WorkerGroups) -> None:
        nbytes = float(simulator.work.bytes) if simulator.plan.workers > 1 else 0.0
        exchange_s = allreduce_s(simulator.pool, simulator.fleet.hosts, nbytes)
        super().__init__(spec, simulator, groups, exchange_s=exchange_s, exchange_bytes=nbytes)
        self._steps_since_sync = 0

    @staticmethod
    def updates(spec: LocalSteps, backend: GradientBackend, groups: WorkerGroups) -> WeightUpdates:
        from paceline.twin.replicas import LocalReplicas

        return LocalReplicas(backend, spec)

    def finish_step(self, ends: Floats, busy: Floats) -> None:
        self.free = ends
        self.update_weights()
        self._steps_since_sync += 1
        if self._is_due():
            self._steps_since_sync = 0
            self.simulator.updates.average_replicas()
            self.wait_for_all(self.free, self.exchange_s)

    def _is_due(self) -> bool:
        if self.spec.syncs_by_drift:
            return self.simulator.updates.is_average_due()
        return self._steps_since_sync >= self.spec.steps_between_syncs

    def sync_weights(self, worker: int, version: int, now: float, then: Callback) -> None:
        """A quiesce averages the replicas, if they took steps since the last average."""
        if worker == 0 and self._steps_since_sync:
            self._steps_since_sync = 0
            self.simulator.updates.average_replicas()
            self.count_exchange()
            now += self.exchange_s
        then(now)
