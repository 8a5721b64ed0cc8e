"""The sequence of a run, from the first ready worker to its end.

Between two training intervals the run quiesces, and all workers receive the same requests: export,
evaluate, save, switch, continue. Each `yield` waits for the replies of all workers.
"""

import dataclasses
import math
from collections.abc import Generator, Mapping
from typing import Any

from paceline.errors import SpecError
from paceline.protocol.adaptive_batch import BatchAdapter
from paceline.protocol.block_plan import layout_fingerprint
from paceline.protocol.history import CoordinatorMemory, History
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
    Message,
    PhaseEntered,
    Quiesce,
    Quiesced,
    SaveCheckpoint,
    WorkerFinished,
    WorkerReady,
)
from paceline.protocol.pace import Pace, PaceContext, Send
from paceline.protocol.run_spec import (
    Action,
    EmitEvent,
    EndRun,
    PaceFactory,
    PolicyFactory,
    RunSpec,
    RunStopped,
    check_position,
)
from paceline.protocol.switch_policy import RunHorizon, SwitchDecision, SwitchPolicy
from paceline.protocol.throughput import TrainTotals
from paceline.specs.measurement_window import WINDOW_BATCHES
from paceline.specs.strategy import Strategy
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

MAX_DECISIONS = 500
"""Beyond this many, decisions to stay are no longer recorded."""

_Script = Generator[None, list[Any], None]


class RunSequence:
    """State and sequence of a run; `Coordinator` passes messages to it."""

    def __init__(
        self,
        plan: RunSpec,
        *,
        now: float,
        paces: PaceFactory,
        policies: PolicyFactory,
        memory: CoordinatorMemory | None = None,
    ) -> None:
        """`paces` and `policies` come from the registry, `memory` from a checkpoint."""
        self.plan = plan
        self._make_pace, self._make_policy = paces, policies
        self.history = History.from_plain(memory["history"]) if memory else History()
        # A run resumed with another strategy may have fewer phases than before.
        self.history.phase = min(self.history.phase, len(plan.strategy.phases) - 1)
        before = (memory.get("shards") if memory else None) or {"layout": None, "left": ()}
        self._layout_before: str | None = before["layout"]
        self._left = tuple((int(lo), int(hi)) for lo, hi in before["left"])
        self.members = Membership(plan.workers, now)
        self.totals: dict[int, Mapping[str, Any]] = {}
        self.final: dict[str, float | None] = {}
        self.notes: tuple[str, ...] = ()
        self._now = now
        self._actions: list[Action] = []
        self._servers: dict[int, tuple[str, int]] = {}
        self._awaited: type[Message] | None = WorkerReady
        self._answers: dict[int, Any] = {}
        self._answered: dict[int, Message] = {}
        """Last reply of each worker, to detect duplicates."""
        self._last_step: dict[int, int] = {}
        self._pace: Pace | None = None
        self._resumed: dict[int, float] = {}
        self._policy: SwitchPolicy
        self._probed: tuple[float, ...] = ()
        self._adapter: BatchAdapter | None = None
        self._decision: SwitchDecision | None = None
        self._rollback_phase: int | None = None
        """The phase whose state the workers keep during a trial switch."""
        self._has_best = False  # Workers keep the state of an epoch for the end of the run.
        self._ended = False
        self._sequence = self._run_sequence()
        next(self._sequence)

    def _record(self, decision: SwitchDecision | None) -> SwitchDecision | None:
        """Records a decision; returns it if it must be executed."""
        if decision is None:
            return None
        history = self.history
        changes = decision.restore or decision.exclude_worker is not None
        stays = decision.phase == history.phase and not changes
        last = history.decisions[-1].cause if history.decisions else None
        # A rule that stays decides so in every window; only the first is recorded.
        if not stays or (decision.cause != last and len(history.decisions) < MAX_DECISIONS):
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

    def _roll_back(self, reason: str) -> SwitchDecision:
        """Returns the decision to roll back, because the trial strategy degraded the weights."""
        assert self._rollback_phase is not None
        reason = f"{reason.partition(': lower')[0]}: continues from the weights before the switch"
        return SwitchDecision(self._rollback_phase, reason, "diverged", restore=True)

    def _run_sequence(self) -> _Script:
        facts = yield  # all workers and servers are ready
        ready: WorkerReady = facts[0]
        for other in facts[1:]:
            if dataclasses.replace(other, worker=0, speed=ready.speed, cv=ready.cv) != ready:
                raise RunStopped(
                    "failed",
                    f"worker {other.worker} has {other.samples} samples in batches of "
                    f"{other.batch}, but worker 0 has {ready.samples} in batches of {ready.batch}; "
                    "all workers must have the same data and batch size",
                )
        history = self.history
        self._probed = tuple(f.speed for f in facts)
        if self.plan.batch_rule is None or not history.batch:
            history.batch, history.lr_gain = ready.batch, 1.0
        if self.plan.batch_rule is not None:
            self._adapter = BatchAdapter(self.plan.batch_rule, history)
        horizon = RunHorizon(
            workers=self.plan.workers,
            samples_per_epoch=ready.samples,
            epochs=ready.epochs,
            batch=ready.batch,
            schedule=self.plan.schedule,
            speeds=self._probed,
            cv=math.sqrt(sum(f.cv**2 for f in facts) / len(facts)),
            exchange=ready.exchange,
            recalled=self.plan.recalled,
            validates="val" in ready.splits,
        )
        try:
            policy = self._policy = self._make_policy(self.plan.strategy, horizon)
        except SpecError as error:
            raise RunStopped("failed", str(error), usage=True) from None
        samples = ready.samples
        position = history.samples - history.epoch * samples
        check_position(history, ready, position, self._layout_before)
        ledger = Ledger(
            samples,
            epoch=history.epoch,
            position=position,
            layout=ready.layout,
            left=self._left if position else None,
        )
        last_saved = history.samples
        self.notes = ready.notes
        length = RunLengthKnown(t=self._event_time, epochs=ready.epochs, samples_per_epoch=samples)
        self._emit(dataclasses.replace(length, notes=ready.notes))
        ended = history.epoch and not position and self.plan.stop_reason(history, ready.epochs)
        # A run that is resumed at a switch point switches now.
        decision = None if ended else self._record(policy.decide(history))
        yield from self._enter(ready, ledger, decision)
        if ended:  # It was lost in its last evaluation, or while it saved the model.
            yield from self._ask_all_workers(Quiesce(0), Quiesced)
            yield from self._finish(ready)
            return
        while True:
            stop = self.plan.next_stop(
                history, ready, ledger.frontier, policy.next_stop(history), last_saved
            )
            yield from self._train(stop)
            epoch_ended = ledger.frontier == ready.samples
            assert self._pace is not None
            replies: list[Quiesced] = yield from self._ask_all_workers(
                Quiesce(self._pace.version), Quiesced
            )
            giving_up = self._decision is not None and self._decision.restore
            different = [r.worker for r in replies if r.checksum != replies[0].checksum]
            if different and not giving_up:
                raise RunStopped(
                    "failed",
                    f"replicas have diverged: worker {different[0]} and worker 0 hold different "
                    f"weights after {history.samples} samples",
                )
            if epoch_ended:
                yield from self._close_epoch(ready, replies[0].lr)
                history.epoch += 1
                ledger.begin_epoch(history.epoch)
                self._adapt_batch()
            if self._decision is not None and self._decision.restore:
                # Immediately, so that the current weights do not become a checkpoint or the result.
                yield from self._enter(ready, ledger, self._decision)
                self._decision = None
            reason = self.plan.stop_reason(history, ready.epochs) if epoch_ended else None
            if self.plan.checkpoint_due(history, epoch_ended, last_saved, reason):
                yield from self._save(ledger)
                last_saved = history.samples
            if reason is not None:
                break
            if epoch_ended:
                replies_to_end: list[EpochEndReply] = yield from self._ask_all_workers(
                    EpochEnd(history.epoch - 1, self._keep_state(), history.lr_gain), EpochEndReply
                )
                if len({w.more for w in replies_to_end}) > 1:
                    raise RunStopped(
                        "failed",
                        "training loops disagree: some workers finished, others requested "
                        "another epoch",
                    )
                if not replies_to_end[0].more:
                    break
            decision = self._decision or self._record(policy.decide(history))
            self._decision = None
            if decision is not None and decision.phase != history.phase:
                yield from self._enter(ready, ledger, decision)
        yield from self._conclude(ready, ledger)
        yield from self._finish(ready)

    def _adapt_batch(self) -> None:
        """Sets the batch of the next epoch, where it is adaptive."""
        if self._adapter is None or self._pace is None:
            return
        row = self._adapter.adapt(self.history, self._now, str(self._strategy()))
        if row is not None:
            self._pace.set_batch(self.history.batch)
            self.history.decisions.append(row)
            self._emit(SwitchDecided(t=self._event_time, row=row))

    def _keep_state(self) -> bool:
        """Returns whether workers keep the state of this epoch for the end of the run."""
        self._has_best |= (keep := self._policy.keeps_state(self.history))
        return keep

    def _conclude(self, ready: WorkerReady, ledger: Ledger) -> _Script:
        """Restores the kept state at the end of the run if the policy prefers it."""
        decision = self._record(self._policy.conclude(self.history))
        if decision is None or not self._has_best:
            return
        yield from self._enter(ready, ledger, decision)
        yield from self._ask_all_workers(Quiesce(0), Quiesced)  # Nothing was trained since.
        self.final["val_loss"], self.final["val_acc"] = yield from self._evaluate("val")

    def _train(self, stop: int) -> _Script:
        assert self._pace is not None
        began = self._now
        history = self.history
        idle = self._strategy().idle_workers(self.plan.workers) | history.excluded_workers
        least = WINDOW_BATCHES * history.batch
        history.throughput.begin(self.plan.workers, history.phase, self._now, idle, least)
        self._actions.extend(self._pace.run_to(stop, self._now))
        if not self._pace.drained:
            yield
        history.throughput.end(self._now)
        history.train_seconds += self._now - began

    def _enter(
        self, ready: WorkerReady, ledger: Ledger, decision: SwitchDecision | None
    ) -> _Script:
        """Starts the strategy of a phase on all workers."""
        history = self.history
        switching = decision is not None and history.samples > 0
        before, phase_before = self._strategy(), history.phase
        drain_s = self._pace.drain_s if self._pace is not None else 0.0
        if decision is not None:
            self._flush_switch()
            history.phase = decision.phase
            history.excluded_workers = set()
        strategy = self._strategy()
        needed = strategy.servers_for(self.plan.workers)
        servers = tuple(self._servers[i] for i in range(needed))
        windows = history.throughput.windows
        speeds = windows[-1].speeds if windows else self._probed
        groups = strategy.worker_groups(self.plan.workers, speeds)
        keep, restore, best = False, False, False
        if decision is not None:
            keep, best = decision.snapshot, decision.best
            restore = decision.restore and (best or self._rollback_phase is not None)
            self._rollback_phase = phase_before if keep else None
        question = EnterPhase(
            *(history.phase, servers, switching, groups, keep, restore, best, history.lr_gain)
        )
        yield from self._ask_all_workers(question, PhaseEntered)
        self._pace = self._make_pace(
            strategy,
            PaceContext(
                workers=self.plan.workers,
                batch=history.batch,
                ledger=ledger,
                history=history,
                clip=self.plan.clip if self.plan.clip is not None else ready.clip,
                groups=groups,
                speeds=speeds,
            ),
        )
        if decision is not None and switching:
            self._resumed = {}
            history.switches.append(
                SwitchRow(
                    samples=history.samples,
                    before=str(before),
                    after=str(strategy),
                    drain_s=round(drain_s, 6),
                    cause=decision.cause,
                    reason=decision.reason,
                )
            )
        self._emit(
            StrategyStarted(
                t=self._event_time,
                strategy=str(strategy),
                samples=history.samples,
                lr=strategy.lr_description(self.plan.workers),
            )
        )

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
        history.tally = TrainTotals()
        history.rows.append(row)
        self._emit(EpochEnded(t=self._event_time, row=row))
        if row.val_loss is not None and not math.isfinite(row.val_loss):
            # The last update corrupted the weights; they must not become a checkpoint.
            reason = (
                f"diverged: the loss is {row.val_loss} in the validation after epoch "
                f"{row.epoch} (step {self.members.last_step(0)} of worker 0): "
                "lower the learning rate, add warm-up or clip gradients"
            )
            if self._rollback_phase is None:
                raise RunStopped("diverged", reason)
            if self._decision is None or not self._decision.restore:
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
        if split == "val":
            self.history.val_rows = count
        # Workers without rows, or that left the reply to another, do not determine the classes.
        right = [p.correct for p in parts if p.count and p.correct is not None]
        return loss, sum(right) / count if right else None

    def _save(self, ledger: Ledger) -> _Script:
        name = f"{self.history.samples:012d}"
        memory: CoordinatorMemory = {"history": self.history.to_plain(), "elapsed_s": self._now}
        if ledger.layout is not None:
            memory["shards"] = {
                "layout": layout_fingerprint(ledger.layout),
                "left": [list(piece) for piece in ledger.remaining_rows()],
            }
        saved: list[CheckpointWritten] = yield from self._ask_all_workers(
            SaveCheckpoint(name, dict(memory)), CheckpointWritten
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

    def _strategy(self) -> Strategy:
        return self.plan.strategy.phases[self.history.phase]

    def _ask_all_workers(
        self, question: Message, answer: type[Message]
    ) -> Generator[None, list[Any], list[Any]]:
        self._awaited, self._answers = answer, {}
        self._actions.extend(Send(w, question) for w in range(self.plan.workers))
        return (yield)

    def _flush_switch(self) -> None:
        """Completes the row of the last switch with the pause of the slowest worker."""
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
