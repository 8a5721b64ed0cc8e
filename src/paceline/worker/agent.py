"""The worker's side of the coordinator's sequence: work comes out, everything else is seen to.

A training loop iterates over `Agent.work()` and calls `begin` and `finish` around each step.
Between steps the agent settles, evaluates, saves and changes strategy when it is told to.
"""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from paceline.comm.broadcast import collect_sections
from paceline.errors import Diverged, PacelineError, UsageError
from paceline.protocol.divergence import LossWatch
from paceline.protocol.messages import (
    Advanced,
    Diverging,
    Enter,
    Entered,
    EpochOver,
    Evaluate,
    Evaluated,
    Finish,
    Finished,
    Go,
    Heartbeat,
    Lease,
    Measured,
    Message,
    Onward,
    Quiesce,
    Quiesced,
    Resumed,
    Save,
    Saved,
    Steps,
    split_batch,
)
from paceline.protocol.shards import Cutter
from paceline.specs.strategy import Strategy
from paceline.specs.trouble import Slowness, Trouble
from paceline.state import Distant, Section, TrainState, copy_section
from paceline.strategies import make_runner
from paceline.strategies.runner import (
    INNER,
    Batch,
    LossOf,
    Runner,
    Surroundings,
    Work,
)
from paceline.telemetry.events import PHASES
from paceline.telemetry.phases import (
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
    PhaseClock,
)
from paceline.telemetry.recorder import StepRecorder
from paceline.worker.allocator import give_back_freed
from paceline.worker.evaluate import Predict, Share

REPORT_S = 0.5
HEARTBEAT_S = 1.0


@dataclasses.dataclass
class Duties:
    """What a loop can do for the coordinator besides steps."""

    evaluate: Callable[[str, Share, Predict], tuple[float, int | None, int]] | None
    save: Callable[[str, TrainState], str]
    save_model: Callable[[Mapping[str, Distant]], None]


class Agent:
    """One worker's conversation with the coordinator, from the first Enter to Finish."""

    def __init__(
        self,
        *,
        strategy: Strategy,
        around: Surroundings,
        state: TrainState,
        duties: Duties,
        recorder: StepRecorder,
        stages: PhaseClock,
    ) -> None:
        self._phases = strategy.phases
        self._around = around
        self._control = around.control
        self._clock = around.clock
        self._stages = stages
        self._duties = duties
        self._recorder = recorder
        self._state: Section | None = state.shared
        self._own = state.workers[around.rank] if around.rank < len(state.workers) else None
        self._runner: Runner | None = None
        self._rank, self._size = around.rank, around.size
        self.step = 0
        self._samples_since_settle = 0
        self._sum = Measured(0, 0, 0.0, 0)
        self._report_due = 0.0
        self._settle_s = 0.0
        self._entered_at: float | None = None
        self._losses = LossWatch()
        self._bytes_sent = self._bytes_before = self._bytes_received = 0
        self._kept: tuple[Section, Section] | None = None
        """State and own section to fall back on, while a switch is on trial."""
        self._spoilt = False
        self._part: dict[str, object] | None = None
        self._carried = Section()
        """What runners remember for this worker alone, kept through phases that do not use it."""
        self._times_ns = (0, 0)
        self.troubles: tuple[Trouble, ...] = ()
        self._slowness: Slowness | None = None
        """Of this step, where there are troubles at all."""
        self._late = False
        self._suffered_until = (0.0, 0.0)
        around.before_send = self._suffer
        self.samples_per_epoch = 1
        self.expecting: Callable[[list[Lease]], None] = lambda leases: None
        """Told of leases well before they are worked on."""
        self.input_totals: Callable[[], dict[str, Any]] = dict
        self.before_settle: Callable[[], None] = lambda: None
        """Called when no more steps come until the coordinator says so."""
        self.before_leave: Callable[[], None] = lambda: None
        """Called before a runner's connections are closed: their bytes are counted up to then."""
        self.finished = False
        self._between_epochs = False
        self._strategy_text = ""

    # ---- the loop's side ----------------------------------------------------------------------

    def work(self) -> Iterator[Work | EpochOver]:
        """Leases as Work; EpochOver between epochs (going on means wanting another one)."""
        while not self.finished:
            self._clock.enter(WAIT)
            message = self._control.hear()
            self._clock.enter(OTHER)
            if isinstance(message, Steps):
                yield from self._planned(message)
            elif isinstance(message, Go):
                self._recorder.note_staleness(message.staleness)
                yield Work(message.lease, self.step, message.version)
            elif isinstance(message, EpochOver):
                self._between_epochs = True
                yield message
                self._between_epochs = False
                self._control.tell(Onward(self._rank, more=True))
            else:
                self._see_to(message)

    def end_of_loop(self) -> None:
        """A user's own loop is over: say so, and see the run to its end."""
        if self.finished:
            return
        if not self._between_epochs:
            raise UsageError(
                "the loop ended in the middle of an epoch: iterate the loader to its end"
            )
        self._control.tell(Onward(self._rank, more=False))
        for _ in self.work():
            raise PacelineError("work was handed out after the loop had ended")

    def export_state(self) -> Section:
        """The whole global state; between epochs only, when all workers are settled."""
        assert self._runner is not None
        return self._runner.export_state()

    def begin(self, work: Work) -> None:
        """Weights are made ready; the forward pass comes next."""
        assert self._runner is not None
        self._runner.begin_step(work)
        if self._entered_at is not None:
            pause_s = self._settle_s + time.perf_counter() - self._entered_at
            self._control.tell(Resumed(self._rank, pause_s))
            self._entered_at = None
        if self.troubles:
            epoch = work.lease.epoch + work.lease.start / self.samples_per_epoch
            self._slowness = Slowness.of(self.troubles, self._rank, epoch)
            self._late = self._slowness.delay_s == 0.0
            self._suffered_until = (time.perf_counter(), time.thread_time())

    def reads(self, lease: Lease) -> Lease:
        """The rows that this worker needs for a lease."""
        assert self._runner is not None
        return self._runner.reads(lease)

    def compute(self, work: Work, batch: Batch | None, loss_of: LossOf) -> Measured:
        """Forward and backward, as the strategy has them."""
        assert self._runner is not None
        return self._runner.compute(work, batch, loss_of)

    def finish(self, work: Work, measured: Measured) -> None:
        """Gradients are there: exchange, update, record, report."""
        assert self._runner is not None
        self._suffer()
        self._clock.enter(OTHER)
        busy_s, comm_s = self._times_since()
        work.measured = dataclasses.replace(
            measured, busy_s=busy_s, comm_s=comm_s, norms=self._runner.take_norms()
        )
        if measured.loss_sum is not None and measured.samples:
            self._check_loss(measured.loss_sum / measured.samples)
        if self._spoilt and not self._runner.exchanges_in_backward:
            # The trial is lost and will be undone; until then this worker changes nothing.
            self._around.replica.optimizer.zero_grad(set_to_none=False)
        self._runner.finish_step(work)
        self._clock.enter(OTHER)
        self.step += 1
        self._samples_since_settle += work.lease.samples
        loss = None
        if measured.loss_sum is not None and measured.samples:
            loss = measured.loss_sum / measured.samples
        self._recorder.step_done(work.lease, loss, self._runner.take_hidden_us())

    def _planned(self, plan: Steps) -> Iterator[Work]:
        leases = self._cut_leases(plan)
        self.expecting([lease for lease in leases if lease.samples])
        for lease in leases:
            work = Work(lease, self.step)
            yield work
            self._add_up(work.measured)
            if lease.stop == plan.stop or time.monotonic() >= self._report_due:
                self._report(plan.epoch, lease.stop)

    def _cut_leases(self, plan: Steps) -> list[Lease]:
        """This worker's share of every batch of a plan."""
        cutter = Cutter(plan.pieces) if plan.pieces else None
        leases = []
        for start in range(plan.start, plan.stop, plan.batch):
            stop = min(start + plan.batch, plan.stop)
            cuts = split_batch(stop - start, self._size, plan.weights)
            lo, hi = start + cuts[self._rank], start + cuts[self._rank + 1]
            pieces = cutter.cut(hi - lo) if cutter is not None else ()
            leases.append(Lease(0, plan.epoch, start, stop, lo, hi, pieces, plan.ahead))
        return leases

    def _add_up(self, measured: Measured) -> None:
        total = self._sum
        loss_sum = None
        if total.loss_sum is not None and (measured.loss_sum is not None or not measured.samples):
            loss_sum = total.loss_sum + (measured.loss_sum or 0.0)
        self._sum = Measured(
            total.samples + measured.samples,
            total.predictions + measured.predictions,
            loss_sum,
            None if measured.correct is None else (total.correct or 0) + measured.correct,
            total.busy_s + measured.busy_s,
            total.comm_s + measured.comm_s,
            measured.norms or total.norms,
        )

    def _report(self, epoch: int, position: int) -> None:
        self._control.tell(Advanced(self._rank, epoch, position, self.step, self._sum))
        self._sum = Measured(0, 0, 0.0, 0)
        self._report_due = time.monotonic() + REPORT_S

    def _times_since(self) -> tuple[float, float]:
        """Seconds of computing and of exchanging since the last call."""
        total_ns = self._clock.total_ns
        busy_ns = total_ns[INPUT] + total_ns[FORWARD] + total_ns[BACKWARD]
        now = (busy_ns, total_ns[COMM])
        before, self._times_ns = self._times_ns, now
        return (now[0] - before[0]) / 1e9, (now[1] - before[1]) / 1e9

    def _suffer(self) -> None:
        """Trouble on purpose: computing has taken longer, and a step's first exchange is late.

        Before gradients leave, as on a machine that is slow by itself; none are held back when
        what is computed has been suffered for already.
        """
        slowness = self._slowness
        if slowness is None:
            return
        began, busy_until = self._suffered_until
        elapsed_s = time.perf_counter() - began
        wall_s = slowness.wall_s(elapsed_s, time.thread_time() - busy_until)
        time.sleep(max(0.0, wall_s - elapsed_s))
        if not self._late:
            self._clock.enter(COMM)
            time.sleep(slowness.delay_s)
            self._clock.enter(BACKWARD)
            self._late = True
        self._suffered_until = (time.perf_counter(), time.thread_time())

    def _check_loss(self, loss: float) -> None:
        why = self._losses.look(loss)
        if why is not None and not self._spoilt:
            self._control.tell(Diverging(self._rank, self.step, loss, why))
            if self._kept is not None:
                self._spoilt = True
                return
            raise Diverged(f"loss {loss} at step {self.step}: {why}")

    # ---- the coordinator's side ---------------------------------------------------------------

    def _see_to(self, message: Message) -> None:
        if isinstance(message, Enter):
            self._enter(message)
        elif isinstance(message, Quiesce):
            self._settle(message.version)
        elif isinstance(message, Evaluate):
            self._evaluate(message.split)
        elif isinstance(message, Save):
            self._save(message)
        elif isinstance(message, Finish):
            self._finish(message)
        else:
            raise PacelineError(f"a worker cannot take a {type(message).__name__} message")
        self._clock.enter(OTHER)
        self._stages.enter(TRAIN)

    def _enter(self, message: Enter) -> None:
        began = time.perf_counter()
        self._clock.enter(SWITCH if message.switching else OTHER)
        if self._own is not None:
            self._carried = self._own
        if self._runner is not None:
            self._state = self._runner.export_state()
            # A server must not be given new state while somebody still reads the old.
            self._around.group.meet()
            self._carry()
            self._leave_runner()
            self._forget_inner()
            self._keep_or_restore(message)
        assert self._state is not None
        self._around.servers = message.servers
        self._around.groups = message.groups
        self._runner = make_runner(self._phases[message.phase], self._around)
        self._runner.import_state(self._state)
        strategy = str(self._phases[message.phase])
        if self._carried.plain.get("strategy", strategy) != strategy:
            self._forget_inner()  # A checkpoint of another strategy.
        self._runner.import_own(self._carried)
        self._forget_inner()
        self._strategy_text = strategy
        self._state = self._own = None
        if message.switching:
            self._entered_at = began
        else:
            give_back_freed()
        self._control.tell(Entered(self._rank))

    def _keep_or_restore(self, message: Enter) -> None:
        assert self._state is not None
        if message.restore:
            assert self._kept is not None
            self._state, self._carried = self._kept
        self._spoilt = False
        self._kept = None
        if message.keep:
            self._kept = (copy_section(self._state), copy_section(self._carried))

    def _forget_inner(self) -> None:
        kept = {k: v for k, v in self._carried.tensors.items() if not k.startswith(INNER)}
        self._carried = Section(kept)

    def _settle(self, version: int) -> None:
        """Bring this replica to the newest weights; all replicas are equal afterwards."""
        assert self._runner is not None
        self.before_settle()
        began = time.perf_counter()
        self._clock.enter(COMM)
        self._runner.settle(version)
        self._runner.agree_on_buffers(self._samples_since_settle)
        self._samples_since_settle = 0
        lr = float(self._around.replica.optimizer.param_groups[0]["lr"])
        digest = self._runner.digest()
        self._settle_s = time.perf_counter() - began
        self._control.tell(Quiesced(self._rank, digest, lr))

    def _evaluate(self, split: str) -> None:
        self._clock.enter(EVAL)
        self._stages.enter(EVALUATE)
        assert self._duties.evaluate is not None
        assert self._runner is not None
        runner = self._runner
        loss_sum, correct, count = self._duties.evaluate(split, runner.share, runner.predict)
        self._control.tell(Evaluated(self._rank, loss_sum, correct, count))

    def _save(self, message: Save) -> None:
        self._stages.enter(SAVE)
        assert self._runner is not None
        self._carry()
        facts = {"step": self.step, "strategy": self._strategy_text}
        own = Section(dict(self._carried.tensors), facts)
        own.tensors["rng/torch"] = torch.get_rng_state()
        sections = collect_sections(own, self._around.group)
        path = ""
        with self._runner.hand_in(slots=True) as (shared, distant):
            shared.plain["coordinator"] = message.memory
            shared.plain["layout"] = self._around.replica.layout
            shared.plain["way"] = self._around.replica.way
            if self._rank == 0:
                path = self._duties.save(message.name, TrainState(shared, sections, distant))
        self._control.tell(Saved(self._rank, path))

    def _carry(self) -> None:
        assert self._runner is not None
        self._carried.tensors.update(self._runner.export_own().tensors)

    def _finish(self, message: Finish) -> None:
        self._stages.enter(SAVE)
        if message.save_model:
            assert self._runner is not None
            with self._runner.hand_in(slots=False) as (_, distant):
                if self._rank == 0:
                    self._duties.save_model({k.partition("/")[2]: d for k, d in distant.items()})
        self._leave_runner()
        self._recorder.flush(final=True)
        self.finished = True
        self._control.tell(Finished(self._rank, self.totals()))

    def _leave_runner(self) -> None:
        if self._runner is not None:
            self.before_leave()
            self._part = self._runner.describe() or self._part
            self._bytes_sent += self._runner.bytes_sent
            self._bytes_before += self._runner.bytes_before
            self._bytes_received += self._runner.bytes_received
            self._runner.close()
            self._runner = None

    def totals(self) -> dict[str, Any]:
        return {
            "phases": self._clock.totals_s(),
            "stages": self._stages.totals_s(),
            "bytes_sent": self._bytes_sent,
            "bytes_before": self._bytes_before,
            "bytes_received": self._bytes_received,
            "parameter_bytes": sum(
                p.numel() * p.element_size() for _, p in self._around.replica.trained
            ),
            "collectives": self._around.collectives,
            "part": self._part,
            "peak_rss_bytes": peak_rss_bytes(),
            "input": self.input_totals(),
            "steps": self.step,
        }


def peak_rss_bytes() -> int:
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


class Heart(threading.Thread):
    """Tells the coordinator every second what the worker is doing; ends the process without it."""

    def __init__(self, around: Surroundings, on_lost: Callable[[], None]) -> None:
        super().__init__(daemon=True)
        self._around = around
        self._on_lost = on_lost
        self._stop = threading.Event()
        self.step: Callable[[], int] = lambda: 0

    def run(self) -> None:
        clock = self._around.clock
        while not self._stop.wait(HEARTBEAT_S):
            beat = Heartbeat(self._around.rank, self.step(), PHASES[clock.current], clock.turns)
            try:
                self._around.control.tell(beat)
            except PacelineError:
                if not self._stop.is_set():
                    self._on_lost()
                return

    def stop(self) -> None:
        self._stop.set()
