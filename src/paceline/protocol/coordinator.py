"""The coordinator: one object that decides for the whole run.

Reports of workers and servers come in with the time they came at; actions go out. Between two
stretches of training the run quiesces, and the coordinator leads all workers through the same
sequence of questions (`_conduct`): export, evaluate, save, switch, go on.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from typing import Any

from paceline.errors import SpecError
from paceline.protocol.block_plan import layout_fingerprint, layout_to_checkpoint
from paceline.protocol.history import EpochTotals, History
from paceline.protocol.ledger import Ledger
from paceline.protocol.membership import Membership
from paceline.protocol.messages import (
    CheckpointWritten,
    EnterPhase,
    EpochEnd,
    EpochEndReply,
    Evaluate,
    Evaluated,
    FinishRun,
    GradientPushed,
    Heartbeat,
    LossDiverged,
    Message,
    PhaseEntered,
    Quiesce,
    Quiesced,
    SaveCheckpoint,
    ServerReady,
    ShardSqNorm,
    StepsApplied,
    TrainingResumed,
    WorkerFinished,
    WorkerReady,
)
from paceline.protocol.pace import OutgoingMessage, Pace, PaceContext, Send
from paceline.protocol.switch_policy import NeverSwitch, RunHorizon, SwitchDecision, SwitchPolicy
from paceline.specs.schedule import Constant, Schedule
from paceline.specs.stop_condition import StopCondition
from paceline.specs.strategy import Strategy, WorkerGroups
from paceline.telemetry.events import (
    CheckpointSaved,
    DecisionRow,
    EpochEnded,
    EpochRow,
    Event,
    RunLengthKnown,
    StrategyStarted,
    StrategySwitched,
    SwitchDecided,
    SwitchRow,
)

WINDOW_BATCHES = 8
"""A window of the pulse holds at least so many global batches."""
MOST_DECISIONS = 500
"""Beyond so many, decisions to stay are no longer written down."""


@dataclass(frozen=True, kw_only=True)
class RunSpec:
    """What the coordinator is told before the run; the rest it learns from the workers."""

    strategy: Strategy
    workers: int
    clip: float | None = None
    until: StopCondition | None = None
    patience: int | None = None
    checkpoint_epochs: int | None = None
    checkpoint_samples: int | None = None
    schedule: Schedule = field(default_factory=Constant)
    custom_loop: bool = False
    save_model: bool = True

    @property
    def servers(self) -> int:
        return self.strategy.servers_for(self.workers)


@dataclass(frozen=True)
class EmitEvent:
    """An event to append to run.jsonl and to display."""

    event: Event


@dataclass(frozen=True)
class EndRun:
    status: str
    error: str | None = None
    usage: bool = False
    """The user's mistake, which showed only when the data was known."""


Action = OutgoingMessage | EmitEvent | EndRun
PaceFactory = Callable[[Strategy, PaceContext], Pace]
PolicyFactory = Callable[[Strategy, RunHorizon], SwitchPolicy]
_Script = Generator[None, list[Any], None]


_TRAINING = (GradientPushed, StepsApplied)


class Coordinator:
    """Events in through `handle`, actions out; `history` can be read at any time."""

    def __init__(
        self,
        plan: RunSpec,
        *,
        now: float,
        paces: PaceFactory,
        policies: PolicyFactory,
        memory: dict[str, Any] | None = None,
    ) -> None:
        """`paces` and `policies` are the registry's; `memory` is what a checkpoint remembers."""
        self.plan = plan
        self._make_pace = paces
        self._make_policy = policies
        self.history = History.from_plain(memory["history"]) if memory else History()
        # A run resumed with another strategy may have fewer phases than it had.
        self.history.phase = min(self.history.phase, len(plan.strategy.phases) - 1)
        before = (memory or {}).get("shards") or {"layout": None, "left": ()}
        self._layout_before: str | None = before["layout"]
        self._left = tuple((int(lo), int(hi)) for lo, hi in before["left"])
        self.members = Membership(plan.workers, now)
        self.totals: dict[int, dict[str, Any]] = {}
        self.final: dict[str, float | None] = {}
        self._now = now
        self._actions: list[Action] = []
        self._servers: dict[int, tuple[str, int]] = {}
        self._awaited: type[Message] | None = WorkerReady
        self._answers: dict[int, Any] = {}
        self._answered: dict[int, Message] = {}
        """Each worker's last answer: one that comes a second time is no new one."""
        self._last_step: dict[int, int] = {}
        self._pace: Pace | None = None
        self._resumed: dict[int, float] = {}
        self._policy: SwitchPolicy = NeverSwitch()
        self._probed: tuple[float, ...] = ()
        self._batch = 0
        self._decision: SwitchDecision | None = None
        self._rollback_phase: int | None = None
        """The phase whose state the workers keep, while a switch is on trial."""
        self._ended = False
        self._sequence = self._run_sequence()
        next(self._sequence)

    def handle(self, event: Message, now: float) -> list[Action]:
        """Take one report; what comes back is to be carried out in this order."""
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
            # Servers may still be at the last update when the workers have drained.
            assert self._pace is not None
            self._actions.extend(self._pace.on_report(event, now))
        elif isinstance(event, LossDiverged):
            self._on_diverging(event)
        elif isinstance(event, TrainingResumed):
            self._on_resumed(event)
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
            self._end("failed", f"an unexpected {type(event).__name__} message from a worker")
        return self._actions

    def _is_repeated_answer(self, event: Message) -> bool:
        """An answer that was heard before and is not asked for again."""
        worker = getattr(event, "worker", None)
        if worker is None or self._answered.get(worker) != event:
            return False
        return self._awaited is not type(event) or worker in self._answers

    def stop(self, status: str, error: str) -> list[Action]:
        """The shell saw a process go away, a deadline pass or the user interrupt."""
        self._actions = []
        self._end(status, error)
        return self._actions

    # ---- training: the hot path ---------------------------------------------------------------

    def _is_repeated(self, event: StepsApplied | GradientPushed) -> bool:
        """Heard before, and come again late: it must not be counted twice."""
        # A push names the step it came from; planned work says how many are done.
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
            self._end("failed", f"a {type(event).__name__} message while no work was handed out")
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
        """A rule has decided in the middle of a stretch of work."""
        decision = self._record(decision)
        if decision is None:
            return
        if decision.exclude_worker is not None:
            pace.exclude_worker(decision.exclude_worker)
            self.history.excluded_workers.add(decision.exclude_worker)
            self.history.throughput.leave_out(decision.exclude_worker)
        else:
            self._decision = decision
            pace.stop_early()

    def _record(self, decision: SwitchDecision | None) -> SwitchDecision | None:
        """Write a decision down; what comes back is there to be carried out."""
        if decision is None:
            return None
        history = self.history
        stays = decision.phase == history.phase and decision.exclude_worker is None
        last = history.decisions[-1].cause if history.decisions else None
        # A rule that stays says so at every window: once is enough.
        if not stays or (decision.cause != last and len(history.decisions) < MOST_DECISIONS):
            row = DecisionRow(
                samples=history.samples,
                seconds=self._now,
                strategy=str(self._strategy()),
                chosen=str(self.plan.strategy.phases[decision.phase]),
                cause=decision.cause,
                reason=decision.reason,
                figures=dict(decision.measurements),
            )
            history.decisions.append(row)
            self._emit(SwitchDecided(t=self._event_time, row=row))
        return None if stays else decision

    def _on_diverging(self, event: LossDiverged) -> None:
        reason = self._describe_divergence(event)
        pace = self._pace
        if self._rollback_phase is None or pace is None or pace.drained:
            self._end("diverged", reason)
        elif self._decision is None or not self._decision.restore:
            self._apply_decision(self._roll_back(reason), pace)

    def _roll_back(self, reason: str) -> SwitchDecision:
        """The strategy on trial has spoilt the weights."""
        assert self._rollback_phase is not None
        reason = f"{reason.partition(': lower')[0]}: goes on from the weights before the switch"
        return SwitchDecision(self._rollback_phase, reason, "diverged", restore=True)

    # ---- the sequence of a run ----------------------------------------------------------------

    def _run_sequence(self) -> _Script:
        facts = yield  # every worker is ready, every server listens
        ready: WorkerReady = facts[0]
        for other in facts[1:]:
            if dataclasses.replace(other, worker=0, speed=ready.speed) != ready:
                self._end(
                    "failed",
                    f"worker {other.worker} has {other.samples} samples in batches of "
                    f"{other.batch}, worker 0 {ready.samples} in batches of {ready.batch}: "
                    "every worker needs the same data and batch",
                )
                return
        history = self.history
        self._probed = tuple(f.speed for f in facts)
        self._batch = ready.batch
        try:
            policy = self._policy = self._make_policy(
                self.plan.strategy,
                RunHorizon(
                    workers=self.plan.workers,
                    samples_per_epoch=ready.samples,
                    epochs=ready.epochs,
                    batch=ready.batch,
                    schedule=self.plan.schedule,
                ),
            )
        except SpecError as error:
            self._end("failed", str(error), usage=True)
            return
        position = history.samples - history.epoch * ready.samples
        if not 0 <= position <= ready.samples:
            self._end(
                "failed",
                f"the checkpoint was made after {history.samples} samples in {history.epoch} "
                f"epochs, which does not fit {ready.samples} samples an epoch: the data changed",
                usage=True,
            )
            return
        why = self._resume_error(ready, position)
        if why is not None:
            self._end("failed", why, usage=True)
            return
        ledger = Ledger(
            ready.samples,
            epoch=history.epoch,
            position=position,
            layout=ready.layout,
            left=self._left if position else None,
        )
        last_saved = history.samples
        self._emit(
            RunLengthKnown(t=self._event_time, epochs=ready.epochs, samples_per_epoch=ready.samples)
        )
        # A run resumed right at a switch point switches now.
        yield from self._enter(ready, ledger, self._record(policy.decide(history)))

        while True:
            stop = self._next_stop(ready, ledger, policy.next_stop(history), last_saved)
            yield from self._train(ledger, stop)
            epoch_ended = ledger.frontier == ready.samples
            replies: list[Quiesced] = yield from self._ask_all_workers(
                Quiesce(self._pace_version()), Quiesced
            )
            giving_up = self._decision is not None and self._decision.restore
            if not giving_up and not self._check_replicas(replies):
                return
            if epoch_ended:
                yield from self._close_epoch(ready, replies[0].lr)
                if self._ended:
                    return
                history.epoch += 1
                ledger.begin_epoch(history.epoch)
            if self._decision is not None and self._decision.restore:
                # At once: what there is now must not become a checkpoint or the result.
                yield from self._enter(ready, ledger, self._decision)
                self._decision = None
            reason = self._stop_reason(ready) if epoch_ended else None
            if self._checkpoint_due(ready, epoch_ended, last_saved, reason):
                yield from self._save(ledger)
                last_saved = history.samples
            if reason is not None:
                break
            if epoch_ended:
                wishes: list[EpochEndReply] = yield from self._ask_all_workers(
                    EpochEnd(history.epoch - 1), EpochEndReply
                )
                if len({w.more for w in wishes}) > 1:
                    self._end("failed", "some workers' loops ended, others want another epoch")
                    return
                if not wishes[0].more:
                    reason = "the loop ended"
                    break
            decision = self._decision or self._record(policy.decide(history))
            self._decision = None
            if decision is not None and decision.phase != history.phase:
                yield from self._enter(ready, ledger, decision)
        yield from self._finish(ready)

    def _train(self, ledger: Ledger, stop: int) -> _Script:
        assert self._pace is not None
        began = self._now
        history = self.history
        history.throughput.begin(
            self.plan.workers,
            history.phase,
            self._now,
            self._idle_workers(),
            least=WINDOW_BATCHES * self._batch,
        )
        self._actions.extend(self._pace.run_to(stop, self._now))
        if not self._pace.drained:
            yield
        history.throughput.end(self._now)
        history.train_seconds += self._now - began

    def _idle_workers(self) -> frozenset[int]:
        """Workers that compute nothing now: by the active strategy, or because they were slow."""
        idle = self._strategy().idle_workers(self.plan.workers)
        return idle | frozenset(self.history.excluded_workers)

    def _enter(
        self, ready: WorkerReady, ledger: Ledger, decision: SwitchDecision | None
    ) -> _Script:
        """Bring the strategy of a phase into force on all workers."""
        history = self.history
        before, phase_before = self._strategy(), history.phase
        drain_s = self._pace.drain_s if self._pace is not None else 0.0
        if decision is not None:
            self._flush_switch()
            history.phase = decision.phase
            history.excluded_workers = set()
        strategy = self._strategy()
        needed = strategy.servers_for(self.plan.workers)
        servers = tuple(self._servers[i] for i in range(needed))
        groups = self._divide(strategy)
        keep, restore = False, False
        if decision is not None:
            keep, restore = decision.snapshot, decision.restore and self._rollback_phase is not None
            self._rollback_phase = phase_before if keep else None
        question = EnterPhase(history.phase, servers, decision is not None, groups, keep, restore)
        yield from self._ask_all_workers(question, PhaseEntered)
        self._pace = self._make_pace(
            strategy,
            PaceContext(
                workers=self.plan.workers,
                batch=ready.batch,
                ledger=ledger,
                history=history,
                clip=self.plan.clip if self.plan.clip is not None else ready.clip,
                groups=groups,
            ),
        )
        if decision is not None:
            self._resumed = {}
            row = SwitchRow(
                samples=history.samples,
                before=str(before),
                after=str(strategy),
                drain_s=round(drain_s, 6),
                cause=decision.cause,
                reason=decision.reason,
            )
            history.switches.append(row)
        self._emit(
            StrategyStarted(
                t=self._event_time,
                strategy=str(strategy),
                samples=history.samples,
                lr=strategy.lr_description(self.plan.workers),
            )
        )

    def _divide(self, strategy: Strategy) -> WorkerGroups:
        windows = self.history.throughput.windows
        speeds = windows[-1].speeds if windows else self._probed
        return strategy.worker_groups(self.plan.workers, speeds)

    def _close_epoch(self, ready: WorkerReady, lr: float) -> _Script:
        history = self.history
        val_loss, val_acc = None, None
        if "val" in ready.splits:
            val_loss, val_acc = yield from self._evaluate("val")
        row = EpochRow(
            epoch=history.epoch + 1,
            seconds=self._now,
            samples=history.samples,
            updates=history.updates,
            lr=lr,
            train_loss=history.tally.loss,
            train_acc=history.tally.accuracy,
            val_loss=val_loss,
            val_acc=val_acc,
        )
        history.tally = EpochTotals()
        history.rows.append(row)
        self._emit(EpochEnded(t=self._event_time, row=row))
        if row.val_loss is not None and not math.isfinite(row.val_loss):
            # The last update ruined the weights: they must not become a checkpoint.
            reason = (
                f"diverged: the loss is {row.val_loss} in the validation after epoch "
                f"{row.epoch} (step {self.members.last_step(0)} of worker 0): "
                "lower the learning rate, add warm-up or clip gradients"
            )
            if self._rollback_phase is None:
                self._end("diverged", reason)
            elif self._decision is None or not self._decision.restore:
                self._decision = self._record(self._roll_back(reason))

    def _evaluate(
        self, split: str
    ) -> Generator[None, list[Any], tuple[float | None, float | None]]:
        parts: list[Evaluated] = yield from self._ask_all_workers(Evaluate(split), Evaluated)
        count = sum(p.count for p in parts)
        losses = [p.loss_sum for p in parts if p.loss_sum is not None]
        if len(losses) < len(parts):
            return None, None
        loss = sum(losses) / count
        # Who had no rows, or left the answer to another, has no say in whether there are classes.
        right = [p.correct for p in parts if p.count and p.correct is not None]
        return loss, sum(right) / count if right else None

    def _resume_error(self, ready: WorkerReady, position: int) -> str | None:
        """In the middle of an epoch only who reads in the same blocks knows what is left of it."""
        now = layout_fingerprint(ready.layout) if ready.layout is not None else None
        if not position or now == self._layout_before:
            return None
        return (
            f"the checkpoint was made in the middle of an epoch, after {position} samples of it, "
            "with data divided otherwise: resume with the same files, --shard, --shuffle and "
            "--memory"
        )

    def _save(self, ledger: Ledger) -> _Script:
        name = f"{self.history.samples:012d}"
        memory = {"history": self.history.to_plain(), "elapsed_s": self._now}
        if ledger.layout is not None:
            memory["shards"] = layout_to_checkpoint(ledger.layout, ledger.remaining_rows())
        saved: list[CheckpointWritten] = yield from self._ask_all_workers(
            SaveCheckpoint(name, memory), CheckpointWritten
        )
        self._emit(
            CheckpointSaved(t=self._event_time, samples=self.history.samples, path=saved[0].path)
        )

    def _finish(self, ready: WorkerReady) -> _Script:
        if "test" in ready.splits:
            self.final["test_loss"], self.final["test_acc"] = yield from self._evaluate("test")
        ended: list[WorkerFinished] = yield from self._ask_all_workers(
            FinishRun(self.plan.save_model), WorkerFinished
        )
        self.totals = {f.worker: f.totals for f in ended}
        self._flush_switch()
        self._end("done", None)

    # ---- decisions ----------------------------------------------------------------------------

    def _next_stop(
        self, ready: WorkerReady, ledger: Ledger, switch_at: int | None, last_saved: int
    ) -> int:
        """The position of this epoch to run to: always the end of a global batch."""
        epoch_start = self.history.epoch * ready.samples
        stops = [ready.samples]
        if switch_at is not None:
            stops.append(switch_at - epoch_start)
        if self.plan.checkpoint_samples is not None:
            stops.append(last_saved + self.plan.checkpoint_samples - epoch_start)
        stop = max(min(stops), ledger.frontier + 1)
        return min(ready.samples, -(-stop // ready.batch) * ready.batch)

    def _checkpoint_due(
        self, ready: WorkerReady, epoch_ended: bool, last_saved: int, ending: str | None
    ) -> bool:
        plan = self.plan
        if ending is not None:
            return bool(plan.checkpoint_samples or plan.checkpoint_epochs)
        if plan.checkpoint_samples is not None:
            return self.history.samples - last_saved >= plan.checkpoint_samples
        every = plan.checkpoint_epochs
        return bool(every and epoch_ended and self.history.epoch % every == 0)

    def _stop_reason(self, ready: WorkerReady) -> str | None:
        history, plan = self.history, self.plan
        if plan.until is not None and plan.until.is_met(history.value_of(plan.until.metric)):
            return f"until {plan.until}"
        if plan.patience is not None:
            best = history.best_row_index("val_loss", lower_is_better=True)
            if best is not None and len(history.rows) - 1 - best >= plan.patience:
                return f"no better val_loss for {plan.patience} epochs"
        if ready.epochs is not None and not plan.custom_loop and history.epoch >= ready.epochs:
            return f"{ready.epochs} epochs"
        return None

    def _check_replicas(self, replies: list[Quiesced]) -> bool:
        odd = [r.worker for r in replies if r.checksum != replies[0].checksum]
        if odd:
            self._end(
                "failed",
                f"replicas differ: worker {odd[0]} holds other weights than worker 0 "
                f"after {self.history.samples} samples",
            )
        return not odd

    def _describe_divergence(self, event: LossDiverged) -> str:
        loss = "NaN" if math.isnan(event.loss) else f"{event.loss:g}"
        return (
            f"diverged: the loss is {loss} at step {event.step} of worker {event.worker} "
            f"({event.reason}): lower the learning rate, add warm-up or clip gradients"
        )

    # ---- plumbing -----------------------------------------------------------------------------

    def _strategy(self) -> Strategy:
        return self.plan.strategy.phases[self.history.phase]

    def _pace_version(self) -> int:
        return self._pace.version if self._pace is not None else 0

    def _ask_all_workers(
        self, question: Message, answer: type[Message]
    ) -> Generator[None, list[Any], list[Any]]:
        self._awaited, self._answers = answer, {}
        self._actions.extend(Send(w, question) for w in range(self.plan.workers))
        replies = yield
        return replies

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

    def _on_resumed(self, event: TrainingResumed) -> None:
        self._resumed[event.worker] = event.pause_s
        if len(self._resumed) == self.plan.workers:
            self._flush_switch()

    def _flush_switch(self) -> None:
        """Complete the row of the last switch with the slowest worker's pause."""
        if self._resumed and self.history.switches:
            pause_s = round(max(self._resumed.values()), 6)
            row = dataclasses.replace(self.history.switches[-1], pause_s=pause_s)
            self.history.switches[-1] = row
            self._resumed = {}
            self._emit(StrategySwitched(t=self._event_time, row=row))

    @property
    def _event_time(self) -> float:
        return round(self._now, 6)

    def _emit(self, event: Event) -> None:
        self._actions.append(EmitEvent(event))

    def _end(self, status: str, error: str | None, *, usage: bool = False) -> None:
        self._ended = True
        self._actions.append(EndRun(status, error, usage))
