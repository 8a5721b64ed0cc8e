"""One virtual run: the real coordinator, and everybody it talks to as events in virtual time.

The coordinator and the server's shard are the protocol's own objects. What a message or a share
of a batch takes comes from the fleet and the cost model; what it does to the weights from the
learner. Workers of one strategy are played together by a crew.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Protocol

import numpy as np

from paceline.plan.cost_model import FORWARD_FRACTION, Workload
from paceline.protocol.coordinator import Coordinator
from paceline.protocol.history import CoordinatorMemory
from paceline.protocol.messages import (
    CheckpointWritten,
    EnterPhase,
    EpochEnd,
    EpochEndReply,
    Evaluate,
    Evaluated,
    FinishRun,
    Lease,
    LeaseGranted,
    LossDiverged,
    Message,
    PhaseEntered,
    PlannedSteps,
    Quiesce,
    Quiesced,
    SaveCheckpoint,
    ServerReady,
    TrainingResumed,
    WorkerFinished,
    WorkerReady,
)
from paceline.protocol.pace import Send, SendToServers
from paceline.protocol.run_spec import Action, EmitEvent, EndRun, RunSpec
from paceline.specs.strategy import Strategy
from paceline.strategies.grouped.spec import Grouped
from paceline.strategies.ps.spec import ParameterServer
from paceline.strategies.registry import make_pace, make_switch_policy
from paceline.telemetry.events import PHASES, Event
from paceline.twin.backend import StepOutcome, WeightsBackend
from paceline.twin.machines import Floats, SimulatedMachines
from paceline.twin.timeline import Callback, FifoResource, Timeline

DETECT_S = 1.0
"""A worker that dies is missed after so many seconds, as its process or its heartbeat is."""


class MessageDelivery(Protocol):
    """Brings messages in its own way; `deed` is told when one is there.

    Without one everything comes when it is due, and what nobody else can come before at once.
    """

    def to_coordinator(self, worker: int, at_s: float, deed: Callback) -> None:
        """From a worker to the coordinator."""
        ...

    def to_worker(self, worker: int, at_s: float, deed: Callback) -> None:
        """From the coordinator to a worker."""
        ...

    def to_servers(self, at_s: float, deed: Callback) -> None:
        """From the coordinator to the servers."""
        ...

    def push(self, worker: int, at_s: float, gradient: Callback, word: Callback) -> None:
        """A gradient to the servers, and word of it to the coordinator."""
        ...


class StrategySimulation(Protocol):
    """Plays all workers while one strategy is in force."""

    bytes_sent: float
    bytes_before: float

    def on_steps(self, worker: int, steps: PlannedSteps, now: float) -> None: ...

    def on_go(self, worker: int, go: LeaseGranted, now: float) -> None: ...

    def on_order(self, message: Message, now: float) -> None: ...

    def settle(self, worker: int, version: int, now: float, then: Callable[[float], None]) -> None:
        """Bring a worker to the newest weights; `then` is told when it has them."""
        ...

    def leave(self) -> None:
        """Another strategy comes, or the end: hand over what was counted."""
        ...


@dataclass
class PhaseTotals:
    """Where each worker's virtual time goes."""

    workers: int
    seconds: dict[str, Floats] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.seconds = {name: np.zeros(self.workers) for name in PHASES}

    def add(self, phase: str, worker: int, seconds: float) -> None:
        self.seconds[phase][worker] += seconds

    def add_all(self, phase: str, seconds: Floats | float) -> None:
        self.seconds[phase] += seconds

    def computed(self, worker: int, seconds: float) -> None:
        self.seconds["forward"][worker] += seconds / 3
        self.seconds["backward"][worker] += seconds * 2 / 3


class Simulator:
    """Runs a plan to its end; deterministic: the same inputs give the same events."""

    def __init__(
        self,
        plan: RunSpec,
        fleet: SimulatedMachines,
        work: Workload,
        learner: WeightsBackend,
        timeline: Timeline,
        *,
        note: Callable[[Event], None] = lambda event: None,
        model_path: Path | None = None,
        memory: CoordinatorMemory | None = None,
        splits: tuple[str, ...] = (),
        postman: MessageDelivery | None = None,
    ) -> None:
        self.plan = plan
        self.fleet = fleet
        self.pool = fleet.pool
        self.work = work
        self.learner = learner
        self.timeline = timeline
        self.coordinator = Coordinator(
            plan,
            now=timeline.now,
            paces=make_pace,
            policies=make_switch_policy,
            memory=memory,
        )
        self.clocks = PhaseTotals(plan.workers)
        self.steps = [0] * plan.workers
        """That each worker made by itself."""
        self.joint_steps = 0
        """That all made together."""
        self.end: EndRun | None = None
        self.state_bytes = work.bytes * (1 + work.slots)
        self._delivery = postman
        self._note = note
        self._model_path = model_path
        self._splits = splits
        self._control = FifoResource()
        self._control_s = self.pool.control_ms / 1e3
        self._simulation: StrategySimulation | None = None
        self._crew_strategy: Strategy = plan.strategy
        self._entering: set[int] = set()
        self._diverged_workers: set[int] = set()
        """Workers that have said that their loss diverges."""
        self.dead: set[int] = set()
        self.observers: list[Callable[[float], None]] = []
        """Told the time whenever the coordinator has heard something."""
        self._entered_at: dict[int, float] = {}
        self._settle_s = [0.0] * plan.workers
        self._sent = self._before = 0.0
        self._answered = 0
        self._lr = 0.0
        self._evaluate_s = 0.0

    def run(self) -> EndRun:
        work, speeds = self.work, self._speeds()
        for server in range(self.plan.servers):
            self.send(0, ServerReady(server, "virtual", 1), self.timeline.now)
        for worker in range(self.plan.workers):
            ready = WorkerReady(
                worker, work.samples, work.batch, work.epochs, self._splits, speeds[worker]
            )
            self.send(worker, ready, self.timeline.now)
        for worker, host in enumerate(self.fleet.hosts):
            if host.fails_at_s is not None:
                self._plan_death(worker, host.fails_at_s)
        if not self.timeline.run():
            raise AssertionError(
                f"everybody waits at {self.timeline.now:.6f} virtual seconds: the run is stuck"
            )
        assert self.end is not None
        self._leave_crew()
        return self.end

    def _speeds(self) -> list[float]:
        share = max(1, self.work.batch // self.plan.workers)
        return [share / max(c.step_s(share), 1e-12) for c in self.fleet.compute]

    def _plan_death(self, worker: int, at_s: float) -> None:
        def die(now: float) -> None:
            self.dead.add(worker)
            step = self.steps_of(worker)
            error = f"worker {worker} ({self.fleet.hosts[worker].host}) died at step {step}"

            def notice(later: float) -> None:
                self.execute(self.coordinator.stop("failed", error), later)

            self.timeline.schedule(now + DETECT_S, notice)

        self.timeline.schedule(at_s, die)

    def steps_of(self, worker: int) -> int:
        return self.steps[worker] + self.joint_steps

    # ---- messages -----------------------------------------------------------------------------

    def send(self, worker: int, message: Message, at_s: float) -> None:
        """From a worker to the coordinator, which hears one after another."""
        if worker in self.dead:
            return
        arrives = at_s + self.fleet.latency[worker]
        if self._delivery is None:
            self.timeline.schedule(arrives, lambda now: self.deliver_to_coordinator(message, now))
        else:
            self._delivery.to_coordinator(
                worker, arrives, lambda now: self.deliver_to_coordinator(message, now)
            )

    def send_push(self, worker: int, message: Message, at_s: float, gradient: Callback) -> None:
        """A gradient to the servers, and word of it to the coordinator."""
        if worker in self.dead:
            return
        arrives = at_s + self.fleet.latency[worker]
        if self._delivery is not None:
            self._delivery.push(
                worker, arrives, gradient, lambda now: self.deliver_to_coordinator(message, now)
            )
            return

        def both(now: float) -> None:
            gradient(now)
            self.deliver_to_coordinator(message, now)

        self.timeline.schedule(arrives, both)

    def diverging(self, worker: int, told: StepOutcome, lease: Lease, at_s: float) -> None:
        """Said once a strategy, as a worker does before its report."""
        if worker not in self._diverged_workers:
            self._diverged_workers.add(worker)
            loss = (told.loss_sum or 0.0) / max(1, lease.samples)
            message = LossDiverged(worker, self.steps_of(worker), loss, told.diverged or "")
            self.send(worker, message, at_s)

    def deliver_to_coordinator(self, message: Message, now: float) -> None:
        heard = self._control.reserve(now, self._control_s)
        actions = self.coordinator.handle(message, heard)
        if actions:
            self.execute(actions, heard)
        for watch in self.observers:
            watch(now)

    def execute(self, actions: list[Action], now: float) -> None:
        for action in actions:
            if isinstance(action, Send):
                worker, message = action.worker, action.message
                arrives = now + self.fleet.latency[worker]
                if self._delivery is None:
                    self._deliver_to_worker(worker, message, arrives)
                else:
                    self._delivery.to_worker(
                        worker, arrives, partial(self._deliver_to_worker, worker, message)
                    )
            elif isinstance(action, SendToServers):
                assert self._simulation is not None
                if self._delivery is None:
                    self._simulation.on_order(action.message, now)
                else:
                    self._delivery.to_servers(
                        now, partial(self._simulation.on_order, action.message)
                    )
            elif isinstance(action, EmitEvent):
                self._note(action.event)
            else:
                assert isinstance(action, EndRun)
                self.end = action
                self.timeline.stop()

    def _deliver_to_worker(self, worker: int, message: Message, now: float) -> None:
        """What reaches a worker at `now`, which may lie ahead of the timeline by a message."""
        if isinstance(message, LeaseGranted):
            if self._entered_at:
                self._resumed(worker, now)
            assert self._simulation is not None
            self._simulation.on_go(worker, message, now)
        elif isinstance(message, PlannedSteps):
            self._resumed(worker, now)
            assert self._simulation is not None
            self._simulation.on_steps(worker, message, now)
        elif isinstance(message, EnterPhase):
            self._enter(worker, message, now)
        elif isinstance(message, Quiesce):
            self._quiesce(worker, message, now)
        elif isinstance(message, Evaluate):
            self._evaluate(worker, message.split, now)
        elif isinstance(message, SaveCheckpoint):
            path = self.learner.save(message.name, message.coordinator_state) if worker == 0 else ""
            self.send(worker, CheckpointWritten(worker, path), now)
        elif isinstance(message, EpochEnd):
            self.send(worker, EpochEndReply(worker, True), now)
        else:
            assert isinstance(message, FinishRun)
            self._finish(worker, message, now)

    # ---- between stretches of training --------------------------------------------------------

    def _enter(self, worker: int, message: EnterPhase, now: float) -> None:
        """All workers hand over together: the last one to be told begins the new strategy."""
        self._entering.add(worker)
        if message.switching:
            self._entered_at[worker] = now
        if len(self._entering) < self.plan.workers:
            return
        self._entering.clear()
        self._diverged_workers.clear()
        strategy = self.plan.strategy.phases[message.phase]
        began = now
        if self._simulation is not None:
            now += self._handover_s(self._crew_strategy, strategy)
            self._leave_crew()
        self._simulation = make_simulation(self, strategy, message.groups)
        self._crew_strategy = strategy
        self.learner.enter(strategy, keep=message.snapshot, restore=message.restore)
        if message.switching:
            self.clocks.add_all("switch", now - began)
        for each in range(self.plan.workers):
            self.send(each, PhaseEntered(each), now)

    def _handover_s(self, before: Strategy, after: Strategy) -> float:
        """Everybody fetches the state from servers; one sends each server its part."""
        seconds = 0.0
        if uses_servers(before):
            lane = servers_bandwidth(self, before)
            seconds += max(self.fleet.latency) + self.state_bytes * self.plan.workers / lane
        if uses_servers(after):
            seconds += max(self.fleet.latency) + self.state_bytes / servers_bandwidth(self, after)
        return seconds

    def _leave_crew(self) -> None:
        if self._simulation is not None:
            self._sent += self._simulation.bytes_sent
            self._before += self._simulation.bytes_before
            self._simulation.leave()
            self._simulation = None

    def _quiesce(self, worker: int, message: Quiesce, now: float) -> None:
        assert self._simulation is not None

        def settled(at_s: float) -> None:
            self._settle_s[worker] = at_s - now
            self.clocks.add("comm_exposed", worker, at_s - now)
            if not self._answered:
                self._lr = self.learner.settle()
            self._answered = (self._answered + 1) % self.plan.workers
            self.send(worker, Quiesced(worker, "virtual", self._lr), at_s)

        self._simulation.settle(worker, message.version, now, settled)

    def _resumed(self, worker: int, now: float) -> None:
        entered = self._entered_at.pop(worker, None)
        if entered is not None:
            self.send(worker, TrainingResumed(worker, self._settle_s[worker] + now - entered), now)

    def _evaluate(self, worker: int, split: str, now: float) -> None:
        share = self.work.evaluated.get(split, 0) / self.plan.workers
        seconds = FORWARD_FRACTION * share * self.fleet.compute[worker].per_sample_s
        self.clocks.add("eval", worker, seconds)
        if worker == 0:
            self._evaluate_s += seconds
        # One evaluation serves: all hold the same weights, and worker 0 answers for all.
        loss_sum, correct, count = self.learner.evaluate(split) if worker == 0 else (0.0, None, 0)
        self.send(worker, Evaluated(worker, loss_sum, correct, count), now + seconds)

    def _finish(self, worker: int, message: FinishRun, now: float) -> None:
        if worker == 0:
            self._leave_crew()
            if message.save_model and self._model_path is not None:
                self.learner.save_model(self._model_path)
        self.send(worker, WorkerFinished(worker, self._totals(worker, now)), now)

    def _totals(self, worker: int, now: float) -> dict[str, object]:
        phases = {name: float(s[worker]) for name, s in self.clocks.seconds.items()}
        # Between two questions of the coordinator a worker waits for the others' answers.
        phases["wait"] += max(0.0, now - sum(phases.values()))
        stages = dict.fromkeys(("start", "read", "prepare", "save"), 0.0)
        stages["evaluate"] = self._evaluate_s
        stages["train"] = max(0.0, now - stages["evaluate"])
        share = 1 / self.plan.workers
        return {
            "phases": phases,
            "stages": stages,
            "bytes_sent": round(self._sent * share),
            "bytes_before": round(self._before * share),
            "parameter_bytes": self.work.bytes,
            "peak_rss_bytes": None,
            "steps": self.steps_of(worker),
        }


def uses_servers(strategy: Strategy) -> bool:
    return isinstance(strategy, ParameterServer | Grouped)


def servers_bandwidth(world: Simulator, strategy: Strategy) -> float:
    """Of all servers together: each worker's machine holds the servers of its number."""
    servers = strategy.servers_for(world.plan.workers)
    links = [world.fleet.links[s % world.plan.workers] for s in range(servers)]
    return servers * min(link.bytes_per_s for link in links)


def make_simulation(
    world: Simulator, strategy: Strategy, groups: tuple[tuple[int, ...], ...]
) -> StrategySimulation:
    from paceline.twin.lockstep import LockstepSimulation
    from paceline.twin.push_pull import PushPullSimulation

    if uses_servers(strategy):
        return PushPullSimulation(world, strategy, groups)
    return LockstepSimulation(world, strategy)
