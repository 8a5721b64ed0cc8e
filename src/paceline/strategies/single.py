"""single: worker 0 trains alone; others, if a switch has them, idle and receive the result."""

from __future__ import annotations

from paceline.comm.broadcast import broadcast_section
from paceline.specs.strategy import Single
from paceline.state import Section, capture, restore
from paceline.strategies.runner import Runner, Surroundings, Work, step_optimizer
from paceline.telemetry.phases import OPTIMIZER


class SingleRunner(Runner):
    def __init__(self, spec: Single, around: Surroundings) -> None:
        super().__init__(around)

    def import_state(self, state: Section) -> None:
        restore(state, self.replica.model, self.replica.optimizer)

    def finish_step(self, work: Work) -> None:
        if work.lease.samples:
            self.clock.enter(OPTIMIZER)
            step_optimizer(self.replica)

    def settle(self, version: int) -> None:
        if self.around.group.size > 1:
            # Worker 0 alone has moved on; afterwards all hold what it holds.
            self.import_state(broadcast_section(self._mine(), self.around.group))

    def export_state(self) -> Section:
        return self._mine()

    def _mine(self) -> Section:
        return capture(self.replica.model, self.replica.optimizer)
