"""Simulation of local SGD."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline.strategies.local_sgd.spec import LocalSgd
from paceline.strategies.local_steps_simulate import LocalStepsSimulation
from paceline.twin.simulation import Groups, SimulateFacet

if TYPE_CHECKING:
    from paceline.twin.gradient_backend import GradientBackend
    from paceline.twin.simulator import Simulator
    from paceline.twin.updates import WeightUpdates


class LocalSgdSimulate(SimulateFacet[LocalSgd]):
    def simulation(
        self, spec: LocalSgd, simulator: Simulator, groups: Groups
    ) -> LocalStepsSimulation:
        return LocalStepsSimulation(
            simulator, None if spec.drift is not None else spec.steps_between_syncs
        )

    def updates(self, spec: LocalSgd, backend: GradientBackend, groups: Groups) -> WeightUpdates:
        from paceline.twin.replicas import LocalReplicas

        return LocalReplicas(backend, spec)


SIMULATE = LocalSgdSimulate()
