"""Worker side of single: worker 0 trains; others, in a switch, idle and receive the result."""

from paceline.specs.strategy import Strategy
from paceline.strategies.runner import Runner, TrainStep, WorkerContext, step_optimizer
from paceline.telemetry.phase_clock import OPTIMIZER


class SingleRunner(Runner):
    """Also runs other strategies that equal `single` on one worker."""

    def __init__(self, spec: Strategy, context: WorkerContext) -> None:
        super().__init__(context)
        self._is_behind = False
        """True on workers that wait for the result of worker 0."""

    @property
    def has_complete_state(self) -> bool:
        return not self._is_behind

    def finish_step(self, work: TrainStep) -> None:
        self._is_behind = work.lease.samples < work.lease.batch
        if work.lease.samples:
            self.clock.enter(OPTIMIZER)
            step_optimizer(self.replica)

    def sync_weights(self, version: int) -> None:
        if self.context.group.size > 1:
            # Only worker 0 has trained; its state is broadcast.
            self.import_state(self.context.group.broadcast_section(self.export_state()))
        self._is_behind = False
