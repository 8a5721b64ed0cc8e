"""Simulation of DiLoCo."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline.strategies.diloco.spec import DiLoCo
from paceline.strategies.local_steps_simulate import LocalStepsSimulation
from paceline.twin.simulation import Groups, SimulateFacet

if TYPE_CHECKING:
    from paceline.twin.gradient_backend import GradientBackend
    from paceline.twin.simulator import Simulator
    from paceline.twin.updates import WeightUpdates


class DiLoCoSimulate(SimulateFacet[DiLoCo]):
    def simulation(
        self, spec: DiLoCo, simulator: Simulator, groups: Groups
    ) -> LocalStepsSimulation:
        return LocalStepsSimulation(simulator, spec.steps_between_syncs)

    def updates(self, spec: DiLoCo, backend: GradientBackend, groups: Groups) -> WeightUpdates:
        from paceline.twin.replicas import LocalReplicas

        return LocalReplicas(backend, spec)


SIMULATE = DiLoCoSimulate()
