"""The parts of a worker process that do not depend on the model or the training loop."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import socket
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch

from paceline.comm.process_group import CollectiveGroup, CoordinatorStore
from paceline.comm.wire import REJOIN_TIMEOUT_S, AlertConnection, ControlConnection
from paceline.errors import CheckpointError, PacelineError, PeerLost, StateError, UsageError
from paceline.protocol.exchange_probe import ExchangeProbe
from paceline.protocol.messages import ExchangeFailed, Heartbeat
from paceline.specs.slowdown import ActiveSlowdown, InjectedSlowdown
from paceline.state import (
    Section,
    TrainState,
    fingerprint_of,
    is_model_tensor,
    load_into_model,
    state_from_model,
)
from paceline.strategies.registry import parse_strategy
from paceline.strategies.runner import Replica, WorkerContext, peer_errors
from paceline.telemetry.events import PHASES, InputStats, WorkerEnded, WorkerStarted
from paceline.telemetry.phase_clock import BACKWARD, COMM, STAGES, PhaseClock
from paceline.telemetry.proc_stats import allowed_cores, network_namespace, quota_cores
from paceline.telemetry.sampler import StepCounters
from paceline.worker.assignment import Assignment
from paceline.worker.probes import probe_exchange
from paceline.worker.run_files import TelemetryReporter, open_run_files

if TYPE_CHECKING:
    from paceline.worker.coordinator_client import CoordinatorClient

HEARTBEAT_S = 1.0
RANK_STRIDE = 1_000_003
"""Worker k's generators are seeded with seed + k times this; worker 0's continue
after the model's initialization."""

JOIN_STRIDE = 500_009
"""The same for the times that a worker has been started again."""
CONNECT_TIMEOUT_S = 2.0
"""Timeout of Gloo, which waits five times as long for workers that are lost while it connects."""


def connect_group(
    assignment: Assignment, control: ControlConnection, wait_s: float
) -> CollectiveGroup:
    """Waits for the other workers and forms the process group."""
    rank, size = assignment.index, assignment.workers
    if size == 1:
        return CollectiveGroup(rank, size)
    store = open_store(assignment, control, wait_s)
    address = assignment.bind or control.local_address
    return CollectiveGroup.init(store, rank=rank, size=size, address=address)


def open_store(
    assignment: Assignment, control: ControlConnection, wait_s: float, prefix: str = ""
) -> CoordinatorStore:
    """Connects to the store in which the workers of one view meet."""
    return CoordinatorStore(
        control.host,
        control.port,
        token=assignment.token,
        who=assignment.process_name,
        timeout_s=wait_s,
        prefix=prefix,
        retry_s=REJOIN_TIMEOUT_S if assignment.elastic else None,
    )


def start_heartbeats(
    control: ControlConnection,
    rank: int,
    clock: PhaseClock,
    closing: threading.Event,
    step: Callable[[], int],
) -> None:
    """Sends one every second until `closing`; exits if the coordinator is unreachable."""

    def beat() -> None:
        while not closing.wait(HEARTBEAT_S):
            try:
                control.send(Heartbeat(rank, step(), PHASES[clock.current], clock.changes))
            except PacelineError:
                if not closing.is_set():
                    os._exit(1)
                return

    threading.Thread(target=beat, daemon=True).start()


class Session:
    """Files, clocks, telemetry and connections of a worker."""

    context: WorkerContext
    """Set by `join_group`."""

    def __init__(self, assignment: Assignment, control: ControlConnection, wait_s: float) -> None:
        self.assignment = assignment
        self.control = control
        self.rank, self.size = assignment.index, assignment.workers
        self.strategy = parse_strategy(assignment.strategy)
        self._wait_s = wait_s
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
                namespace=network_namespace(),
                threads=assignment.threads,
                cores=allowed_cores(),
                quota=quota_cores(),
            )
        )
        self.telemetry.start()
        self.client: CoordinatorClient | None = None
        self._closing = threading.Event()
        self._ended_view = -1

    def join_group(self, replica: Replica, *, seed: int) -> None:
        """Starts the heartbeats and forms the first process group with the other workers."""
        assignment = self.assignment
        self.context = WorkerContext(
            rank=0,
            size=1,
            replica=replica,
            group=CollectiveGroup(0, 1),
            control=self.control,
            clock=self.clock,
            token=assignment.token,
            timeout_s=self._wait_s,
            seed=seed,
            is_elastic=assignment.elastic,
            on_bucket_ready=self.slowdown.apply if self.slowdown is not None else None,
        )
        start_heartbeats(
            *(self.control, self.rank, self.clock, self._closing),
            lambda: self.client.step if self.client is not None else 0,
        )
        if assignment.elastic:
            threading.Thread(target=self._receive_alerts, daemon=True).start()
        if not assignment.joins:
            self.form_group(self.rank, self.size)
        if self.rank > 0 or assignment.joins:
            # A worker that joins must not repeat the random numbers of its predecessor.
            torch.manual_seed(seed + self.rank * RANK_STRIDE + assignment.joins * JOIN_STRIDE)

    def form_group(self, rank: int, size: int) -> WorkerContext:
        """Meets the other workers of the view. Raises PeerLost if one is lost meanwhile."""
        assignment, view = self.assignment, self.control.view
        group = CollectiveGroup(rank, size)
        if size > 1:
            store = open_store(assignment, self.control, self._wait_s, f"view-{view}/")
            group = CollectiveGroup(rank, size, store=store)
        self.context = dataclasses.replace(
            self.context, rank=rank, size=size, group=group, view=view
        )
        if self._ended_view >= view:
            group.abort()
            raise PeerLost(f"view {view} has ended")
        if size > 1:
            address = assignment.bind or self.control.local_address
            if assignment.elastic:
                group.wait_for_all()
            group.connect(address, CONNECT_TIMEOUT_S if assignment.elastic else None)
        return self.context

    def leave_group(self, view: int) -> None:
        """Leaves the group of a view that has ended, for the next one."""
        self.context.group.destroy()
        self.control.view = view

    def _receive_alerts(self) -> None:
        """Interrupts exchanges with other workers when their view ends."""
        assignment, control = self.assignment, self.control
        while not self._closing.is_set():
            generation = control.generation
            with contextlib.suppress(PacelineError):
                alerts = AlertConnection(
                    control.host,
                    control.port,
                    token=assignment.token,
                    who=assignment.process_name,
                    pid=os.getpid(),
                    timeout_s=self._wait_s,
                    incarnation=control.incarnation,
                )
                while not self._closing.is_set():
                    self._ended_view = alerts.receive()
                    if self._ended_view >= control.view:
                        self.context.group.abort()
            if not assignment.may_outlive:
                return
            control.wait_until_rejoined(generation)

    def start(self, replica: Replica, *, seed: int) -> TrainState:
        """Joins the other workers and returns the initial state.

        If one is lost meanwhile, each worker that remains starts from its own copy.
        """
        try:
            with peer_errors("the workers could not meet", inside_layers=True):
                self.join_group(replica, seed=seed)
                if not self.assignment.joins:
                    return self.broadcast_state()
        except PeerLost as error:
            if not self.assignment.elastic:
                raise
            self.control.send(ExchangeFailed(self.rank, 0, str(error)))
        self.context.group.destroy()
        self.context = dataclasses.replace(
            self.context, rank=0, size=1, group=CollectiveGroup(0, 1)
        )
        state = TrainState(state_from_model(replica.model, replica.optimizer))
        if self.assignment.checkpoint is not None and not self.assignment.joins:
            state = self._load_checkpoint(state)
            replica.bucket_layout = state.shared.plain["layout"]
            replica.comm_backend = state.shared.plain.get("way")
            replica.comm_algorithms = state.shared.plain.get("algorithms")
            load_into_model(state.shared, replica.model, replica.optimizer)
        return state

    def _load_checkpoint(self, mine: TrainState) -> TrainState:
        assert self.assignment.checkpoint is not None
        state = self.files.load(self.assignment.checkpoint)
        if state.fingerprint() != mine.fingerprint():
            raise CheckpointError(
                f"checkpoint {self.assignment.checkpoint} belongs to another model; "
                "resume with the model that created it"
            )
        return state

    def broadcast_state(self) -> TrainState:
        """Returns the initial state of worker 0 or its checkpoint, equal on every worker."""
        replica, group = self.context.replica, self.context.group
        state = TrainState(state_from_model(replica.model, replica.optimizer))
        if self.assignment.checkpoint is not None:
            if self.rank == 0:
                state = self._load_checkpoint(state)
            counted = Section(plain={"count": len(state.workers)})
            workers = [
                group.broadcast_section(state.workers[i] if self.rank == 0 else None)
                for i in range(group.broadcast_section(counted).plain["count"])
            ]
            state = TrainState(group.broadcast_section(state.shared), workers)
            replica.bucket_layout = state.shared.plain["layout"]
            # A run with another number of workers adds in another order anyway.
            replica.comm_backend = state.shared.plain.get("way")
            replica.comm_algorithms = state.shared.plain.get("algorithms")
        elif self.size > 1:
            state = TrainState(_broadcast_initial_state(state.shared, group))
        try:
            load_into_model(state.shared, replica.model, replica.optimizer)
        except StateError as error:
            raise CheckpointError(str(error)) from None
        return state

    def probe_exchange(self) -> ExchangeProbe | None:
        """Measures exchanges with the other workers, if the strategy needs to know them."""
        if not self.strategy.needs_exchange_probe or self.assignment.joins:
            return None
        try:
            with peer_errors("the exchange could not be measured", inside_layers=True):
                return probe_exchange(self.context.group, self.context.replica.trained)
        except PeerLost as error:
            if not self.assignment.elastic:
                raise
            self.control.send(ExchangeFailed(self.rank, 0, str(error)))
            return None

    def write_input(self, facts: dict[str, Any]) -> None:
        self.files.events.write(InputStats(t=round(self.clock.now_s(), 6), **facts))

    def close(self) -> None:
        assert self.client is not None
        self.telemetry.stop()
        totals = self.client.totals()
        kept = {name: totals[name] for name in ("phases", "bytes_sent", "peak_rss_bytes")}
        self.telemetry.report(WorkerEnded(t=round(self.clock.now_s(), 6), **kept))
        self._closing.set()
        self.context.group.destroy()
        self.control.close()


def _broadcast_initial_state(mine: Section, group: CollectiveGroup) -> Section:
    """Worker 0's state at the beginning; in place where the optimizer remembers nothing yet, for a
    large model has no room for a second copy of itself."""
    weights = sorted(k for k in mine.tensors if is_model_tensor(k))
    fresh = len(weights) == len(mine.tensors) and not mine.plain
    facts = Section(plain={"fingerprint": fingerprint_of(mine.tensors), "fresh": fresh})
    first = group.broadcast_section(facts if group.rank == 0 else None).plain
    if not first["fresh"]:
        return group.broadcast_section(mine)
    if first["fingerprint"] != fingerprint_of(mine.tensors):
        raise UsageError(f"worker {group.rank} built a different model than worker 0")
    for name in weights:
        weight = mine.tensors[name].detach()
        flat = weight.contiguous()
        group.broadcast(flat)
        if flat.data_ptr() != weight.data_ptr():
            weight.copy_(flat)
    return Section({name: mine.tensors[name] for name in weights})


class SlowdownInjector:
    """Stretches the compute of each step (`--slow`), and delays its first exchange (`--delay`).

    `begin_step` marks the start of the compute; `apply` sleeps for the time that is missing so
    far. It is called before gradients leave, as they would leave late on a slow machine, and
    sleeps once for every stretch of compute.
    """

    def __init__(self, slowdowns: tuple[InjectedSlowdown, ...], rank: int, clock: PhaseClock):
        self._slowdowns = slowdowns
        self._rank = rank
        self._clock = clock
        self._active = ActiveSlowdown()
        self._delayed = True
        """This step's first exchange has been delayed, or needs no delay."""
        self._applied_until = (time.perf_counter(), time.thread_time())

    @classmethod
    def for_worker(
        cls, slowdowns: Iterable[Mapping[str, float]], rank: int, clock: PhaseClock
    ) -> SlowdownInjector | None:
        """The injector of worker `rank`; None if no slowdown concerns it."""
        parsed = (InjectedSlowdown.from_plain(dict(plain)) for plain in slowdowns)
        own = tuple(slowdown for slowdown in parsed if slowdown.worker == rank)
        return cls(own, rank, clock) if own else None

    @property
    def max_factor(self) -> float:
        """The largest slowdown factor that this worker will have."""
        return max(slowdown.factor / slowdown.cores for slowdown in self._slowdowns)

    def begin_step(self, epoch: float) -> None:
        """Starts a step at this position of the run, in epochs."""
        self._active = ActiveSlowdown.of(self._slowdowns, self._rank, epoch)
        self._delayed = self._active.delay_s == 0.0
        self._applied_until = (time.perf_counter(), time.thread_time())

    def apply(self) -> None:
        """Sleeps until the compute since the last call has taken as long as it should."""
        began, busy_until = self._applied_until
        elapsed_s = time.perf_counter() - began
        wall_s = self._active.wall_s(elapsed_s, time.thread_time() - busy_until)
        time.sleep(max(0.0, wall_s - elapsed_s))
        if not self._delayed:
            self._clock.enter(COMM)
            time.sleep(self._active.delay_s)
            self._clock.enter(BACKWARD)
            self._delayed = True
        self._applied_until = (time.perf_counter(), time.thread_time())
