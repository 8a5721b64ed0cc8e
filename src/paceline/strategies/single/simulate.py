"""Simulation of training on one worker."""

from paceline.strategies.single.spec import Single
from paceline.twin.lockstep import LockstepSimulation
from paceline.twin.machines import Floats


class SingleSimulation(LockstepSimulation[Single]):
    """Worker 0 computes and updates; in a switch, the others are idle meanwhile."""

    def lose(self, worker: int, now: float) -> None:
        if worker == 0:  # The others hold the state of the last quiesce.
            self.settle(self.settled)
        super().lose(worker, now)

    def finish_step(self, ends: Floats, busy: Floats) -> None:
        update_s = float(self.simulator.fleet.update[0])
        self.free = ends.copy()
        self.free[0] += update_s
        self.simulator.clocks["optimizer"][0] += update_s
