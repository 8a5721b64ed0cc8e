"""Worker side of the protocol with the coordinator.

A training loop iterates over `CoordinatorClient.steps()` and calls `begin` and `finish` around
each step. Between steps the client synchronizes, evaluates, saves and changes the strategy, as
the coordinator requests.
"""

from __future__ import annotations

import dataclasses
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from paceline.errors import Diverged, PacelineError, UsageError
from paceline.protocol.block_plan import take_rows
from paceline.protocol.divergence import DivergenceDetector
from paceline.protocol.messages import (
    CheckpointWritten,
    Dismiss,
    EnterPhase,
    EpochEnd,
    EpochEndReply,
    Evaluate,
    Evaluated,
    FinishRun,
    FormGroup,
    Lease,
    LeaseGranted,
    LossDiverged,
    Message,
    PhaseEntered,
    PlannedSteps,
    Quiesce,
    Quiesced,
    Regroup,
    SaveCheckpoint,
    StepsApplied,
    StepStats,
    TrainingResumed,
    WorkerFinished,
)
from paceline.state import Section, TrainState, copy_section
from paceline.strategies.registry import make_runner
from paceline.strategies.runner import (
    INNER_PREFIX,
    CommReport,
    PhaseContext,
    Runner,
    TrainStep,
    add_stats,
)
from paceline.telemetry.phase_clock import (
    BACKWARD,
    COMM,
    EVAL,
    EVALUATE,
    FORWARD,
    INPUT,
    OTHER,
    SAVE,
    SWITCH,
    TRAIN,
    WAIT,
)
from paceline.telemetry.step_recorder import StepRecorder
from paceline.worker.process_settings import trim_malloc
from paceline.worker.run_files import peak_rss_bytes
from paceline.worker.session import Session
from paceline.worker.view_member import ViewMember

if TYPE_CHECKING:
    from paceline.worker.evaluation import EvalShard, Predict

REPORT_S = 0.5


@dataclass(frozen=True, kw_only=True)
class LoopHooks:
    """Callbacks of a training loop, each optional."""

    evaluate: Callable[[str, EvalShard, Predict], tuple[float, int | None, int]] | None = None
    """Returns the sum of losses, correct predictions and predictions on a share of a split."""
    on_leases_known: Callable[[list[Lease]], None] = lambda leases: None
    """Receives leases well before their steps begin, to prefetch their rows."""
    on_quiesce: Callable[[], None] = lambda: None
    """Called when no more steps come until the coordinator continues."""
    input_stats: Callable[[], dict[str, Any]] = dict
    """Returns the totals of the input pipeline, for the worker's report."""


class CoordinatorClient(ViewMember):
    """Handles the coordinator's messages, from the first EnterPhase to FinishRun."""

    def __init__(
        self, session: Session, state: TrainState, hooks: LoopHooks, *, samples_per_epoch: int
    ) -> None:
        """Trains from `state`; restores this worker's random state with it."""
        super().__init__(session, state)
        self._clock, self._stages = session.clock, session.stages
        self._slowdown, self._hooks = session.slowdown, hooks
        self._samples_per_epoch = samples_per_epoch
        if session.rank < len(state.workers):
            own = self._local_state = state.workers[session.rank]
            torch.set_rng_state(own.tensors["rng/torch"])
            self.step = int(own.plain["step"])
        self._recorder = StepRecorder(
            session.files.events if session.assignment.telemetry else None,
            self._clock,
            self.step,
            session.counters,
        )
        self._report_due = 0.0
        self._settle_s = 0.0
        self._entered_at: float | None = None
        self._losses = DivergenceDetector()
        self._bytes = Counter(bytes_sent=0, bytes_before=0, bytes_received=0)
        self._diverged = False
        self._part: dict[str, object] | None = None
        self._comm_report: CommReport | None = None
        self._optimizer_path: str | None = None
        self._times_ns = (0, 0)
        self.lr_gain = 1.0
        """Factor of the learning rate because of an adapted batch."""
        self._finished = False
        self._between_epochs = False
        self._strategy_text = ""
        self._stages.enter(TRAIN)

    @property
    def runner(self) -> Runner:
        """The runner of the current phase."""
        assert self._runner is not None
        return self._runner

    # ---- the loop's side ----------------------------------------------------------------------

    def steps(self) -> Iterator[TrainStep | EpochEnd]:
        """Yields one TrainStep per lease, and EpochEnd between epochs.

        Iterating further after EpochEnd asks for another epoch.
        """
        while not self._finished:
            self._clock.enter(WAIT)
            message = self._control.receive()
            self._clock.enter(OTHER)
            if self._interrupted and not isinstance(message, Regroup | Dismiss):
                continue  # It belongs to the view that has ended.
            if self._is_fresh and isinstance(message, PlannedSteps | LeaseGranted | Quiesce):
                self._is_fresh, self._state = False, None
            if isinstance(message, PlannedSteps):
                yield from self._planned_steps(message)
            elif isinstance(message, LeaseGranted):
                self._recorder.note_staleness(message.staleness)
                yield TrainStep(message.lease, self.step, message.version)
            elif isinstance(message, EpochEnd):
                self.lr_gain = message.lr_gain
                if message.keep:
                    self._keep_state()
                self._between_epochs = True
                yield message
                self._between_epochs = False
                self._control.send(EpochEndReply(self._rank, more=True))
            else:
                with self.interruptible():
                    self._handle(message)

    def finish_custom_loop(self) -> None:
        """Reports the end of a custom training loop, and handles messages until the run ends."""
        if self._finished:
            return
        if not self._between_epochs:
            raise UsageError(
                "the loop ended in the middle of an epoch; iterate the loader to its end"
            )
        self._control.send(EpochEndReply(self._rank, more=False))
        for _ in self.steps():
            raise PacelineError("received a lease after the loop had ended")

    def begin(self, work: TrainStep) -> None:
        """Prepares the weights; the forward pass comes next."""
        self.runner.begin_step(work)
        if self._entered_at is not None:
            pause_s = self._settle_s + time.perf_counter() - self._entered_at
            self._control.send(TrainingResumed(self._rank, pause_s))
            self._entered_at = None
        if self._slowdown is not None:
            self._slowdown.begin_step(work.lease.epoch + work.lease.start / self._samples_per_epoch)

    def finish(self, work: TrainStep, measured: StepStats) -> None:
        """Exchanges gradients, updates the weights, and records the step."""
        runner = self.runner
        if self._slowdown is not None:
            self._slowdown.apply()
        self._clock.enter(OTHER)
        busy_s, comm_s = self._times_since()
        work.measured = dataclasses.replace(
            measured,
            busy_s=busy_s,
            comm_s=comm_s,
            norms=runner.pop_grad_norms(),
            steps=1 if work.lease.samples else 0,
            busy_square_s2=busy_s**2,
        )
        loss = None
        if measured.loss_sum is not None and measured.samples:
            loss = measured.loss_sum / measured.samples
            self._check_loss(loss)
        if self._diverged and not runner.communicates_in_backward:
            # The trial will be rolled back; until then this worker changes nothing.
            self._context.replica.optimizer.zero_grad(set_to_none=False)
        runner.finish_step(work)
        self._clock.enter(OTHER)
        self.step += 1
        self._samples_since_settle += work.lease.samples
        self._recorder.step_done(work.lease, loss, runner.pop_overlapped_us())

    def _planned_steps(self, plan: PlannedSteps) -> Iterator[TrainStep]:
        leases = self._cut_leases(plan)
        self._hooks.on_leases_known([lease for lease in leases if lease.samples])
        total = StepStats(0, 0, 0.0, 0)
        for lease in leases:
            if self._context.group.aborted:
                return  # The view has ended.
            work = TrainStep(lease, self.step)
            yield work
            if self._interrupted:
                return
            self._note_step(lease.epoch * self._samples_per_epoch + lease.stop)
            total = add_stats(total, work.measured)
            if lease.stop == plan.stop or time.monotonic() >= self._report_due:
                done = StepsApplied(self._rank, plan.epoch, lease.stop, self.step, total)
                self._control.send(done)
                total = StepStats(0, 0, 0.0, 0)
                self._report_due = time.monotonic() + REPORT_S

    def _cut_leases(self, plan: PlannedSteps) -> list[Lease]:
        """Returns this worker's share of every batch of a plan."""
        rows = deque(plan.pieces)
        leases = []
        for start in range(plan.start, plan.stop, plan.batch):
            stop = min(start + plan.batch, plan.stop)
            cuts = self.runner.cut_batch(stop - start, plan.batch_weights)
            lo, hi = start + cuts[self._rank], start + cuts[self._rank + 1]
            pieces = take_rows(rows, hi - lo) if plan.pieces else ()
            leases.append(Lease(0, plan.epoch, start, stop, lo, hi, pieces, plan.ahead))
        return leases

    def _times_since(self) -> tuple[float, float]:
        """Returns seconds of compute and communication since the last call."""
        total_ns = self._clock.total_ns
        busy_ns = total_ns[INPUT] + total_ns[FORWARD] + total_ns[BACKWARD]
        now = (busy_ns, total_ns[COMM])
        before, self._times_ns = self._times_ns, now
        return (now[0] - before[0]) / 1e9, (now[1] - before[1]) / 1e9

    def _check_loss(self, loss: float) -> None:
        why = self._losses.check(loss)
        if why is not None and not self._diverged:
            self._control.send(LossDiverged(self._rank, self.step, loss, why))
            if self._rollback_state is not None:
                self._diverged = True
                return
            raise Diverged(f"loss {loss} at step {self.step}: {why}")

    # ---- the coordinator's side ---------------------------------------------------------------

    def _handle(self, message: Message) -> None:
        match message:
            case EnterPhase():
                self._enter(message)
            case Quiesce():
                self._sync_weights(message)
            case Evaluate():
                self._evaluate(message.split)
            case SaveCheckpoint():
                self._save(message)
            case FinishRun():
                self._finish(message)
            case Dismiss():
                self._leave()
            case Regroup():
                self._clock.enter(SWITCH)
                self._hooks.on_quiesce()
                self._regroup(message)
            case FormGroup():
                self._clock.enter(SWITCH)
                self._form_group(message)
            case _:
                raise PacelineError(f"a worker cannot handle a {type(message).__name__} message")
        self._clock.enter(OTHER)
        self._stages.enter(TRAIN)

    def _enter(self, message: EnterPhase) -> None:
        began = time.perf_counter()
        self.lr_gain = message.lr_gain
        self._clock.enter(SWITCH if message.switching else OTHER)
        if self._runner is not None:
            self._state = self._runner.export_state()
            # A server must not receive new state while any worker still reads the old.
            self._context.group.barrier()
            self._save_local_state()
            self._close_runner()
            self._drop_inner_state()
            self._snapshot_or_restore(message)
        assert self._state is not None
        phase = PhaseContext.from_message(message)
        spec = self._session.strategy.phases[message.phase]
        runner = self._runner = make_runner(spec, self._context, phase)
        self._is_fresh = True
        self._comm_report = runner.comm_report() or self._comm_report
        self._log_optimizer_path(runner)
        runner.import_state(self._state)
        strategy = str(spec)
        if self._local_state.plain.get("strategy", strategy) != strategy:
            self._drop_inner_state()  # A checkpoint of another strategy.
        runner.import_local_state(self._local_state)
        self._drop_inner_state()
        self._strategy_text = strategy
        if not self._context.is_elastic:
            self._state = None
        if message.switching:
            self._entered_at = began
        else:
            trim_malloc()
        self._control.send(PhaseEntered(self._rank))

    def _log_optimizer_path(self, runner: Runner) -> None:
        """Logs how the optimizer's work is divided, once per run unless a switch changes it."""
        path = runner.optimizer_path()
        if path is not None and path != self._optimizer_path and self._rank == 0:
            print(f"optimizer: {path}", flush=True)
        self._optimizer_path = path or self._optimizer_path

    def _snapshot_or_restore(self, message: EnterPhase) -> None:
        assert self._state is not None
        if message.restore:
            kept = self._best_state if message.best else self._rollback_state
            assert kept is not None
            self._state, self._local_state = kept
        self._diverged = False
        if not message.restore:  # It may have to be restored again, in another view.
            self._rollback_state = None
        if message.snapshot:
            self._rollback_state = (copy_section(self._state), copy_section(self._local_state))

    def _keep_state(self) -> None:
        """Keeps the state of the best validated epoch so far."""
        self._save_local_state()
        shared = copy_section(self.runner.export_state())
        self._best_state = (shared, copy_section(self._local_state))

    def _drop_inner_state(self) -> None:
        tensors = self._local_state.tensors.items()
        self._local_state = Section({k: v for k, v in tensors if not k.startswith(INNER_PREFIX)})

    def _sync_weights(self, message: Quiesce) -> None:
        """Brings this replica to the latest weights; all replicas are equal afterwards."""
        self._hooks.on_quiesce()
        began = time.perf_counter()
        self._clock.enter(COMM)
        self.runner.sync_weights(message.version)
        self.runner.average_buffers(self._samples_since_settle)
        self._samples_since_settle = 0
        lr = float(self._context.replica.optimizer.param_groups[0]["lr"])
        digest = self.runner.checksum()
        self._complete_at = self._reached = message.samples
        self._settle_s = time.perf_counter() - began
        self._control.send(Quiesced(self._rank, digest, lr))

    def _evaluate(self, split: str) -> None:
        self._clock.enter(EVAL)
        self._stages.enter(EVALUATE)
        assert self._hooks.evaluate is not None
        found = self._hooks.evaluate(split, self.runner.eval_shard, self.runner.predict)
        self._control.send(Evaluated(self._rank, *found))

    def _save(self, message: SaveCheckpoint) -> None:
        self._stages.enter(SAVE)
        self._save_local_state()
        facts = {"step": self.step, "strategy": self._strategy_text}
        own = Section(dict(self._local_state.tensors), facts)
        own.tensors["rng/torch"] = torch.get_rng_state()
        sections = self._context.group.all_gather_sections(own)
        path = ""
        with self.runner.gather_state(slots=True) as (shared, distant):
            shared.plain["coordinator"] = message.coordinator_state
            shared.plain["layout"] = self._context.replica.bucket_layout
            shared.plain["way"] = self._context.replica.comm_backend
            shared.plain["algorithms"] = self._context.replica.comm_algorithms
            if self._rank == 0:
                state = TrainState(shared, sections, distant)
                path = self._session.files.save(message.name, state)
        self._control.send(CheckpointWritten(self._rank, path))

    def _save_local_state(self) -> None:
        self._local_state.tensors.update(self.runner.export_local_state().tensors)

    def _finish(self, message: FinishRun) -> None:
        self._stages.enter(SAVE)
        if message.save_model:
            with self.runner.gather_state(slots=False) as (_, distant):
                if self._rank == 0:
                    tensors = {key.partition("/")[2]: value for key, value in distant.items()}
                    self._session.files.save_model(self._context.replica.model, tensors)
        self._control.send(WorkerFinished(self._rank, self.totals()))

    def _leave(self) -> None:
        self._close_runner()
        self._recorder.flush(final=True)
        self._finished = True

    def _close_runner(self) -> None:
        if self._runner is not None:
            # The bytes of its connections are counted until they are closed.
            self._session.telemetry.sample_now()
            self._part = self._runner.model_part() or self._part
            self._bytes.update(
                bytes_sent=self._runner.bytes_sent,
                bytes_before=self._runner.uncompressed_bytes,
                bytes_received=self._runner.bytes_received,
            )
            self._runner.close()
            self._runner = None

    def totals(self) -> dict[str, Any]:
        sums, runner = Counter(self._bytes), self._runner
        if runner is not None:
            sums.update(
                bytes_sent=runner.bytes_sent,
                bytes_before=runner.uncompressed_bytes,
                bytes_received=runner.bytes_received,
            )
        part = self._part if runner is None else runner.model_part()
        return {
            "phases": self._clock.totals_s(),
            "stages": self._stages.totals_s(),
            **sums,
            "parameter_bytes": sum(p.nbytes for _, p in self._context.replica.trained),
            "collectives": self._comm_report.to_plain() if self._comm_report else None,
            "part": part or self._part,
            "peak_rss_bytes": peak_rss_bytes(),
            "input": self._hooks.input_stats(),
            "steps": self.step,
        }
