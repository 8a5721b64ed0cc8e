"""Simulation of push/pull strategies: workers pull weights, compute and push at their own pace."""

import dataclasses
from array import array
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from paceline.protocol.messages import (
    ApplyUpdate,
    ClipFactor,
    GradientPushed,
    LeaseGranted,
    Message,
    ShardSqNorm,
    StepStats,
)
from paceline.protocol.shard import ServerShard, ShardAction, StepOptimizer, SumGradients
from paceline.twin.simulator import Simulator
from paceline.twin.strategy_simulation import CompleteState, StrategySimulation
from paceline.twin.timeline import Callback, FifoResource
from paceline.twin.updates import EMPTY, StepOutcome


@dataclass(slots=True)
class SimulatedWorker:
    """State and time totals of one simulated worker."""

    idle_since: float | None = None
    """Since when the worker waits for a lease; None before its first one of a stretch."""
    wait_s: float = 0.0
    comm_s: float = 0.0
    reported_comm_s: float = 0.0
    """Part of `comm_s` that the coordinator knows."""
    busy_s: float = 0.0
    handle: int = 0
    base: int = 0
    """Version of the weights that the worker holds."""
    busy: bool = False
    queue: list[LeaseGranted] = field(default_factory=list)
    in_flight: bool = False
    """With overlap: an exchange is in progress while the worker computes."""
    landing: float | None = None
    """End of that exchange, once it is known."""
    incoming: int = 0
    """Version of the weights that it brings."""
    blocked: Callback | None = None
    """Called when the end of the exchange becomes known."""

    def add_wait(self, until: float) -> None:
        if self.idle_since is not None:
            self.wait_s += max(0.0, until - self.idle_since)


@dataclass(slots=True)
class PendingPush:
    """A lease on its way from the coordinator to the push of its gradient."""

    worker: int
    granted: LeaseGranted
    base: int
    """Version of the weights that the gradient is computed with."""
    outcome: StepOutcome = EMPTY
    busy_s: float = 0.0
    computed_s: float = 0.0
    """Time at which the gradient is complete."""


@dataclass(frozen=True, kw_only=True)
class PushPullRules:
    """Properties of a push/pull strategy for the simulation."""

    push_bytes: float
    pull_bytes: float
    servers: int
    shards: int | None = None
    """Servers that hold weights, if not all."""
    overlap: bool = False
    """A worker computes the next batch while its exchange is in progress."""
    aggregates: bool = False
    """An update combines several gradients."""


class PushPullSimulation(StrategySimulation):
    """Workers and servers of one phase; all servers act as one shard with their joint capacity.

    An update is applied once its order and its gradients have arrived and the update before it is
    finished. Its weights can be pulled from then on.
    """

    def __init__(self, simulator: Simulator, rules: PushPullRules) -> None:
        self.simulator = simulator
        self.fleet = simulator.fleet
        self.rules = rules
        self.workers = [SimulatedWorker() for _ in range(simulator.size)]
        self._gradient_bytes = simulator.work.bytes
        self._shard = ServerShard()
        shards = rules.shards or rules.servers
        self._server_bytes_per_s = simulator.server_bytes_per_s(shards)
        self._link_bytes_per_s = [link.bytes_per_s for link in self.fleet.links]
        hosts = self.fleet.servers[:shards]
        self._server_latency = max(simulator.pool.link_of(host).latency_s for host in hosts)
        self.latency = [max(own, self._server_latency) for own in self.fleet.latency]
        """Between each worker and the servers, one way."""
        transfer = simulator.pool.transfer_gb_s * 1e9
        self.push_own_s = rules.push_bytes / transfer
        self.pull_own_s = rules.pull_bytes / transfer
        self._apply_s = self.fleet.server_update_s[0] / shards
        self._receive_s = rules.push_bytes / shards / transfer
        self._server_cores = self.fleet.server_cores[0]
        self._one_host = len({h.host for h in (*self.fleet.hosts, *hosts)}) == 1
        self.inbound, self.outbound = FifoResource(), FifoResource()
        self._orders: deque[tuple[StepOptimizer, float]] = deque()
        self._is_applying = False
        self._applied_at = array("d", [simulator.timeline.now])
        """Time at which each version was applied."""
        self.version = 0
        """The newest version that the weights backend has applied."""
        self._unapplied: deque[StepOptimizer] = deque()
        self._awaiting: dict[int, list[Callback]] = {}
        """Callbacks by the version that they wait for."""
        self._fetching: dict[tuple[int, int], Callback] = {}
        """Pulls that follow the update made of a worker's own gradient."""

        self._lost: set[int] = set()
        """Workers that are gone; the others continue."""

    # ---- losses -------------------------------------------------------------------------------

    def lose(self, worker: int, now: float) -> None:
        self._lost.add(worker)

    def halt(self, now: float) -> None:
        super().halt(now)
        self._lost.update(range(len(self.workers)))

    def is_gone(self, worker: int) -> bool:
        return worker in self._lost

    def recover(
        self, version: int, now: float, then: Callable[[float, CompleteState], None]
    ) -> None:
        def answer(at_s: float) -> None:
            self._apply_until(at_s)
            state = None
            if self.simulator.failures.expected:
                state = self.simulator.updates.recover_state()
            then(at_s, dataclasses.replace(self.settled, state=state))

        self.when_applied(version, now + self._server_latency, answer)

    # ---- workers ------------------------------------------------------------------------------

    def on_lease(self, worker: int, granted: LeaseGranted, now: float) -> None:
        state = self.workers[worker]
        if state.busy:
            state.queue.append(granted)
        else:
            self._begin(worker, granted, now)

    def _begin(self, worker: int, granted: LeaseGranted, now: float) -> None:
        state, push = self.workers[worker], PendingPush(worker, granted, granted.version)
        state.busy = True
        state.add_wait(now)
        if not granted.lease.samples:
            push.computed_s = now
            self._finish(push, now)
        elif state.in_flight:
            # An exchange is in progress: compute with the weights that the worker has.
            self._compute(push, now)
        else:
            self._pull(push, now)

    def _pull(self, push: PendingPush, now: float) -> None:
        """Pulls weights of at least the lease's version, then computes."""
        worker = push.worker
        state = self.workers[worker]

        def answer(at_s: float) -> None:
            if self.is_gone(worker):
                return
            arrive = self.answer_pull(worker, at_s)
            state.base = self.version
            self.fleet.cores[worker].run(arrive, self.pull_own_s, taken)

        def taken(ended: float) -> None:
            state.comm_s += ended - now
            self._compute(push, ended)

        self.when_applied(push.granted.version, now + self.latency[worker], answer)

    def answer_pull(self, worker: int, at_s: float) -> float:
        """Serves a pull of `version` at `at_s`; returns when the weights arrive at the worker."""
        self._apply_until(at_s)
        self.simulator.updates.pull(worker)
        sent = self.transfer(self.outbound, worker, at_s, self.rules.pull_bytes)
        return sent + self.latency[worker]

    def _compute(self, push: PendingPush, now: float) -> None:
        worker, lease = push.worker, push.granted.lease
        if self.is_gone(worker):
            return
        state = self.workers[worker]
        epoch = lease.epoch + lease.start / self.simulator.work.samples
        push.base = state.base
        if self.rules.overlap:
            # Newer weights may arrive meanwhile; the gradient uses the current ones.
            push.outcome = self.simulator.updates.compute(worker, lease)

        def computed(ended: float) -> None:
            late = self.fleet.delay(worker, epoch)
            push.busy_s = ended - now
            state.busy_s += push.busy_s
            state.comm_s += late
            then = self._await_background_pull if self.rules.overlap else self._push
            self.simulator.timeline.schedule(ended + late, partial(then, push))

        self.fleet.compute_one(worker, lease.hi - lease.lo, now, epoch, computed)

    def _await_background_pull(self, push: PendingPush, now: float) -> None:
        """With overlap, the previous exchange must have ended before the next push."""
        state = self.workers[push.worker]
        if state.in_flight:
            if state.landing is None:
                state.blocked = lambda at_s: self._await_background_pull(push, max(now, at_s))
                return
            landed = max(now, state.landing)
            state.comm_s += landed - now
            state.in_flight, state.base = False, state.incoming
            now = landed
        self.simulator.timeline.schedule(now, partial(self._push, push))

    def _push(self, push: PendingPush, now: float) -> None:
        worker, lease, updates = push.worker, push.granted.lease, self.simulator.updates
        if self.is_gone(worker):
            return
        if not self.rules.overlap:
            push.outcome = updates.compute(worker, lease)
        updates.push(worker, lease, self.workers[worker].handle + 1)
        if push.outcome.diverged is not None:
            self.simulator.report_divergence(worker, push.outcome, lease, now)
        push.computed_s = now
        self.fleet.cores[worker].run(now, self.push_own_s, partial(self._send, push))

    def _send(self, push: PendingPush, now: float) -> None:
        """Sends the gradient to the servers."""
        if self.is_gone(push.worker):
            return
        sent = self.transfer(self.inbound, push.worker, now, self.rules.push_bytes)
        self.bytes_sent += self.rules.push_bytes
        self.bytes_before += self._gradient_bytes
        if not self.rules.overlap:
            self.workers[push.worker].comm_s += sent - push.computed_s
        self._finish(push, sent)

    def _finish(self, push: PendingPush, at_s: float) -> None:
        """Notifies the coordinator of the push, then starts the worker's next lease, if any."""
        worker, has_gradient = push.worker, push.granted.lease.samples > 0
        state = self.workers[worker]
        self.post_push(push, at_s, gradient=has_gradient)
        free_at = at_s
        if self.rules.overlap and has_gradient:
            self._start_background_pull(worker, state.handle, at_s)
            free_at = push.computed_s
        state.idle_since = free_at
        state.busy = False
        if state.queue:
            self._begin(worker, state.queue.pop(0), free_at)

    def post_push(self, push: PendingPush, at_s: float, *, gradient: bool) -> None:
        """Sends `GradientPushed` to the coordinator and, with `gradient`, a push to the servers."""
        worker, lease, outcome = push.worker, push.granted.lease, push.outcome
        simulator, state = self.simulator, self.workers[worker]
        state.handle += 1
        step = simulator.steps_of(worker)
        simulator.steps[worker] += 1
        handle, samples = state.handle, lease.samples
        comm_s, state.reported_comm_s = state.comm_s - state.reported_comm_s, state.comm_s
        measured = StepStats(
            samples,
            outcome.predictions or samples,
            outcome.loss_sum,
            outcome.correct,
            push.busy_s,
            comm_s,
            outcome.norms,
            1 if samples else 0,
            push.busy_s**2,
        )
        message = GradientPushed(worker, handle, lease.id, samples, push.base, step, measured)

        def arrived(now: float) -> None:
            self._execute(self._shard.on_gradient(worker, handle), now)

        if gradient:
            simulator.send_push(worker, message, at_s, arrived, self)
        else:
            simulator.send(worker, message, at_s, self)

    def _start_background_pull(self, worker: int, handle: int, sent_s: float) -> None:
        """Pulls new weights while the worker computes its next batch with the current ones."""
        state = self.workers[worker]
        state.in_flight, state.landing = True, None

        def fetch(now: float) -> None:
            if self.is_gone(worker):
                return
            state.landing = self.answer_pull(worker, now) + self.pull_own_s
            state.incoming = self.version
            blocked, state.blocked = state.blocked, None
            if blocked is not None:
                blocked(state.landing)

        if self.rules.aggregates:
            # A buffered gradient may wait long for its update, so pull whatever is newest.
            self.simulator.timeline.schedule(sent_s + self.latency[worker], fetch)
        else:
            self._fetching[worker, handle] = fetch

    # ---- servers ------------------------------------------------------------------------------

    def on_order(self, message: Message, now: float) -> None:
        if isinstance(message, ApplyUpdate):
            self._execute(self._shard.on_apply(message), now)
        else:
            assert isinstance(message, ClipFactor)
            self._execute(self._shard.on_clip(message.version, message.factor), now)

    def _execute(self, actions: list[ShardAction], now: float) -> None:
        for action in actions:
            if isinstance(action, StepOptimizer):
                self._orders.append((action, now + self._server_latency))
                self._apply_next()
                for part in action.order.parts if self._fetching else ():
                    fetch = self._fetching.pop((part.worker, part.handle), None)
                    if fetch is not None:
                        self.when_applied(action.order.version, now, fetch)
            elif isinstance(action, SumGradients):
                self._sum_up(action.order, now)

    def _sum_up(self, order: ApplyUpdate, now: float) -> None:
        square = self.simulator.updates.grad_sq_norm(order)
        for server in range(self.rules.servers):
            # How the norm is divided among the servers does not change their sum.
            part = square if server == 0 else 0.0
            message = ShardSqNorm(server, order.version, part)
            self.simulator.send_from_server(message, server, now)

    def _apply_next(self) -> None:
        """Applies queued updates one after another."""
        if self._orders and not self._is_applying and not self._server_is_dead():
            update, at_s = self._orders.popleft()
            seconds = self._apply_s + len(update.order.parts) * self._receive_s
            self._is_applying = True
            begins = max(at_s, self._applied_at[-1])
            self._server_cores.run(begins, seconds, partial(self._applied, update))

    def _applied(self, update: StepOptimizer, ended: float) -> None:
        self._is_applying = False
        self._applied_at.append(ended)
        self._unapplied.append(update)
        for then in self._awaiting.pop(len(self._applied_at) - 1, ()):
            self.simulator.timeline.schedule(ended, then)
        self._apply_next()

    def _server_is_dead(self) -> bool:
        """A server dies with its host; a copy takes over when the loss has been noticed."""
        dead, coordinator = self.simulator.failures.dead_hosts, self.simulator.coordinator
        if not dead:
            return False
        first: dict[int, int] = {}
        for server in coordinator.view.servers:
            if server not in coordinator.servers.lost:
                first.setdefault(coordinator.servers.shard_of(server), server)
        used = [first[shard] for shard in range(self.rules.servers) if shard in first]
        return any(self.fleet.servers[server].host in dead for server in used)

    def resume_servers(self) -> None:
        self._apply_next()

    def when_applied(self, version: int, now: float, then: Callback) -> None:
        """Calls `then` at `now`, or when the version is applied if that is later.

        Always through the timeline, so that earlier events of other workers come first.
        """
        if version < len(self._applied_at):
            self.simulator.timeline.schedule(max(now, self._applied_at[version]), then)
        else:
            waiting = self._awaiting.setdefault(version, [])
            waiting.append(lambda at_s: then(max(now, at_s)))

    def _apply_until(self, now: float) -> None:
        """Applies to the weights all updates that have happened by `now`."""
        made, seen = self._applied_at, self.version
        while seen + 1 < len(made) and made[seen + 1] <= now:
            seen += 1
            update = self._unapplied.popleft()
            self.simulator.updates.apply(update.order, update.factor)
        self.version = seen

    def sync_weights(self, worker: int, version: int, now: float, then: Callback) -> None:
        # The time that follows is spent in evaluation or a switch, not waiting for work.
        state = self.workers[worker]
        state.add_wait(now)
        state.idle_since = None

        def answer(at_s: float) -> None:
            self._apply_until(at_s)
            sent = self.transfer(self.outbound, worker, at_s, self.simulator.work.bytes)
            then(sent + self.latency[worker])

        self.when_applied(version, now + self.latency[worker], answer)

    def close(self) -> None:
        clocks = self.simulator.clocks
        for worker, state in enumerate(self.workers):
            clocks["wait"][worker] += state.wait_s
            clocks["comm_exposed"][worker] += state.comm_s
            clocks["forward"][worker] += state.busy_s / 3
            clocks["backward"][worker] += state.busy_s * 2 / 3

    # ---- links --------------------------------------------------------------------------------

    def transfer(self, lane: FifoResource, worker: int, now: float, nbytes: float) -> float:
        """Returns when a message has been sent; processes on one host need no network."""
        if self._one_host:
            return now
        nbytes *= self.fleet.link_slowness(now)
        through = lane.reserve(now, nbytes / self._server_bytes_per_s)
        own = now + nbytes / self._link_bytes_per_s[worker]
        return through if through > own else own
