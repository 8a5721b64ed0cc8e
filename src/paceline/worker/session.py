"""Runs a worker from its assignment to the end of training: a job, or a custom script."""

from __future__ import annotations

import copy
import dataclasses
import os
import runpy
import socket
import sys
import time
from pathlib import Path
from typing import Any

import torch

from paceline.comm.control import ControlConnection, StoreClient
from paceline.comm.process_group import CollectiveGroup
from paceline.comm.state_exchange import broadcast_section
from paceline.errors import CheckpointError, StateError, UsageError
from paceline.job import Job
from paceline.protocol.messages import Lease, WorkerReady
from paceline.state import (
    Section,
    TrainState,
    fingerprint_of,
    is_model_tensor,
    load_into_model,
    state_from_model,
)
from paceline.strategies.registry import parse_strategy
from paceline.strategies.runner import Replica, WorkerContext
from paceline.telemetry.events import InputStats, ProfileWritten, WorkerEnded, WorkerStarted
from paceline.telemetry.phase_clock import EVAL, PREPARE, READ, STAGES, TRAIN, PhaseClock
from paceline.telemetry.proc_stats import allowed_cores, quota_cores
from paceline.telemetry.run_folder import RunFolder
from paceline.telemetry.sampler import StepCounters
from paceline.telemetry.step_recorder import StepRecorder
from paceline.worker.assignment import Assignment
from paceline.worker.batch_loader import BatchLoader
from paceline.worker.coordinator_client import CoordinatorClient
from paceline.worker.evaluation import EvalShard, Predict, evaluate_shard
from paceline.worker.heartbeat import HeartbeatThread
from paceline.worker.import_hooks import install_import_hook
from paceline.worker.job_builder import (
    Loss,
    build_loss,
    build_model,
    build_optimizer,
    choose_device,
    load_job_data,
)
from paceline.worker.loop_hooks import LoopCallbacks, LoopHooks
from paceline.worker.memory_check import check_memory
from paceline.worker.profiler import EpochProfiler
from paceline.worker.run_files import open_run_files
from paceline.worker.slowdown import SlowdownInjector
from paceline.worker.spawn import unpack_live
from paceline.worker.telemetry_reporter import TelemetryReporter
from paceline.worker.training_loop import run_training_loop

PROBE_PASSES = 4
RANK_STRIDE = 1_000_003
"""Worker k's generators are seeded with seed + k times this; worker 0's continue
after the model's initialization."""


class Session:
    """The parts of a worker that do not depend on the model or the loop."""

    def __init__(self, assignment: Assignment, control: ControlConnection, wait_s: float) -> None:
        self.assignment = assignment
        self.control = control
        self.rank, self.size = assignment.index, assignment.workers
        self.wait_s = wait_s
        self.files = open_run_files(assignment, control)
        self.clock = PhaseClock(self.files.began_wall_s)
        self.stages = PhaseClock(self.files.began_wall_s, STAGES)
        torch.set_num_threads(assignment.threads)
        self.slowdown = SlowdownInjector.for_worker(assignment.slowdowns, self.rank, self.clock)
        self.counters = StepCounters()
        self.telemetry = TelemetryReporter(
            assignment, control, self.files.events, self.clock, self.counters
        )
        self.telemetry.report(
            WorkerStarted(
                t=round(self.clock.now_s(), 6),
                worker=self.rank,
                host=socket.gethostname(),
                pid=os.getpid(),
                threads=assignment.threads,
                cores=allowed_cores(),
                quota=quota_cores(),
            )
        )
        self.telemetry.start()
        self.context: WorkerContext | None = None
        self.agent: CoordinatorClient | None = None
        self._heartbeat: HeartbeatThread | None = None

    def join_group(self, replica: Replica) -> WorkerContext:
        """Waits for the other workers and forms the process group."""
        assignment = self.assignment
        store = None
        if self.size > 1:
            store = StoreClient(
                assignment.host,
                assignment.port,
                token=assignment.token,
                who=assignment.process_name,
                timeout_s=self.wait_s,
            )
        group = CollectiveGroup.init(
            store,
            rank=self.rank,
            size=self.size,
            address=assignment.bind or self.control.local_address,
            timeout_s=self.wait_s,
        )
        self.context = WorkerContext(
            rank=self.rank,
            size=self.size,
            replica=replica,
            group=group,
            control=self.control,
            clock=self.clock,
            token=assignment.token,
            timeout_s=self.wait_s,
            on_bucket_ready=self.slowdown.apply if self.slowdown is not None else None,
        )
        return self.context

    def start_heartbeat(self) -> None:
        self._heartbeat = HeartbeatThread(
            rank=self.rank,
            control=self.control,
            clock=self.clock,
            step=lambda: self.agent.step if self.agent is not None else 0,
            on_lost=lambda: os._exit(1),
        )
        self._heartbeat.start()

    def make_client(
        self,
        context: WorkerContext,
        state: TrainState,
        callbacks: LoopCallbacks,
        *,
        samples: int,
        hooks: LoopHooks | None = None,
    ) -> CoordinatorClient:
        """The client that trains from `state`; restores this worker's random state with it."""
        initial_step = 0
        if self.rank < len(state.workers):
            own = state.workers[self.rank]
            torch.set_rng_state(own.tensors["rng/torch"])
            initial_step = int(own.plain["step"])
        self.agent = CoordinatorClient(
            strategy=parse_strategy(self.assignment.strategy),
            context=context,
            state=state,
            callbacks=callbacks,
            hooks=dataclasses.replace(hooks or LoopHooks(), on_close=self.telemetry.sample_now),
            recorder=StepRecorder(
                self.files.events if self.assignment.telemetry else None,
                self.clock,
                initial_step,
                self.counters,
            ),
            stages=self.stages,
            initial_step=initial_step,
            samples_per_epoch=samples,
            slowdown=self.slowdown,
        )
        self.stages.enter(TRAIN)
        return self.agent

    def make_profiler(self) -> EpochProfiler | None:
        """For the epoch of `--profile`; its `stop` must be called when the epoch's steps end."""
        epoch = self.assignment.profile_epoch
        if epoch is None:
            return None

        def written(epoch: int, steps: int, path: str) -> None:
            t = round(self.clock.now_s(), 6)
            self.telemetry.report(ProfileWritten(t=t, epoch=epoch, steps=steps, path=path))

        # Runs on other machines, which have no run folder, refuse --profile before they start.
        assert self.assignment.folder is not None
        path = RunFolder(self.assignment.folder).profile(self.assignment.process_name)
        return EpochProfiler(epoch, path, self.rank, written)

    def broadcast_state(self, context: WorkerContext) -> TrainState:
        """Returns the initial state of worker 0 or its checkpoint, equal on every worker."""
        replica = context.replica
        state = TrainState(state_from_model(replica.model, replica.optimizer))
        if self.assignment.checkpoint is not None:
            if self.rank == 0:
                state = self.files.load(self.assignment.checkpoint)
                self._check_model(state, replica)
            workers = _broadcast_all(state.workers if self.rank == 0 else None, context.group)
            state = TrainState(broadcast_section(state.shared, context.group), workers)
            replica.bucket_layout = state.shared.plain["layout"]
            # A run with another number of workers adds in another order anyway.
            replica.comm_backend = state.shared.plain.get("way")
        elif self.size > 1:
            state = TrainState(_broadcast_initial_state(state.shared, context.group))
        try:
            load_into_model(state.shared, replica.model, replica.optimizer)
        except StateError as error:
            raise CheckpointError(str(error)) from None
        return state

    def _check_model(self, state: TrainState, replica: Replica) -> None:
        mine = state_from_model(replica.model, replica.optimizer).tensors
        if state.fingerprint() != fingerprint_of(mine):
            raise CheckpointError(
                f"checkpoint {self.assignment.checkpoint} belongs to another model; "
                "resume with the model that created it"
            )

    def write_input(self, facts: dict[str, Any]) -> None:
        self.files.events.write(InputStats(t=round(self.clock.now_s(), 6), **facts))

    def seed_worker(self, seed: int) -> None:
        if self.rank > 0:
            torch.manual_seed(seed + self.rank * RANK_STRIDE)

    def close(self) -> None:
        assert self.agent is not None
        self.telemetry.stop()
        totals = self.agent.totals()
        self.telemetry.report(
            WorkerEnded(
                t=round(self.clock.now_s(), 6),
                phases=totals["phases"],
                bytes_sent=totals["bytes_sent"],
                peak_rss_bytes=totals["peak_rss_bytes"],
            )
        )
        if self._heartbeat is not None:
            self._heartbeat.stop()
        assert self.context is not None
        self.context.group.destroy()
        self.control.close()


def _broadcast_initial_state(mine: Section, group: CollectiveGroup) -> Section:
    """Worker 0's state at the beginning; in place where the optimizer remembers nothing yet, for a
    large model has no room for a second copy of itself."""
    weights = sorted(k for k in mine.tensors if is_model_tensor(k))
    fresh = len(weights) == len(mine.tensors) and not mine.plain
    facts = Section(plain={"fingerprint": fingerprint_of(mine.tensors), "fresh": fresh})
    first = broadcast_section(facts if group.rank == 0 else None, group).plain
    if not first["fresh"]:
        return broadcast_section(mine, group)
    if first["fingerprint"] != fingerprint_of(mine.tensors):
        raise UsageError(f"worker {group.rank} built a different model than worker 0")
    for name in weights:
        group.broadcast_any_layout(mine.tensors[name])
    return Section({name: mine.tensors[name] for name in weights})


def _broadcast_all(sections: list[Section] | None, group: CollectiveGroup) -> list[Section]:
    count = Section(plain={"count": len(sections)}) if sections is not None else None
    total = broadcast_section(count, group).plain["count"]
    return [
        broadcast_section(sections[i] if sections is not None else None, group)
        for i in range(total)
    ]


def run_worker_job(
    assignment: Assignment, control: ControlConnection, live: bytes | None, wait_s: float
) -> None:
    """Trains a job: read data, build the model, join the group, train until the run ends."""
    session = Session(assignment, control, wait_s)
    session.stages.enter(READ)
    job = unpack_live(live) if live is not None else _resolve(assignment)
    device = choose_device(job)
    tables = load_job_data(job)
    session.stages.enter(PREPARE)
    model = build_model(job, tables)
    optimizer = build_optimizer(job.optimizer_spec, job.base_lr, model)
    loss_of = build_loss(job, model)
    check_memory(parse_strategy(assignment.strategy), model, optimizer, session.size)
    replica = Replica(model, optimizer, clip=job.clip)
    context = session.join_group(replica)
    session.start_heartbeat()
    session.seed_worker(job.seed)
    set_worker = getattr(model, "set_worker", None)
    if set_worker is not None:
        set_worker(session.rank)
    state = session.broadcast_state(context)

    def evaluate(split: str, share: EvalShard, predict: Predict) -> tuple[float, int | None, int]:
        return evaluate_shard(
            model,
            loss_of,
            getattr(tables, split),
            share=share,
            predict=predict,
            device=device,
            alive=lambda: session.clock.enter(EVAL),
        )

    duties = LoopCallbacks(
        evaluate=evaluate,
        save=session.files.save,
        save_model=lambda distant: session.files.save_model(model, distant),
    )
    feed = BatchLoader(
        tables.train,
        job.seed,
        device,
        rank=session.rank,
        workers=session.size,
        tell=session.write_input,
    )
    if assignment.checkpoint is None:
        session.stages.enter(READ)
        feed.warm_up()
    profiler = session.make_profiler()
    hooks = LoopHooks(on_leases_known=feed.prefetch, input_stats=feed.totals)
    if profiler is not None:
        hooks = dataclasses.replace(hooks, on_quiesce=profiler.stop)
    agent = session.make_client(context, state, duties, samples=feed.samples, hooks=hooks)
    del state  # Its tensors are the model's: strategies that split it free what they can.
    speed = 0.0
    if parse_strategy(assignment.strategy).needs_worker_speeds:
        # At its slowest: the groups are fixed for the whole run.
        slow = session.slowdown.max_factor if session.slowdown is not None else 1.0
        speed = probe_speed(model, loss_of, feed, job.batch // session.size or 1) / slow
    control.send(
        WorkerReady(
            session.rank, feed.samples, job.batch, job.epochs, tables.splits, speed, feed.layout
        )
    )
    run_training_loop(job, agent, replica, feed, loss_of, session.clock, profiler)
    feed.close()
    session.close()


def probe_speed(model: torch.nn.Module, loss_of: Loss, feed: BatchLoader, samples: int) -> float:
    """Samples per second of a few passes on a copy; the model and its generator do not change."""
    generator = torch.get_rng_state()
    copied = copy.deepcopy(model).train()
    count = min(samples, feed.samples)
    inputs, targets = feed.batch(Lease(0, 0, 0, count, 0, count))
    times_s = []
    for _ in range(PROBE_PASSES):
        began = time.perf_counter()
        loss_of(copied(inputs), targets).backward()  # type: ignore[no-untyped-call]
        times_s.append(time.perf_counter() - began)
    torch.set_rng_state(generator)
    # The first pass allocates and warms up; the fastest one is the speed of the machine.
    return count / min(times_s)


def _resolve(assignment: Assignment) -> Job:
    assert assignment.job is not None
    return assignment.job.resolve()


def run_worker_script(assignment: Assignment, control: ControlConnection, wait_s: float) -> None:
    """Runs a custom training loop; its `paceline.prepare` finds this session."""
    from paceline.worker import custom_loop

    assert assignment.script is not None
    session = Session(assignment, control, wait_s)
    session.stages.enter(PREPARE)
    custom_loop._session = session
    install_import_hook()
    sys.argv = [assignment.script, *assignment.script_args]
    sys.path.insert(0, str(Path(assignment.script).parent))
    try:
        runpy.run_path(assignment.script, run_name="__main__")
    except SystemExit as ended:
        if ended.code not in (None, 0):
            raise UsageError(f"{assignment.script} exited with {ended.code!r}") from None
    if session.agent is None:
        raise UsageError(
            f"{assignment.script} called neither paceline.prepare(model, optimizer, loader) "
            "nor fit() of a Keras model"
        )
    session.agent.finish_custom_loop()
    session.close()
