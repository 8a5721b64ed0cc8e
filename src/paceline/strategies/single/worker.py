"""Worker side of single: worker 0 trains; others, in a switch, idle and receive the result."""

from paceline.specs.strategy import Strategy
from paceline.strategies.runner import Runner, TrainStep, WorkerContext, step_optimizer
from paceline.telemetry.phase_clock import OPTIMIZER


class SingleRunner(Runner):
    """Also runs other strategies that equal `single` on one worker."""

    def __init__(self, spec: Strategy, context: WorkerContext) -> None:
        super().__init__(context)

    def finish_step(self, work: TrainStep) -> None:
        if work.lease.samples:
            self.clock.enter(OPTIMIZER)
            step_optimizer(self.replica)

    def sync_weights(self, version: int) -> None:
        if self.context.group.size > 1:
            # Only worker 0 has trained; its state is broadcast.
            self.import_state(self.context.group.broadcast_section(self.export_state()))
