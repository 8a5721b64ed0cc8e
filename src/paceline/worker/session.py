"""How a worker gets from its assignment to training: a job, or a user's own script."""

from __future__ import annotations

import copy
import os
import runpy
import socket
import sys
import time
from pathlib import Path
from typing import Any

import torch

from paceline.comm.broadcast import broadcast_section
from paceline.comm.control import Control, StoreClient
from paceline.comm.group import Group
from paceline.errors import CheckpointError, StateError, UsageError
from paceline.job import Job
from paceline.protocol.messages import Lease, Ready
from paceline.specs.strategy import Grouped, Strategy, read_strategy
from paceline.specs.trouble import Trouble
from paceline.state import (
    Section,
    TrainState,
    capture,
    fingerprint_of,
    is_model_tensor,
    restore,
)
from paceline.strategies.runner import Replica, Surroundings
from paceline.telemetry.events import InputDone, Profiled, WorkerBegan, WorkerEnded
from paceline.telemetry.folder import RunFolder
from paceline.telemetry.phases import EVAL, PREPARE, READ, STAGES, TRAIN, PhaseClock
from paceline.telemetry.recorder import StepRecorder
from paceline.telemetry.resources import allowed_cores, quota_cores
from paceline.telemetry.sampler import Counters
from paceline.worker.adapters import watch_imports
from paceline.worker.agent import Agent, Duties, Heart
from paceline.worker.assignment import Assignment
from paceline.worker.build import (
    Loss,
    build_loss,
    build_model,
    build_optimizer,
    choose_device,
    read_data,
)
from paceline.worker.evaluate import Predict, Share, evaluate_share
from paceline.worker.feed import Feed
from paceline.worker.files import open_files
from paceline.worker.fit import check_room
from paceline.worker.loop import train
from paceline.worker.profile import EpochProfiler
from paceline.worker.spawn import unpack_live
from paceline.worker.witness import Witness

PROBE_PASSES = 4
RANK_STRIDE = 1_000_003
"""Worker k's generators are seeded with seed + k times this; worker 0's go on from the model's."""


class Session:
    """The parts of a worker that do not depend on what is trained."""

    def __init__(self, assignment: Assignment, control: Control, wait_s: float) -> None:
        self.assignment = assignment
        self.control = control
        self.rank, self.size = assignment.index, assignment.workers
        self.wait_s = wait_s
        self.files = open_files(assignment, control)
        self.clock = PhaseClock(self.files.began_wall_s)
        self.stages = PhaseClock(self.files.began_wall_s, STAGES)
        torch.set_num_threads(assignment.threads)
        self.counters = Counters()
        self.witness = Witness(assignment, control, self.files.events, self.clock, self.counters)
        self.witness.tell(
            WorkerBegan(
                t=round(self.clock.now_s(), 6),
                worker=self.rank,
                host=socket.gethostname(),
                pid=os.getpid(),
                threads=assignment.threads,
                cores=allowed_cores(),
                quota=quota_cores(),
            )
        )
        self.witness.start()
        self.around: Surroundings | None = None
        self.agent: Agent | None = None
        self._heart: Heart | None = None

    def surround(self, replica: Replica) -> Surroundings:
        """Meet the other workers."""
        told = self.assignment
        store = None
        if self.size > 1:
            store = StoreClient(
                told.host, told.port, token=told.token, who=told.who, timeout_s=self.wait_s
            )
        group = Group.join(
            store,
            rank=self.rank,
            size=self.size,
            address=told.bind or self.control.local_address,
            timeout_s=self.wait_s,
        )
        self.around = Surroundings(
            rank=self.rank,
            size=self.size,
            replica=replica,
            group=group,
            control=self.control,
            clock=self.clock,
            token=told.token,
            timeout_s=self.wait_s,
        )
        return self.around

    def start_heart(self, around: Surroundings) -> None:
        self._heart = Heart(around, on_lost=lambda: os._exit(1))
        self._heart.step = lambda: self.agent.step if self.agent is not None else 0
        self._heart.start()

    def make_agent(
        self, around: Surroundings, state: TrainState, duties: Duties, samples: int
    ) -> Agent:
        agent = Agent(
            strategy=read_strategy(self.assignment.strategy),
            around=around,
            state=state,
            duties=duties,
            recorder=StepRecorder(
                self.files.events if self.assignment.telemetry else None,
                self.clock,
                self._steps_before(state),
                self.counters,
            ),
            stages=self.stages,
        )
        agent.before_leave = self.witness.look
        agent.samples_per_epoch = samples
        agent.troubles = tuple(Trouble.from_plain(t) for t in self.assignment.troubles)
        if self.rank < len(state.workers):
            own = state.workers[self.rank]
            torch.set_rng_state(own.tensors["rng/torch"])
            agent.step = int(own.plain["step"])
        self.agent = agent
        self.stages.enter(TRAIN)
        return agent

    def make_profiler(self, agent: Agent) -> EpochProfiler | None:
        """For the epoch that was asked for; it ends when the epoch's steps do."""
        epoch = self.assignment.profile_epoch
        if epoch is None:
            return None

        def written(epoch: int, steps: int, path: str) -> None:
            t = round(self.clock.now_s(), 6)
            self.witness.tell(Profiled(t=t, epoch=epoch, steps=steps, path=path))

        # Only where the folder is at hand: a run elsewhere refuses to profile before it starts.
        assert self.assignment.folder is not None
        path = RunFolder(self.assignment.folder).profile(self.assignment.who)
        profiler = EpochProfiler(epoch, path, self.rank, written)
        agent.before_settle = profiler.stop
        return profiler

    def _steps_before(self, state: TrainState) -> int:
        if self.rank >= len(state.workers):
            return 0
        return int(state.workers[self.rank].plain["step"])

    def share_state(self, around: Surroundings) -> TrainState:
        """The state to begin from: worker 0's, or its checkpoint's, the same on every worker."""
        replica = around.replica
        state = TrainState(capture(replica.model, replica.optimizer))
        if self.assignment.checkpoint is not None:
            if self.rank == 0:
                state = self.files.load(self.assignment.checkpoint)
                self._check_model(state, replica)
            workers = _broadcast_all(state.workers if self.rank == 0 else None, around.group)
            state = TrainState(broadcast_section(state.shared, around.group), workers)
            replica.layout = state.shared.plain["layout"]
            # A run with another number of workers adds in another order anyway.
            replica.way = state.shared.plain.get("way")
        elif self.size > 1:
            state = TrainState(_share_fresh(state.shared, around.group))
        try:
            restore(state.shared, replica.model, replica.optimizer)
        except StateError as error:
            raise CheckpointError(str(error)) from None
        return state

    def _check_model(self, state: TrainState, replica: Replica) -> None:
        mine = capture(replica.model, replica.optimizer).tensors
        if state.fingerprint() != fingerprint_of(mine):
            raise CheckpointError(
                f"checkpoint {self.assignment.checkpoint} is of another model: "
                "resume with the model it was made with"
            )

    def write_input(self, facts: dict[str, Any]) -> None:
        self.files.events.write(InputDone(t=round(self.clock.now_s(), 6), **facts))

    def seed_worker(self, seed: int) -> None:
        if self.rank > 0:
            torch.manual_seed(seed + self.rank * RANK_STRIDE)

    def close(self) -> None:
        assert self.agent is not None
        self.witness.stop()
        totals = self.agent.totals()
        self.witness.tell(
            WorkerEnded(
                t=round(self.clock.now_s(), 6),
                phases=totals["phases"],
                bytes_sent=totals["bytes_sent"],
                peak_rss_bytes=totals["peak_rss_bytes"],
            )
        )
        if self._heart is not None:
            self._heart.stop()
        assert self.around is not None
        self.around.group.leave()
        self.control.close()


def _share_fresh(mine: Section, group: Group) -> Section:
    """Worker 0's state at the beginning; in place where the optimizer remembers nothing yet, for a
    large model has no room for a second copy of itself."""
    weights = sorted(k for k in mine.tensors if is_model_tensor(k))
    fresh = len(weights) == len(mine.tensors) and not mine.plain
    facts = Section(plain={"fingerprint": fingerprint_of(mine.tensors), "fresh": fresh})
    told = broadcast_section(facts if group.rank == 0 else None, group).plain
    if not told["fresh"]:
        return broadcast_section(mine, group)
    if told["fingerprint"] != fingerprint_of(mine.tensors):
        raise UsageError(f"worker {group.rank} has built another model than worker 0")
    for name in weights:
        group.broadcast_into(mine.tensors[name])
    return Section({name: mine.tensors[name] for name in weights})


def _broadcast_all(sections: list[Section] | None, group: Group) -> list[Section]:
    count = Section(plain={"count": len(sections)}) if sections is not None else None
    total = broadcast_section(count, group).plain["count"]
    return [
        broadcast_section(sections[i] if sections is not None else None, group)
        for i in range(total)
    ]


def run_job(assignment: Assignment, control: Control, live: bytes | None, wait_s: float) -> None:
    """Train a job: read, build, meet, train, until the coordinator says that it is done."""
    session = Session(assignment, control, wait_s)
    session.stages.enter(READ)
    job = unpack_live(live) if live is not None else _resolve(assignment)
    device = choose_device(job)
    tables = read_data(job)
    session.stages.enter(PREPARE)
    model = build_model(job, tables)
    optimizer = build_optimizer(job.optimizer_spec, job.base_lr, model)
    loss_of = build_loss(job, model)
    check_room(read_strategy(assignment.strategy), model, optimizer, session.size)
    replica = Replica(model, optimizer, clip=job.clip)
    around = session.surround(replica)
    session.start_heart(around)
    session.seed_worker(job.seed)
    set_worker = getattr(model, "set_worker", None)
    if set_worker is not None:
        set_worker(session.rank)
    state = session.share_state(around)

    def evaluate(split: str, share: Share, predict: Predict) -> tuple[float, int | None, int]:
        return evaluate_share(
            model,
            loss_of,
            getattr(tables, split),
            share=share,
            predict=predict,
            device=device,
            alive=lambda: session.clock.enter(EVAL),
        )

    duties = Duties(
        evaluate=evaluate,
        save=session.files.save,
        save_model=lambda distant: session.files.save_model(model, distant),
    )
    feed = Feed(
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
    agent = session.make_agent(around, state, duties, feed.samples)
    del state  # its tensors are the model's: strategies that split it let go of what they can
    agent.expecting, agent.input_totals = feed.expect, feed.totals
    speed = 0.0
    if needs_speeds(read_strategy(assignment.strategy)):
        # As slow as it will ever be: the groups hold for the whole run.
        slow = max(
            (t.factor / t.cores for t in agent.troubles if t.worker == session.rank), default=1.0
        )
        speed = probe_speed(model, loss_of, feed, job.batch // session.size or 1) / slow
    control.tell(
        Ready(session.rank, feed.samples, job.batch, job.epochs, tables.splits, speed, feed.layout)
    )
    profiler = session.make_profiler(agent)
    train(job, agent, replica, feed, loss_of, session.clock, profiler)
    feed.close()
    session.close()


def needs_speeds(strategy: Strategy) -> bool:
    return any(isinstance(p, Grouped) and p.by == "speed" for p in strategy.phases)


def probe_speed(model: torch.nn.Module, loss_of: Loss, feed: Feed, samples: int) -> float:
    """Samples a second of a few passes on a copy: the model itself and its generator stay as is."""
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
    # The first pass allocates and warms up; the fastest one says what the machine can do.
    return count / min(times_s)


def _resolve(assignment: Assignment) -> Job:
    assert assignment.job is not None
    return assignment.job.resolve()


def run_script(assignment: Assignment, control: Control, wait_s: float) -> None:
    """Run a user's own loop; `paceline.prepare` in it finds this session."""
    from paceline.worker import own_loop

    assert assignment.script is not None
    session = Session(assignment, control, wait_s)
    session.stages.enter(PREPARE)
    own_loop.current = session
    watch_imports()
    sys.argv = [assignment.script, *assignment.script_args]
    sys.path.insert(0, str(Path(assignment.script).parent))
    try:
        runpy.run_path(assignment.script, run_name="__main__")
    except SystemExit as ended:
        if ended.code not in (None, 0):
            raise UsageError(f"{assignment.script} exited with {ended.code!r}") from None
    if session.agent is None:
        raise UsageError(
            f"{assignment.script} never called paceline.prepare(model, optimizer, loader), "
            "nor fit() of a Keras model"
        )
    session.agent.end_of_loop()
    session.close()
