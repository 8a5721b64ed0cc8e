"""Simulation of strategies whose workers take several local steps between two averages."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline.specs.strategy import LocalSteps, WorkerGroups
from paceline.twin.lockstep import LockstepSimulation
from paceline.twin.machines import Floats
from paceline.twin.timeline import Callback
from paceline.twin.updates import WeightUpdates

if TYPE_CHECKING:
    from paceline.twin.gradient_backend import GradientBackend


class LocalStepsSimulation(LockstepSimulation[LocalSteps]):
    _steps_since_sync = 0

    def bytes_per_exchange(self) -> float:
        return float(self.simulator.work.bytes)

    @staticmethod
    def updates(spec: LocalSteps, backend: GradientBackend, groups: WorkerGroups) -> WeightUpdates:
        from paceline.twin.replicas import LocalReplicas

        return LocalReplicas(backend, spec)

    @property
    def has_complete_state(self) -> bool:
        return self._steps_since_sync == 0

    def finish_step(self, ends: Floats, busy: Floats) -> None:
        self.free = ends
        self.update_weights()
        self._steps_since_sync += 1
        if self._is_due():
            self._steps_since_sync = 0
            self.simulator.updates.average_replicas()
            self.wait_for_all(self.free, self.exchange_s(float(self.free.max())))

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
            now += self.exchange_s(now)
        then(now)
