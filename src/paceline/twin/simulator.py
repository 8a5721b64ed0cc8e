"""One simulated run: the real coordinator, with workers and servers as events in virtual time.

The coordinator and the server shard are the protocol's own objects. The duration of messages and
computation comes from the simulated machines and the cost model, their effect on the weights from
the weights backend. The active strategy's simulate facet simulates all of its workers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import numpy as np

from paceline.cluster.pool import Host, Pool
from paceline.plan.cost_model import FORWARD_FRACTION, Workload
from paceline.protocol.coordinator import Coordinator
from paceline.protocol.history import CoordinatorMemory
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
    ServerReady,
    TrainingResumed,
    WorkerFinished,
)
from paceline.protocol.pace import Send, SendToServers
from paceline.protocol.run_spec import Action, EmitEvent, EndRun, InterruptWorker, RunSpec
from paceline.specs.slowdown import InjectedSlowdown
from paceline.specs.strategy import Strategy
from paceline.strategies.registry import make_pace, make_switch_policy, simulation
from paceline.telemetry.events import PHASES, Event
from paceline.twin.failures import Failures
from paceline.twin.machines import Floats, SimulatedMachines
from paceline.twin.startup import first_reports
from paceline.twin.strategy_simulation import CompleteState, StrategySimulation
from paceline.twin.timeline import Callback, FifoResource, Timeline
from paceline.twin.updates import StepOutcome, WeightsBackend, WeightUpdates
from paceline.twin.views import ViewChange


class Simulator:
    """Runs a plan to its end. Deterministic: the same inputs give the same events."""

    def __init__(
        self,
        plan: RunSpec,
        pool: Pool,
        work: Workload,
        weights: WeightsBackend,
        *,
        seed: int = 0,
        slowdowns: tuple[InjectedSlowdown, ...] = (),
        note: Callable[[Event], None] = lambda event: None,
        model_path: Path | None = None,
        memory: CoordinatorMemory | None = None,
        servers_on: Sequence[Host] = (),
        restarts: int = 0,
    ) -> None:
        """`restarts`: restarts of each lost worker, if the run is elastic."""
        self.plan, self.pool, self.work, self.weights = plan, pool, work, weights
        self.updates = WeightUpdates()
        """The weights under the active strategy."""
        self.timeline = Timeline(float(memory["elapsed_s"]) if memory is not None else 0.0)
        self._machines = SimulatedMachines(
            *(pool, plan, work, self.timeline, seed, slowdowns), servers_on=servers_on
        )
        now = self.timeline.now
        self.coordinator = Coordinator(
            plan, now=now, paces=make_pace, policies=make_switch_policy, memory=memory
        )
        self.idle = self.simulation = StrategySimulation()
        self._totals: dict[str, Floats] = {name: np.zeros(plan.workers) for name in PHASES}
        """Virtual seconds of each worker in the views before this one."""
        self._steps_before = np.zeros(plan.workers, dtype=np.int64)
        self._arrange(0, tuple(range(plan.workers)))
        self.failures = Failures(self, restarts if plan.is_elastic else 0, seed)
        self.views = ViewChange(self)
        self.end: EndRun | None = None
        self._note = note
        self._model_path = model_path
        self._control = FifoResource()
        self._control_s = pool.control_ms / 1e3
        self._active_strategy: Strategy | None = None
        self.observers: list[Callable[[float], None]] = []
        """Called with the time after every message that the coordinator has handled."""
        self.is_fresh = True
        """True if no work was received since the strategy was entered."""
        self._sent = self._before = 0.0
        self._lr = 0.0
        self._samples = self.coordinator.history.samples
        """Samples of the state that all workers held last."""

    def _arrange(self, view: int, workers: tuple[int, ...]) -> None:
        """Begins a view; everything that follows is ordered by the ranks of its workers."""
        self.view, self.members, self.size = view, workers, len(workers)
        self.rank_of = {worker: rank for rank, worker in enumerate(workers)}
        self.fleet = self._machines if view == 0 else self._machines.of_view(workers)
        self.clocks: dict[str, Floats] = {name: np.zeros(self.size) for name in PHASES}
        """Virtual seconds of each worker, by time category."""
        self.steps = [int(self._steps_before[worker]) for worker in workers]
        """Steps of each worker on its individual leases."""
        self.joint_steps = 0
        """Steps that all workers of the view took together."""
        self.present = set(workers if view == 0 else ())
        """Workers that know of the view."""
        self.is_interrupted = False
        """True if the workers wait for the next view."""
        self._entering: set[int] = set()
        self._diverged_workers: set[int] = set()
        """Workers that have reported a diverging loss under the active strategy."""
        self._entered_at: dict[int, float] = {}
        self._settle_s = [0.0] * self.size
        self._answered = 0

    def begin_view(self, view: int, workers: tuple[int, ...]) -> StrategySimulation:
        """Moves to another view; returns the simulation that was active."""
        leaving = self.simulation
        self._close_simulation()
        numbers = np.array(self.members, dtype=np.intp)
        for name, seconds in self.clocks.items():
            self._totals[name][numbers] += seconds
        self._steps_before[numbers] = [self.steps_of(rank) for rank in range(self.size)]
        self._arrange(view, workers)
        return leaving

    def run(self) -> EndRun:
        now = self.timeline.now
        for server in range(self.plan.servers):
            self.send_from_server(ServerReady(server, "virtual", 1), 0, now)
        for probe_s, ready in first_reports(self.plan, self.pool, self.work, self.fleet):
            self.send(ready.worker, ready, now + probe_s)
        self.failures.begin()
        try:
            if not self.timeline.run():
                raise AssertionError(
                    f"deadlock at {self.timeline.now:.6f} virtual seconds: every process waits"
                )
            assert self.end is not None
            self._close_simulation()
        finally:
            self.weights.close()
        return self.end

    def steps_of(self, worker: int) -> int:
        return self.steps[worker] + self.joint_steps

    def steps_of_worker(self, number: int) -> int:
        rank = self.rank_of.get(number)
        return int(self._steps_before[number]) if rank is None else self.steps_of(rank)

    def host_of(self, number: int) -> Host:
        """Returns the machine of a worker, which need not be in the view."""
        return self._machines.hosts[number]

    def fail(self, error: str, now: float) -> None:
        """Ends the run with an error."""
        if self.end is None:
            self.execute(self.coordinator.stop("failed", error), now)

    # ---- messages -----------------------------------------------------------------------------
    #
    # Fault schedules override `send`, `send_push`, `send_from_server`, `receive` and `order`.

    def send(
        self, worker: int, message: Message, at_s: float, by: StrategySimulation | None = None
    ) -> None:
        """Sends from a worker to the coordinator, which handles one message at a time.

        It is lost if the worker, or the simulation `by` that sends it, has ended by then.
        """
        number, view = self.members[worker], self.view

        def arrive(now: float) -> None:
            if self.is_sent(number, at_s, by):
                self.handle(message, now, view)

        self.timeline.schedule(at_s + self.fleet.latency[worker], arrive)

    def send_push(
        self,
        worker: int,
        message: Message,
        at_s: float,
        gradient: Callback,
        by: StrategySimulation | None = None,
    ) -> None:
        """Sends a gradient to the servers and its notification to the coordinator."""
        number, view = self.members[worker], self.view

        def arrive(now: float) -> None:
            if self.is_sent(number, at_s, by):
                gradient(now)
                self.handle(message, now, view)

        self.timeline.schedule(at_s + self.fleet.latency[worker], arrive)

    def send_from_server(self, message: Message, server: int, at_s: float) -> None:
        latency_s = self.pool.link_of(self.fleet.servers[server]).latency_s
        self.timeline.schedule(at_s + latency_s, partial(self.handle, message))

    def is_sent(self, number: int, at_s: float, by: StrategySimulation | None) -> bool:
        """Returns whether a worker still existed when it was to send a message."""
        if by is not None and at_s > by.halted_at:
            return False
        died_at = self.failures.died_at.get(number)
        return died_at is None or at_s < died_at

    def report_divergence(
        self, worker: int, outcome: StepOutcome, lease: Lease, at_s: float
    ) -> None:
        """Sent once per strategy, before the worker's report."""
        if worker not in self._diverged_workers:
            self._diverged_workers.add(worker)
            loss = (outcome.loss_sum or 0.0) / max(1, lease.samples)
            message = LossDiverged(worker, self.steps_of(worker), loss, outcome.diverged or "")
            self.send(worker, message, at_s, self.simulation)

    def handle(self, message: Message, now: float, view: int | None = None) -> None:
        """Lets the coordinator handle a message that has arrived, from a worker of a view."""
        handled_at = self._control.reserve(now, self._control_s)
        actions = self.coordinator.handle(message, handled_at, view)
        if actions:
            self.execute(actions, handled_at)
        for watch in self.observers:
            watch(now)

    def execute(self, actions: list[Action], now: float) -> None:
        for action in actions:
            if isinstance(action, Send):
                arrives = now + self._machines.latency[action.worker]
                self.receive(action.worker, action.message, arrives)
            elif isinstance(action, SendToServers):
                self.order(action.message, now)
            elif isinstance(action, EmitEvent):
                self._note(action.event)
            elif isinstance(action, InterruptWorker):
                self.interrupt(action.view, now)
            elif isinstance(action, EndRun):
                self.end = action
                self.timeline.stop()

    def order(self, message: Message, now: float) -> None:
        """Handles a message from the coordinator to the servers."""
        self.views.serving.on_order(message, now)

    def interrupt(self, view: int, now: float) -> None:
        """Ends an exchange in which workers of a view may wait for a lost one."""
        if view == self.view and not self.is_interrupted:
            self.is_interrupted = True
            self.simulation.halt(now)

    def receive(self, number: int, message: Message, now: float) -> None:
        """Handles a message on a worker; `now` may be ahead of the timeline by one latency."""
        if number in self.failures.died_at:
            return
        if isinstance(message, Regroup):
            self.views.on_regroup(number, message, now)
        elif isinstance(message, FormGroup):
            self.views.on_form(number, message, now)
        elif number in self.present and not self.is_interrupted:
            self._follow(self.rank_of[number], message, now)

    def _follow(self, worker: int, message: Message, now: float) -> None:
        """Handles a message of the current view on a worker, named by its rank."""
        self.is_fresh &= not isinstance(message, LeaseGranted | PlannedSteps | Quiesce)
        if isinstance(message, LeaseGranted):
            if self._entered_at:
                self._resumed(worker, now)
            self.simulation.on_lease(worker, message, now)
        elif isinstance(message, PlannedSteps):
            self._resumed(worker, now)
            self.simulation.on_steps(worker, message, now)
        elif isinstance(message, EnterPhase):
            self._enter(worker, message, now)
        elif isinstance(message, Quiesce):
            self._quiesce(worker, message, now)
        elif isinstance(message, Evaluate):
            self._evaluate(worker, message.split, now)
        elif isinstance(message, SaveCheckpoint):
            path = self.weights.save(message.name, message.coordinator_state) if worker == 0 else ""
            self.send(worker, CheckpointWritten(worker, path), now)
        elif isinstance(message, EpochEnd):
            self.weights.lr_gain = message.lr_gain
            if message.keep and worker == 0:
                self.weights.keep()
            self.send(worker, EpochEndReply(worker, True), now)
        elif isinstance(message, FinishRun):
            self._finish(worker, message, now)
        else:
            assert isinstance(message, Dismiss)

    # ---- between phases of training -----------------------------------------------------------

    def _enter(self, worker: int, message: EnterPhase, now: float) -> None:
        """Switches all workers together, when the last one has received the message."""
        self._entering.add(worker)
        if message.switching:
            self._entered_at[worker] = now
        if len(self._entering) < self.size:
            return
        self._entering.clear()
        self.weights.lr_gain = message.lr_gain
        self._diverged_workers.clear()
        strategy = self.plan.strategy.phases[message.phase]
        began = now
        if self._active_strategy is not None:
            now += self._handover_s(self._active_strategy, strategy)
            self._close_simulation()
        self.simulation = simulation(strategy)(strategy, self, message.groups)
        self._active_strategy = strategy
        self.views.forget()
        self.is_fresh = True
        self.updates = self.weights.enter(
            strategy,
            message.groups,
            keep=message.snapshot,
            restore=message.restore,
            best=message.best,
        )
        self.settle(self._samples)
        if message.switching:
            self.clocks["switch"] += now - began
        for each in range(self.size):
            self.send(each, PhaseEntered(each), now)

    def note_state(self, samples: int) -> None:
        """Notes how many samples the state contains that all workers hold."""
        self._samples = samples

    def settle(self, samples: int) -> None:
        """Notes the state that all workers hold now, in case one of them is lost."""
        self._samples = samples
        state = self.updates.recover_state() if self.failures.expected else None
        self.simulation.settle(CompleteState(samples, samples, state))

    def _handover_s(self, before: Strategy, after: Strategy) -> float:
        """All workers fetch the state from the old servers; one sends it to the new ones."""
        seconds = 0.0
        for strategy, copies in ((before, self.size), (after, 1)):
            if servers := strategy.servers_for(self.plan.workers):
                bandwidth = self.server_bytes_per_s(servers)
                seconds += max(self.fleet.latency) + self.work.state_bytes * copies / bandwidth
        return seconds

    def server_bytes_per_s(self, servers: int) -> float:
        """Joint bandwidth of the servers; those on one machine share its link."""
        hosts = self.fleet.servers[:servers]
        shared = Counter(host.host for host in hosts)
        return servers * min(self.pool.link_of(h).bytes_per_s / shared[h.host] for h in hosts)

    def _close_simulation(self) -> None:
        self._sent += self.simulation.bytes_sent
        self._before += self.simulation.bytes_before
        self.simulation.close()
        self.simulation = self.idle

    def _quiesce(self, worker: int, message: Quiesce, now: float) -> None:
        simulation = self.simulation

        def settled(at_s: float) -> None:
            if self.simulation is not simulation:
                return  # The view has ended.
            self._settle_s[worker] = at_s - now
            self.clocks["comm_exposed"][worker] += at_s - now
            if not self._answered:
                self._lr = self.weights.settle()
                self.settle(message.samples)
            self._answered = (self._answered + 1) % self.size
            self.send(worker, Quiesced(worker, "virtual", self._lr), at_s)

        self.simulation.sync_weights(worker, message.version, now, settled)

    def _resumed(self, worker: int, now: float) -> None:
        entered = self._entered_at.pop(worker, None)
        if entered is not None:
            self.send(worker, TrainingResumed(worker, self._settle_s[worker] + now - entered), now)

    def _evaluate(self, worker: int, split: str, now: float) -> None:
        share = self.work.evaluated.get(split, 0) / self.size
        seconds = FORWARD_FRACTION * share * self.fleet.compute[worker].per_sample_s
        self.clocks["eval"][worker] += seconds
        # All workers hold the same weights, so worker 0 evaluates for all of them.
        loss_sum, correct, count = self.weights.evaluate(split) if worker == 0 else (0.0, None, 0)
        self.send(worker, Evaluated(worker, loss_sum, correct, count), now + seconds)

    def _finish(self, worker: int, message: FinishRun, now: float) -> None:
        if worker == 0:
            self._close_simulation()
            if message.save_model and self._model_path is not None:
                self.weights.save_model(self._model_path)
        self.send(worker, WorkerFinished(worker, self._count_up(worker, now)), now)

    def _count_up(self, worker: int, now: float) -> dict[str, object]:
        number = self.members[worker]
        phases = {
            name: float(seconds[worker] + self._totals[name][number])
            for name, seconds in self.clocks.items()
        }
        # Between two requests of the coordinator, a worker waits for the other workers.
        phases["wait"] += max(0.0, now - sum(phases.values()))
        stages = dict.fromkeys(("start", "read", "prepare", "save"), 0.0)
        stages["evaluate"] = phases["eval"]
        stages["train"] = max(0.0, now - stages["evaluate"])
        share = 1 / self.size
        return {
            "phases": phases,
            "stages": stages,
            "bytes_sent": round(self._sent * share),
            "bytes_before": round(self._before * share),
            "parameter_bytes": self.work.bytes,
            "peak_rss_bytes": None,
            "steps": self.steps_of(worker),
        }
