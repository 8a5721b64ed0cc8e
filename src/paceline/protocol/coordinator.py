"""The coordinator: makes all decisions of a run.

Reports of workers and servers come in with their time of arrival; actions go out. While workers
train, the pace of the active strategy turns reports into further work; `RunSequence` controls the
run between training intervals.
"""

import math
from collections.abc import Callable

from paceline.protocol.messages import (
    ExchangeFailed,
    GradientPushed,
    Heartbeat,
    LossDiverged,
    Message,
    ServerHeartbeat,
    ServerReady,
    ShardSqNorm,
    StepsApplied,
    TrainingResumed,
    WorkerReady,
)
from paceline.protocol.pace import Pace
from paceline.protocol.run_sequence import RunSequence
from paceline.protocol.run_spec import Action, RunStopped
from paceline.protocol.switch_policy import SwitchDecision

_TRAINING = (GradientPushed, StepsApplied)


class Coordinator(RunSequence):
    """Handles messages and returns actions; `history` can be read at any time."""

    def handle(self, event: Message, now: float, view: int | None = None) -> list[Action]:
        """Handles one report; returns actions to execute in order.

        `view` is that of the sender: reports from outside the current view have no effect.
        """
        if self._ended:
            return []
        self._now = now
        self._actions = []
        if isinstance(event, Heartbeat):
            # It carries the number of the worker, and is valid in every view.
            self.members.on_heartbeat(
                event.worker, event.step, event.phase, event.phase_changes, now
            )
        elif isinstance(event, WorkerReady):
            self._on_ready(event)
        elif self._is_foreign(event, view):
            pass
        elif self._is_adopting and isinstance(event, ShardSqNorm):
            shard = self.servers.shard_of(event.server)
            self._early_norms.append(ShardSqNorm(shard, event.version, event.square))
        elif isinstance(event, _TRAINING):
            self._on_training(event)
        elif isinstance(event, ShardSqNorm):
            if view in (None, self._pace_view):
                # Servers may still be applying the last update when the workers have drained.
                assert self._pace is not None
                shard = self.servers.shard_of(event.server)
                report = ShardSqNorm(shard, event.version, event.square)
                self._send(self._pace.on_report(report, now))
        elif isinstance(event, LossDiverged):
            self._on_diverging(event)
        elif isinstance(event, TrainingResumed):
            self._resumed[event.worker] = event.pause_s
            if len(self._resumed) == self.view.size:
                self._flush_switch()
        elif isinstance(event, ExchangeFailed):
            # Its cause is usually known soon; otherwise `renew` is called. A worker that could not
            # meet the others at the start reports this before it is ready.
            self._must_regroup |= self._awaited is WorkerReady
        elif isinstance(event, ServerHeartbeat):
            self.servers.status.on_heartbeat(event.server, 0, "serve", 0, now)
        elif isinstance(event, ServerReady):
            self._on_server_ready(event)
        elif self._is_repeated_answer(event):
            pass
        elif self._awaited is not None and isinstance(event, self._awaited):
            worker: int = event.worker  # type: ignore[attr-defined]
            self._answers[worker] = self._answered[worker] = event
            self._resume_if_all_answered()
        else:
            self._end("failed", f"unexpected {type(event).__name__} message from a worker")
        return self._actions

    def lose(self, worker: int, reason: str, now: float, *, returns: bool = False) -> list[Action]:
        """Continues without a worker that is gone; `can_lose` must hold.

        `returns`: it is started again, and the others wait for it if they are too few.
        """
        self._now = now
        self._actions = []
        if not self._ended:
            self._lose(worker, reason, returns=returns)
        return self._actions

    def give_up(self, worker: int, reason: str, now: float) -> list[Action]:
        """Ends the run if it waits for a worker that cannot be started again."""
        self._now = now
        self._actions = []
        if not self._ended:
            can_continue = self.can_lose(worker)
            self._returning.discard(worker)
            if not can_continue:
                self._end("failed", reason)
        return self._actions

    def retire(self, worker: int, now: float) -> list[Action]:
        """Lets a worker leave when its work is done; `why_not_leave` must be None."""
        self._now = now
        self._actions = []
        if not self._ended:
            self._retire(worker)
        return self._actions

    def lose_server(self, server: int, reason: str, now: float) -> list[Action]:
        """Continues without a server that is gone for good; `can_lose_server` must hold."""
        self._now = now
        self._actions = []
        if not self._ended:
            self._lose_server(server, reason)
        return self._actions

    def renew(self, view: int, reason: str, now: float) -> list[Action]:
        """Forms a view again in which an exchange failed, unless it has changed meanwhile."""
        self._now = now
        self._actions = []
        if not self._ended and view == self.view.number and self._awaited is not WorkerReady:
            self._renew(reason)
        return self._actions

    def _on_ready(self, ready: WorkerReady) -> None:
        is_first = self.view.rank_of(ready.worker) is not None and ready.worker not in self._lost
        if ready.worker not in self.members:
            return  # It was lost, and has not been started again.
        self.members.set_ready(ready.worker, self._now)
        if not is_first:
            self._admit(ready)
        elif self._awaited is WorkerReady:
            self._ready[ready.worker] = ready
            self._resume_if_all_answered()

    def _on_server_ready(self, ready: ServerReady) -> None:
        servers = self.servers
        address = (ready.host, ready.port)
        servers.set_ready(ready.server, address, self._now, version=ready.version)
        if ready.server in self.view.servers and ready.server not in servers.lost:
            self._resume_if_all_answered()
        else:
            self._admit_server(ready.server)

    def _is_foreign(self, event: Message, view: int | None) -> bool:
        """Returns whether a report comes from another view, or from a lost worker."""
        rank = getattr(event, "worker", None)
        if rank is None:
            return False
        if self._is_adopting:
            return True  # It was meant for another coordinator.
        if self._is_waiting or (view is not None and view != self.view.number):
            return True
        return rank >= self.view.size or self.view.workers[rank] in self._lost

    def _is_repeated_answer(self, event: Message) -> bool:
        """Returns whether an answer was received before and is not expected again."""
        worker = getattr(event, "worker", None)
        if worker is None or self._answered.get(worker) != event:
            return False
        return self._awaited is not type(event) or worker in self._answers

    @property
    def has_ended(self) -> bool:
        return self._ended

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
        self.members.set_step(self.view.workers[event.worker], event.step)
        self.history.tally.add(event.measured)
        if type(event) is StepsApplied:
            self._note_steps()
        self._send(pace.on_report(event, self._now))
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
            f"diverged: the loss is {loss} at step {event.step} of worker "
            f"{self.view.workers[event.worker]} "
            f"({event.reason}): lower the learning rate, add warm-up or clip gradients"
        )
        pace = self._pace
        if self._rollback_phase is None or pace is None or pace.drained:
            self._end("diverged", reason)
        elif self._decision is None or not self._decision.restore:
            self._apply_decision(self._roll_back(reason), pace)

    def _advance(self, step: Callable[[], object]) -> None:
        try:
            step()
        except StopIteration:
            assert self._ended, "the run's sequence ended without an end"
        except RunStopped as stop:
            self._ended = True
            self._actions.append(stop.end)
