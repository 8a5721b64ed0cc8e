"""Simulation of training on one worker."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline.strategies.single.spec import Single
from paceline.twin.lockstep import LockstepSimulation
from paceline.twin.machines import Floats
from paceline.twin.simulation import Groups, SimulateFacet

if TYPE_CHECKING:
    from paceline.twin.simulator import Simulator


class SingleSimulation(LockstepSimulation):
    """Worker 0 computes and updates; in a switch, the others are idle meanwhile."""

    def finish_step(self, ends: Floats, busy: Floats) -> None:
        update_s = float(self.simulator.fleet.update[0])
        self.free = ends.copy()
        self.free[0] += update_s
        self.simulator.clocks["optimizer"][0] += update_s


class SingleSimulate(SimulateFacet[Single]):
    def simulation(self, spec: Single, simulator: Simulator, groups: Groups) -> SingleSimulation:
        return SingleSimulation(simulator)


SIMULATE = SingleSimulate()
