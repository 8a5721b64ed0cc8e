"""The parts of a worker process that do not depend on the model or the training loop."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch

from paceline.comm.process_group import CollectiveGroup, CoordinatorStore
from paceline.comm.wire import ControlConnection
from paceline.errors import CheckpointError, PacelineError, StateError, UsageError
from paceline.protocol.exchange_probe import ExchangeProbe
from paceline.protocol.messages import Heartbeat
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
from paceline.strategies.runner import Replica, WorkerContext
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


def connect_group(
    assignment: Assignment, control: ControlConnection, wait_s: float
) -> CollectiveGroup:
    """Waits for the other workers and forms the process group."""
    rank, size = assignment.index, assignment.workers
    if size == 1:
        return CollectiveGroup(rank, size)
    store = CoordinatorStore(
        assignment.host,
        assignment.port,
        token=assignment.token,
        who=assignment.process_name,
        timeout_s=wait_s,
    )
    address = assignment.bind or control.local_address
    return CollectiveGroup.init(store, rank=rank, size=size, address=address)


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

    def join_group(self, replica: Replica, *, seed: int) -> None:
        """Waits for the other workers, forms the process group and starts the heartbeats."""
        assignment = self.assignment
        group = connect_group(assignment, self.control, self._wait_s)
        self.context = WorkerContext(
            rank=self.rank,
            size=self.size,
            replica=replica,
            group=group,
            control=self.control,
            clock=self.clock,
            token=assignment.token,
            timeout_s=self._wait_s,
            seed=seed,
            on_bucket_ready=self.slowdown.apply if self.slowdown is not None else None,
        )
        start_heartbeats(
            *(self.control, self.rank, self.clock, self._closing),
            lambda: self.client.step if self.client is not None else 0,
        )
        if self.rank > 0:
            torch.manual_seed(seed + self.rank * RANK_STRIDE)

    def broadcast_state(self) -> TrainState:
        """Returns the initial state of worker 0 or its checkpoint, equal on every worker."""
        replica, group = self.context.replica, self.context.group
        state = TrainState(state_from_model(replica.model, replica.optimizer))
        if self.assignment.checkpoint is not None:
            if self.rank == 0:
                expected = state.fingerprint()
                state = self.files.load(self.assignment.checkpoint)
                if state.fingerprint() != expected:
                    raise CheckpointError(
                        f"checkpoint {self.assignment.checkpoint} belongs to another model; "
                        "resume with the model that created it"
                    )
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
        if not self.strategy.needs_exchange_probe:
            return None
        return probe_exchange(self.context.group, self.context.replica.trained)

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
