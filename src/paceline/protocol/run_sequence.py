"""The sequence of a run, from the first ready worker to its end.

Between two training intervals the run quiesces, and all workers receive the same requests: export,
evaluate, save, switch, continue. Each `yield` waits for the replies of all workers.
"""

import dataclasses
import math
from collections.abc import Mapping
from functools import partial
from typing import Any

from paceline.protocol.adaptive_batch import BatchAdapter
from paceline.protocol.block_plan import layout_fingerprint
from paceline.protocol.history import CoordinatorMemory, History
from paceline.protocol.journal import RESTARTED, RunPosition
from paceline.protocol.ledger import Ledger
from paceline.protocol.messages import (
    CheckpointWritten,
    Dismiss,
    EpochEnd,
    EpochEndReply,
    Evaluate,
    Evaluated,
    FinishRun,
    Quiesce,
    Quiesced,
    SaveCheckpoint,
    ShardSqNorm,
    WorkerFinished,
    WorkerReady,
)
from paceline.protocol.pace import Send, SendToServers
from paceline.protocol.phases import PhaseSequence
from paceline.protocol.recovery import Script, describe_difference, same_facts
from paceline.protocol.run_spec import (
    EndRun,
    PaceFactory,
    PolicyFactory,
    RunSpec,
    RunStopped,
    check_position,
)
from paceline.protocol.switch_policy import RunHorizon, SwitchDecision, SwitchPolicy
from paceline.protocol.throughput import TrainTotals
from paceline.protocol.view import MembershipView
from paceline.specs.measurement_window import WINDOW_BATCHES
from paceline.telemetry.events import (
    CheckpointSaved,
    DecisionRow,
    EpochEnded,
    EpochRow,
    RunLengthKnown,
    SwitchDecided,
)

MAX_DECISIONS = 500
"""Beyond this many, decisions to stay are no longer recorded."""


class RunSequence(PhaseSequence):
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
        super().__init__(plan, now)
        self._make_pace, self._make_policy = paces, policies
        self.history = History.from_plain(memory["history"]) if memory else History()
        # A run resumed with another strategy may have fewer phases than before.
        self.history.phase = min(self.history.phase, len(plan.strategy.phases) - 1)
        before = (memory.get("shards") if memory else None) or {"layout": None, "left": ()}
        self._layout_before: str | None = before["layout"]
        self._left = tuple((int(lo), int(hi)) for lo, hi in before["left"])
        self.totals: dict[int, Mapping[str, Any]] = {}
        self.final: dict[str, float | None] = {}
        self.notes: tuple[str, ...] = ()
        self._view_samples = self.history.samples
        self._last_saved = self.history.samples
        self._first_rows = {}
        self._policy: SwitchPolicy
        self._adapter: BatchAdapter | None = None
        self._decision: SwitchDecision | None = None
        self._rollback_phase = None
        """The phase whose state the workers keep during a trial switch."""
        self._has_best = False  # Workers keep the state of an epoch for the end of the run.
        self._ended = False
        self._is_adopting = False
        """True until the workers of another coordinator have returned."""
        self._early_norms: list[ShardSqNorm] = []
        """Norms that servers had reported to another coordinator."""
        self._adopted = memory.get("position") if memory else None
        if self._adopted is not None:
            self._adopt_view(self._adopted)
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

    def _run_sequence(self) -> Script[None]:
        facts = yield  # all workers and servers are ready
        ready: WorkerReady = facts[0]
        for other in facts[1:]:
            if not same_facts(other, ready):
                raise RunStopped("failed", describe_difference(other, ready))
        history = self.history
        self._speeds = {f.worker: f.speed for f in facts}
        if self.plan.batch_rule is None or not history.batch:
            history.batch, history.lr_gain = ready.batch, 1.0
        if self.plan.batch_rule is not None:
            self._adapter = BatchAdapter(self.plan.batch_rule, history)
        self._horizon = RunHorizon(
            workers=len(facts),  # Some may have been lost already.
            samples_per_epoch=ready.samples,
            epochs=ready.epochs,
            batch=ready.batch,
            schedule=self.plan.schedule,
            speeds=tuple(f.speed for f in facts),
            cv=math.sqrt(sum(f.cv**2 for f in facts) / len(facts)),
            exchange=next((f.exchange for f in facts if f.exchange is not None), None),
            recalled=self.plan.recalled,
            validates="val" in ready.splits,
        )
        self._make_new_policy()
        samples = ready.samples
        position = history.samples - history.epoch * samples
        check_position(history, ready, position, self._layout_before)
        adopted = self._adopted
        if adopted is not None:
            position = adopted.position
        ledger = self._ledger = Ledger(
            samples,
            epoch=history.epoch,
            position=position,
            layout=ready.layout,
            left=self._left if position or adopted is not None else None,
        )
        self.notes = ready.notes
        length = RunLengthKnown(t=self._event_time, epochs=ready.epochs, samples_per_epoch=samples)
        self._emit(dataclasses.replace(length, notes=ready.notes))
        self._facts = ready
        ended = history.epoch and not position and self.plan.stop_reason(history, ready.epochs)
        if adopted is not None:
            self._restore_interval(adopted)
            yield from self._regroup()
        # A run that is resumed at a switch point switches now.
        decision = None if ended else self._record(self._policy.decide(history))
        must_regroup = self._lost or self._joining or self.servers.lost or self._must_regroup
        if must_regroup and adopted is None:
            yield from self._regroup()
        if adopted is None or decision is not None:
            yield from self._enter(decision)
        if ended:  # It was lost in its last evaluation, or while it saved the model.
            yield from self._retrying(self._settle)
            yield from self._finish(ready)
            return
        while True:
            next_stop = self._policy.next_stop(history)
            stop = self.plan.next_stop(history, ready, ledger.frontier, next_stop, self._last_saved)
            replies = yield from self._retrying(partial(self._train_and_settle, stop))
            epoch_ended = ledger.frontier == ready.samples
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
                self._take_snapshot()
            if self._decision is not None and self._decision.restore:
                # Immediately, so that the current weights do not become a checkpoint or the result.
                yield from self._enter(self._decision)
                self._decision = None
            reason = self.plan.stop_reason(history, ready.epochs) if epoch_ended else None
            if self.plan.checkpoint_due(history, epoch_ended, self._last_saved, reason):
                yield from self._save(ledger)
                self._last_saved = history.samples
            if reason is not None:
                break
            if epoch_ended:
                question = EpochEnd(history.epoch - 1, self._keep_state(), history.lr_gain)
                replies_to_end: list[EpochEndReply] = yield from self._retrying(
                    partial(self._ask_all_workers, question, EpochEndReply)
                )
                if len({w.more for w in replies_to_end}) > 1:
                    raise RunStopped(
                        "failed",
                        "training loops disagree: some workers finished, others requested "
                        "another epoch",
                    )
                if not replies_to_end[0].more:
                    break
            decision = self._decision or self._record(self._policy.decide(history))
            self._decision = None
            if decision is not None and decision.phase != history.phase:
                yield from self._enter(decision)
        yield from self._conclude()
        yield from self._finish(ready)

    def _adopt_view(self, adopted: RunPosition) -> None:
        """Takes over the workers of another coordinator, for the next view."""
        self.view = MembershipView(adopted.view, adopted.members, adopted.servers)
        self.servers.holding = None if adopted.entering else frozenset(adopted.holding)
        self._is_adopting = True
        self.members.replace(adopted.members, self._now)
        self._view_samples, self._last_saved = adopted.view_samples, adopted.last_saved
        self._rollback_phase, self._has_best = adopted.rollback_phase, adopted.has_best
        self._entering = adopted.entering
        self._begin_change()
        self._reasons.append(RESTARTED)

    def _restore_interval(self, adopted: RunPosition) -> None:
        """Continues where the other coordinator was, with all of its work taken back."""
        strategy = self._strategy()
        self._is_adopting = False
        self._ledger.restore(adopted.done, adopted.planned)
        self._interrupt_others()
        if adopted.entering:
            return
        self._pace = self._make_pace_of_view(
            strategy.worker_groups(self.view.size, self._rank_speeds), adopted.loaded_view
        )
        self._pace.version = adopted.version
        servers = strategy.servers_for(self.plan.workers)
        # Only what a server lacks: a repeated order could reach it after the next import of state.
        self._actions.extend(
            SendToServers(servers, order, holders=(holder,))
            for holder in self._holders(servers)
            for order in adopted.orders
            if order.version > self.servers.version_of(holder)
        )
        for norm in self._early_norms:
            self._send(self._pace.on_report(norm, self._now))

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

    def _conclude(self) -> Script[None]:
        """Restores the kept state at the end of the run if the policy prefers it."""
        decision = self._record(self._policy.conclude(self.history))
        if decision is None or not self._has_best:
            return
        yield from self._enter(decision)
        yield from self._retrying(self._settle)  # Nothing was trained since.
        self.final["val_loss"], self.final["val_acc"] = yield from self._evaluate("val")

    def _train_and_settle(self, stop: int) -> Script[list[Quiesced]]:
        if self._ledger.frontier < stop:
            yield from self._train(stop)
        if self._lost or self.servers.lost:
            yield from self._regroup()  # Settling needs all workers of the view.
        replies = yield from self._settle()
        if self._joining or self._departing() or self.servers.joining:
            yield from self._regroup()
        return replies

    def _settle(self) -> Script[list[Quiesced]]:
        assert self._pace is not None
        question = Quiesce(self._pace.version, self.history.samples)
        return (yield from self._ask_all_workers(question, Quiesced))

    def _train(self, stop: int) -> Script[None]:
        assert self._pace is not None
        began = self._now
        history = self.history
        idle = self._strategy().idle_workers(self.view.size) | history.excluded_workers
        least = WINDOW_BATCHES * history.batch
        history.throughput.begin(self.view.size, history.phase, self._now, idle, least)
        self._take_snapshot(training=True)
        self._send(self._pace.run_to(stop, self._now))
        if self._joining or self._departing():
            self._stop_early()
        if not self._pace.drained:
            yield
        history.throughput.end(self._now)
        history.train_seconds += self._now - began

    def _close_epoch(self, ready: WorkerReady, lr: float) -> Script[None]:
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

    def _evaluate(self, split: str) -> Script[tuple[float | None, float | None]]:
        parts: list[Evaluated] = yield from self._retrying(
            lambda: self._ask_all_workers(Evaluate(split), Evaluated)
        )
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

    def _save(self, ledger: Ledger) -> Script[None]:
        name = f"{self.history.samples:012d}"
        memory: CoordinatorMemory = {"history": self.history.to_plain(), "elapsed_s": self._now}
        if ledger.layout is not None:
            memory["shards"] = {
                "layout": layout_fingerprint(ledger.layout),
                "left": [list(piece) for piece in ledger.remaining_rows()],
            }
        saved: list[CheckpointWritten] = yield from self._retrying(
            lambda: self._ask_all_workers(SaveCheckpoint(name, dict(memory)), CheckpointWritten)
        )
        self._emit(
            CheckpointSaved(t=self._event_time, samples=self.history.samples, path=saved[0].path)
        )

    def _finish(self, ready: WorkerReady) -> Script[None]:
        if "test" in ready.splits:
            self.final["test_loss"], self.final["test_acc"] = yield from self._evaluate("test")
        ended: list[WorkerFinished] = yield from self._retrying(
            lambda: self._ask_all_workers(FinishRun(self.plan.save_model), WorkerFinished)
        )
        self._actions.extend(Send(w, Dismiss()) for w in self.view.workers)
        self.totals = {self.view.workers[f.worker]: f.totals for f in ended}
        self._flush_switch()
        self._end("done", None)

    def _end(self, status: str, error: str | None, *, usage: bool = False) -> None:
        self._ended = True
        self._actions.append(EndRun(status, error, usage))
