"""The coordinator: makes all decisions of a run.

Reports of workers and servers come in with their time of arrival; actions go out. While workers
train, the pace of the active strategy turns reports into further work; `RunSequence` controls the
run between training intervals.
"""

import math
from typing import Any

from paceline.protocol.messages import (
    GradientPushed,
    Heartbeat,
    LossDiverged,
    Message,
    ServerReady,
    ShardSqNorm,
    StepsApplied,
    TrainingResumed,
)
from paceline.protocol.pace import Pace
from paceline.protocol.run_sequence import RunSequence
from paceline.protocol.run_spec import Action, RunStopped
from paceline.protocol.switch_policy import SwitchDecision

_TRAINING = (GradientPushed, StepsApplied)


class Coordinator(RunSequence):
    """Handles messages and returns actions; `history` can be read at any time."""

    def handle(self, event: Message, now: float) -> list[Action]:
        """Handles one report; returns actions to execute in order."""
        if self._ended:
            return []
        self._now = now
        self._actions = []
        if isinstance(event, _TRAINING):
            self._on_training(event)
        elif isinstance(event, Heartbeat):
            self.members.on_heartbeat(
                event.worker, event.step, event.phase, event.phase_changes, now
            )
        elif isinstance(event, ShardSqNorm):
            # Servers may still be applying the last update when the workers have drained.
            assert self._pace is not None
            self._actions.extend(self._pace.on_report(event, now))
        elif isinstance(event, LossDiverged):
            self._on_diverging(event)
        elif isinstance(event, TrainingResumed):
            self._resumed[event.worker] = event.pause_s
            if len(self._resumed) == self.plan.workers:
                self._flush_switch()
        elif isinstance(event, ServerReady):
            self._servers[event.server] = (event.host, event.port)
            self._resume_if_all_answered()
        elif self._is_repeated_answer(event):
            pass
        elif self._awaited is not None and isinstance(event, self._awaited):
            worker: int = event.worker  # type: ignore[attr-defined]
            self._answers[worker] = self._answered[worker] = event
            self._resume_if_all_answered()
        else:
            self._end("failed", f"unexpected {type(event).__name__} message from a worker")
        return self._actions

    def _is_repeated_answer(self, event: Message) -> bool:
        """Returns whether an answer was received before and is not expected again."""
        worker = getattr(event, "worker", None)
        if worker is None or self._answered.get(worker) != event:
            return False
        return self._awaited is not type(event) or worker in self._answers

    def stop(self, status: str, error: str) -> list[Action]:
        """Stops the run after a lost process, a timeout or an interrupt by the user."""
        self._actions = []
        self._end(status, error)
        return self._actions

    def _is_repeated(self, event: StepsApplied | GradientPushed) -> bool:
        """Returns whether a report is a duplicate, which must not be counted again."""
        # A push contains the index of its step; planned work contains the number of steps done.
        done = event.step + 1 if type(event) is GradientPushed else event.step
        if done <= self._last_step.get(event.worker, -1):
            return True
        self._last_step[event.worker] = done
        return False

    def _on_training(self, event: StepsApplied | GradientPushed) -> None:
        pace = self._pace
        if self._is_repeated(event):
            return
        if pace is None or pace.drained:
            self._end(
                "failed", f"unexpected {type(event).__name__} message while no work was assigned"
            )
            return
        self.members.set_step(event.worker, event.step)
        self.history.tally.add(event.measured)
        self._actions += pace.on_report(event, self._now)
        if event.measured.norms is not None:
            self.history.throughput.noise.add(*event.measured.norms)
        closed = self.history.throughput.add(event.worker, event.measured, self._now)
        if closed and not pace.drained and self._decision is None:
            self._apply_decision(self._policy.decide(self.history), pace)
        if pace.drained:
            self._resume([])

    def _apply_decision(self, decision: SwitchDecision | None, pace: Pace) -> None:
        """Applies the decision of a rule during a training interval."""
        decision = self._record(decision)
        if decision is None:
            return
        if decision.exclude_worker is not None:
            pace.exclude_worker(decision.exclude_worker)
            self.history.excluded_workers.add(decision.exclude_worker)
            self.history.throughput.exclude(decision.exclude_worker)
        else:
            self._decision = decision
            pace.stop_early()

    def _on_diverging(self, event: LossDiverged) -> None:
        loss = "NaN" if math.isnan(event.loss) else f"{event.loss:g}"
        reason = (
            f"diverged: the loss is {loss} at step {event.step} of worker {event.worker} "
            f"({event.reason}): lower the learning rate, add warm-up or clip gradients"
        )
        pace = self._pace
        if self._rollback_phase is None or pace is None or pace.drained:
            self._end("diverged", reason)
        elif self._decision is None or not self._decision.restore:
            self._apply_decision(self._roll_back(reason), pace)

    def _resume_if_all_answered(self) -> None:
        if len(self._answers) == self.plan.workers and len(self._servers) == self.plan.servers:
            answers = [self._answers[w] for w in sorted(self._answers)]
            self._awaited, self._answers = None, {}
            self._resume(answers)

    def _resume(self, answers: list[Any]) -> None:
        try:
            self._sequence.send(answers)
        except StopIteration:
            assert self._ended, "the run's sequence ended without an end"
        except RunStopped as stop:
            self._ended = True
            self._actions.append(stop.end)
