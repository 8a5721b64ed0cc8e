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
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from paceline.cluster.pool import Host, Pool
from paceline.plan.cost_model import FORWARD_FRACTION, Workload, allreduce_s
from paceline.protocol.coordinator import Coordinator
from paceline.protocol.exchange_probe import ExchangeProbe
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
from paceline.specs.slowdown import InjectedSlowdown
from paceline.specs.strategy import Strategy, WorkerGroups
from paceline.strategies.registry import make_pace, make_switch_policy, simulation
from paceline.telemetry.events import PHASES, Event
from paceline.twin.machines import Floats, SimulatedMachines
from paceline.twin.timeline import Callback, FifoResource, Timeline
from paceline.twin.updates import StepOutcome, WeightsBackend, WeightUpdates
from paceline.worker.probes import MAX_PROBE_NUMEL, PROBE_PASSES, ROUNDS, probed_samples

if TYPE_CHECKING:
    from paceline.twin.gradient_backend import GradientBackend

DETECT_S = 1.0
"""Time until a dead worker is noticed, as by its process or its heartbeat in a real run."""

StrategyT = TypeVar("StrategyT", bound=Strategy)


class StrategySimulation:
    """Simulate facet of a strategy: all workers (and servers) while it is active.

    A subclass is called with the spec, the `Simulator` and the groups of workers. Time and weights
    are separate, because both depths share the time.
    """

    bytes_sent = 0.0
    bytes_before = 0.0
    """Bytes without a codec."""

    @staticmethod
    def updates(spec: Any, backend: GradientBackend, groups: WorkerGroups) -> WeightUpdates:
        """Computes the weights at depth `learn`, in virtual-time order; by default exactly."""
        from paceline.twin.exact import ExactUpdate

        return ExactUpdate(backend)

    def on_steps(self, worker: int, steps: PlannedSteps, now: float) -> None:
        raise AssertionError("planned steps under a parameter server")

    def on_lease(self, worker: int, granted: LeaseGranted, now: float) -> None:
        raise AssertionError("a lease for one worker under a planned strategy")

    def on_order(self, message: Message, now: float) -> None:
        """Handles a message from the coordinator to the servers."""
        raise AssertionError("an order to servers under a planned strategy")

    def sync_weights(self, worker: int, version: int, now: float, then: Callback) -> None:
        """Brings a worker to the newest weights, then calls `then` with the time."""
        then(now)

    def close(self) -> None:
        """Called before the next strategy, or at the end; adds up the times."""


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
    ) -> None:
        self.plan, self.pool, self.work, self.weights = plan, pool, work, weights
        self.updates = WeightUpdates()
        """The weights under the active strategy."""
        self.timeline = Timeline(float(memory["elapsed_s"]) if memory is not None else 0.0)
        self.fleet = SimulatedMachines(
            *(pool, plan, work, self.timeline, seed, slowdowns), servers_on=servers_on
        )
        now = self.timeline.now
        self.coordinator = Coordinator(
            plan, now=now, paces=make_pace, policies=make_switch_policy, memory=memory
        )
        self.clocks: dict[str, Floats] = {name: np.zeros(plan.workers) for name in PHASES}
        """Virtual seconds of each worker, by time category."""
        self.steps = [0] * plan.workers
        """Steps of each worker on its individual leases."""
        self.joint_steps = 0
        """Steps that all workers took together."""
        self.end: EndRun | None = None
        self._note = note
        self._model_path = model_path
        self._control = FifoResource()
        self._control_s = pool.control_ms / 1e3
        self.simulation = StrategySimulation()
        self._active_strategy: Strategy | None = None
        self._entering: set[int] = set()
        self._diverged_workers: set[int] = set()
        """Workers that have reported a diverging loss under the active strategy."""
        self.dead: set[int] = set()
        self.dead_hosts: set[str] = set()
        self.observers: list[Callable[[float], None]] = []
        """Called with the time after every message that the coordinator has handled."""
        self._entered_at: dict[int, float] = {}
        self._settle_s = [0.0] * plan.workers
        self._sent = self._before = 0.0
        self._answered = 0
        self._lr = 0.0

    def run(self) -> EndRun:
        work, now, splits = self.work, self.timeline.now, tuple(self.work.evaluated)
        for server in range(self.plan.servers):
            self.send(0, ServerReady(server, "virtual", 1), now)
        share = max(1, work.batch // self.plan.workers)
        exchange, exchange_s = self._probe_exchange()
        strategy, factors = self.plan.strategy, None
        if strategy.needs_exchange_probe and strategy.needs_worker_speeds:
            factors = self.fleet.draw_factors(PROBE_PASSES - 1)
        for worker, cost in enumerate(self.fleet.compute):
            speed, cv, probe_s = share / max(cost.step_s(share), 1e-12), 0.0, exchange_s
            if factors is not None:
                # The first pass warms up, as the first step of any other run does.
                mine = factors[:, worker]
                cv = float(mine.std(ddof=1) / mine.mean())
                probe_s += float(mine.sum()) * cost.step_s(probed_samples(share))
            ready = WorkerReady(
                worker,
                work.samples,
                work.batch,
                work.epochs,
                splits,
                speed,
                exchange=exchange,
                cv=cv,
            )
            self.send(worker, ready, now + probe_s)
        for worker, host in enumerate(self.fleet.hosts):
            if host.fails_at_s is not None:
                self.timeline.schedule(host.fails_at_s, partial(self._die, worker))
        for host in self.fleet.dedicated:
            if host.fails_at_s is not None:
                self.timeline.schedule(host.fails_at_s, partial(self._lose_servers, host.host))
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

    def _probe_exchange(self) -> tuple[ExchangeProbe | None, float]:
        """Returns what workers measure before training, and how long that takes."""
        if not self.plan.strategy.needs_exchange_probe or self.plan.workers == 1:
            return None, 0.0
        pool, hosts, nbytes = self.pool, self.fleet.hosts, self.work.bytes
        latencies = [pool.link_of(host).latency_s for host in hosts]
        message_s = sum(latencies) / len(latencies)
        small_s = allreduce_s(pool, hosts, 1.0)
        probed = min(nbytes, MAX_PROBE_NUMEL * self.work.item_bytes)
        probed_s = allreduce_s(pool, hosts, probed)
        gradient_s = small_s + (probed_s - small_s) * nbytes / probed
        spent_s = ROUNDS * (small_s + probed_s + 2 * message_s)
        return ExchangeProbe(message_s, small_s, gradient_s, nbytes), spent_s

    def _die(self, worker: int, now: float) -> None:
        self.dead.add(worker)
        host, step = self.fleet.hosts[worker].host, self.steps_of(worker)
        self.dead_hosts.add(host)
        self.fail_later(f"worker {worker} ({host}) died at step {step}", now)

    def _lose_servers(self, host: str, now: float) -> None:
        self.dead_hosts.add(host)
        lost = [str(s) for s, each in enumerate(self.fleet.servers) if each.host == host]
        if lost:
            self.fail_later(f"server {', '.join(lost)} ({host}) died", now)

    def fail_later(self, error: str, now: float) -> None:
        """Ends the run with an error, when the coordinator notices it."""

        def notice(later: float) -> None:
            self.execute(self.coordinator.stop("failed", error), later)

        self.timeline.schedule(now + DETECT_S, notice)

    def steps_of(self, worker: int) -> int:
        return self.steps[worker] + self.joint_steps

    # ---- messages -----------------------------------------------------------------------------
    #
    # Fault schedules override `send`, `send_push`, `receive` and `order`.

    def send(self, worker: int, message: Message, at_s: float) -> None:
        """Sends from a worker to the coordinator, which handles one message at a time."""
        if worker not in self.dead:
            arrives = at_s + self.fleet.latency[worker]
            self.timeline.schedule(arrives, partial(self.handle, message))

    def send_push(self, worker: int, message: Message, at_s: float, gradient: Callback) -> None:
        """Sends a gradient to the servers and its notification to the coordinator."""

        def arrive(now: float) -> None:
            gradient(now)
            self.handle(message, now)

        if worker not in self.dead:
            self.timeline.schedule(at_s + self.fleet.latency[worker], arrive)

    def report_divergence(
        self, worker: int, outcome: StepOutcome, lease: Lease, at_s: float
    ) -> None:
        """Sent once per strategy, before the worker's report."""
        if worker not in self._diverged_workers:
            self._diverged_workers.add(worker)
            loss = (outcome.loss_sum or 0.0) / max(1, lease.samples)
            message = LossDiverged(worker, self.steps_of(worker), loss, outcome.diverged or "")
            self.send(worker, message, at_s)

    def handle(self, message: Message, now: float) -> None:
        """Lets the coordinator handle a message that has arrived."""
        handled_at = self._control.reserve(now, self._control_s)
        actions = self.coordinator.handle(message, handled_at)
        if actions:
            self.execute(actions, handled_at)
        for watch in self.observers:
            watch(now)

    def execute(self, actions: list[Action], now: float) -> None:
        for action in actions:
            if isinstance(action, Send):
                arrives = now + self.fleet.latency[action.worker]
                self.receive(action.worker, action.message, arrives)
            elif isinstance(action, SendToServers):
                self.order(action.message, now)
            elif isinstance(action, EmitEvent):
                self._note(action.event)
            elif isinstance(action, EndRun):
                self.end = action
                self.timeline.stop()

    def order(self, message: Message, now: float) -> None:
        """Handles a message from the coordinator to the servers."""
        self.simulation.on_order(message, now)

    def receive(self, worker: int, message: Message, now: float) -> None:
        """Handles a message on a worker; `now` may be ahead of the timeline by one latency."""
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
        if len(self._entering) < self.plan.workers:
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
        self.updates = self.weights.enter(
            strategy,
            message.groups,
            keep=message.snapshot,
            restore=message.restore,
            best=message.best,
        )
        if message.switching:
            self.clocks["switch"] += now - began
        for each in range(self.plan.workers):
            self.send(each, PhaseEntered(each), now)

    def _handover_s(self, before: Strategy, after: Strategy) -> float:
        """All workers fetch the state from the old servers; one sends it to the new ones."""
        seconds, workers = 0.0, self.plan.workers
        state_bytes = self.work.bytes * (1 + self.work.slots)
        for strategy, copies in ((before, workers), (after, 1)):
            if servers := strategy.servers_for(workers):
                bandwidth = self.server_bytes_per_s(servers)
                seconds += max(self.fleet.latency) + state_bytes * copies / bandwidth
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
        self.simulation = StrategySimulation()

    def _quiesce(self, worker: int, message: Quiesce, now: float) -> None:
        def settled(at_s: float) -> None:
            self._settle_s[worker] = at_s - now
            self.clocks["comm_exposed"][worker] += at_s - now
            if not self._answered:
                self._lr = self.weights.settle()
            self._answered = (self._answered + 1) % self.plan.workers
            self.send(worker, Quiesced(worker, "virtual", self._lr), at_s)

        self.simulation.sync_weights(worker, message.version, now, settled)

    def _resumed(self, worker: int, now: float) -> None:
        entered = self._entered_at.pop(worker, None)
        if entered is not None:
            self.send(worker, TrainingResumed(worker, self._settle_s[worker] + now - entered), now)

    def _evaluate(self, worker: int, split: str, now: float) -> None:
        share = self.work.evaluated.get(split, 0) / self.plan.workers
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
        self.send(worker, WorkerFinished(worker, self._totals(worker, now)), now)

    def _totals(self, worker: int, now: float) -> dict[str, object]:
        phases = {name: float(s[worker]) for name, s in self.clocks.items()}
        # Between two requests of the coordinator, a worker waits for the other workers.
        phases["wait"] += max(0.0, now - sum(phases.values()))
        stages = dict.fromkeys(("start", "read", "prepare", "save"), 0.0)
        stages["evaluate"] = float(self.clocks["eval"][0])
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
