"""The parts of a worker process that do not depend on the model or the training loop."""

from __future__ import annotations

import os
import socket
import threading
from typing import TYPE_CHECKING, Any

import torch

from paceline.comm.control import ControlConnection, StoreClient
from paceline.comm.process_group import CollectiveGroup
from paceline.comm.state_exchange import broadcast_section
from paceline.errors import CheckpointError, PacelineError, StateError, UsageError
from paceline.protocol.messages import Heartbeat
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
from paceline.telemetry.phase_clock import STAGES, PhaseClock
from paceline.telemetry.proc_stats import allowed_cores, quota_cores
from paceline.telemetry.sampler import StepCounters
from paceline.worker.assignment import Assignment
from paceline.worker.run_files import open_run_files
from paceline.worker.slowdown import SlowdownInjector
from paceline.worker.telemetry_reporter import TelemetryReporter

if TYPE_CHECKING:
    from paceline.worker.coordinator_client import CoordinatorClient

HEARTBEAT_S = 1.0
RANK_STRIDE = 1_000_003
"""Worker k's generators are seeded with seed + k times this; worker 0's continue
after the model's initialization."""


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
        store = None
        if self.size > 1:
            store = StoreClient(
                assignment.host,
                assignment.port,
                token=assignment.token,
                who=assignment.process_name,
                timeout_s=self._wait_s,
            )
        group = CollectiveGroup.init(
            store,
            rank=self.rank,
            size=self.size,
            address=assignment.bind or self.control.local_address,
            timeout_s=self._wait_s,
        )
        self.context = WorkerContext(
            rank=self.rank,
            size=self.size,
            replica=replica,
            group=group,
            control=self.control,
            clock=self.clock,
            token=assignment.token,
            timeout_s=self._wait_s,
            on_bucket_ready=self.slowdown.apply if self.slowdown is not None else None,
        )
        threading.Thread(target=self._send_heartbeats, daemon=True).start()
        if self.rank > 0:
            torch.manual_seed(seed + self.rank * RANK_STRIDE)

    def _send_heartbeats(self) -> None:
        """Sends one every second; exits the process if the coordinator is unreachable."""
        clock = self.clock
        while not self._closing.wait(HEARTBEAT_S):
            step = self.client.step if self.client is not None else 0
            try:
                self.control.send(Heartbeat(self.rank, step, PHASES[clock.current], clock.changes))
            except PacelineError:
                if not self._closing.is_set():
                    os._exit(1)
                return

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
                broadcast_section(state.workers[i] if self.rank == 0 else None, group)
                for i in range(broadcast_section(counted, group).plain["count"])
            ]
            state = TrainState(broadcast_section(state.shared, group), workers)
            replica.bucket_layout = state.shared.plain["layout"]
            # A run with another number of workers adds in another order anyway.
            replica.comm_backend = state.shared.plain.get("way")
        elif self.size > 1:
            state = TrainState(_broadcast_initial_state(state.shared, group))
        try:
            load_into_model(state.shared, replica.model, replica.optimizer)
        except StateError as error:
            raise CheckpointError(str(error)) from None
        return state

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
    first = broadcast_section(facts if group.rank == 0 else None, group).plain
    if not first["fresh"]:
        return broadcast_section(mine, group)
    if first["fingerprint"] != fingerprint_of(mine.tensors):
        raise UsageError(f"worker {group.rank} built a different model than worker 0")
    for name in weights:
        group.broadcast_any_layout(mine.tensors[name])
    return Section({name: mine.tensors[name] for name in weights})
