"""Workers and servers of a parameter-server strategy: pull, compute, push, each at its own time."""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from paceline.plan.cost_model import allreduce_s, coded_bytes
from paceline.protocol.messages import (
    ApplyUpdate,
    ClipFactor,
    GradientPushed,
    LeaseGranted,
    Message,
    PlannedSteps,
    ShardSqNorm,
    StepStats,
)
from paceline.protocol.shard import ServerShard, ShardAction, StepOptimizer, SumGradients
from paceline.specs.strategy import Strategy
from paceline.strategies.grouped.spec import Grouped
from paceline.strategies.ps.spec import ParameterServer
from paceline.twin.backend import StepOutcome
from paceline.twin.simulator import Simulator, servers_bandwidth
from paceline.twin.timeline import FifoResource


@dataclass(slots=True)
class SimulatedWorker:
    """One worker."""

    idle_since: float | None = None
    """Since when it has nothing to do but wait for work; None where a stretch has not begun."""
    wait_s: float = 0.0
    comm_s: float = 0.0
    busy_s: float = 0.0
    handle: int = 0
    base: int = 0
    """The version of the weights it holds."""
    busy: bool = False
    queue: list[LeaseGranted] = field(default_factory=list)
    in_flight: bool = False
    """With overlap: an exchange is under way behind the computing."""
    landing: float | None = None
    """When it ends, once that is known."""
    incoming: int = 0
    """The version of the weights it brings."""
    blocked: Callable[[float], None] | None = None
    """What waits for it to be known."""

    def waited(self, until: float) -> None:
        if self.idle_since is not None:
            self.wait_s += max(0.0, until - self.idle_since)


class PushPullSimulation:
    """All servers of a phase are one shard with their joint capacity: they act alike.

    An update is made when its order and its gradients are there and the one before it is done.
    Its weights count as pulled from the moment that it is made.
    """

    def __init__(
        self, world: Simulator, strategy: Strategy, groups: tuple[tuple[int, ...], ...]
    ) -> None:
        assert isinstance(strategy, ParameterServer | Grouped)
        self._world = world
        self._fleet = world.fleet
        self._workers = world.plan.workers
        self._overlap = isinstance(strategy, ParameterServer) and strategy.overlap
        self._aggregates = isinstance(strategy, ParameterServer) and strategy.sync.aggregates
        codec = strategy.codec if isinstance(strategy, ParameterServer) else None
        self._units = groups if isinstance(strategy, Grouped) else ()
        self._unit_of = {w: unit for unit in self._units for w in unit}
        self._servers = strategy.servers_for(self._workers)
        self._players = [SimulatedWorker() for _ in range(self._workers)]
        self._gathering: dict[tuple[int, ...], dict[int, tuple[LeaseGranted, float]]] = {}
        self._shard = ServerShard()
        self._push_bytes = coded_bytes(codec, world.work)
        self._before_bytes = world.work.bytes
        self._pull_bytes = (
            self._push_bytes if codec is not None and codec.suits_weights else world.work.bytes
        )
        self._lane_bytes_per_s = servers_bandwidth(world, strategy)
        self._link_bytes_per_s = [link.bytes_per_s for link in self._fleet.links]
        self._server_latency = max(self._fleet.latency[: self._servers] or [0.0])
        self._latency = [max(own, self._server_latency) for own in self._fleet.latency]
        """Between each worker and the servers, one way."""
        transfer = world.pool.transfer_gb_s * 1e9
        self._push_own_s = self._push_bytes / transfer
        self._pull_own_s = self._pull_bytes / transfer
        self._apply_s = self._fleet.compute[0].update_s / self._servers
        self._receive_s = self._push_bytes / self._servers / transfer
        self._server_cores = self._fleet.cores[0]
        self._one_machine = len({h.host for h in self._fleet.hosts}) == 1
        self._in, self._out = FifoResource(), FifoResource()
        self._orders: deque[tuple[StepOptimizer, float]] = deque()
        self._at_work = False
        self._made = array("d", [world.timeline.now])
        """When each version came to be."""
        self._seen = 0
        self._unapplied: deque[StepOptimizer] = deque()
        self._awaiting: dict[int, list[Callable[[float], None]]] = {}
        """By the version that they wait for."""
        self._fetching: dict[tuple[int, int], Callable[[float], None]] = {}
        """Who waits for the update made of its own gradient, and then takes the weights."""
        self.bytes_sent = self.bytes_before = 0.0

    def on_steps(self, worker: int, steps: PlannedSteps, now: float) -> None:
        raise AssertionError("planned work under a parameter server")

    # ---- workers ------------------------------------------------------------------------------

    def on_go(self, worker: int, go: LeaseGranted, now: float) -> None:
        if self._units:
            self._gather(worker, go, now)
            return
        player = self._players[worker]
        if player.busy:
            player.queue.append(go)
        else:
            self._begin(worker, player, go, now)

    def _begin(self, worker: int, player: SimulatedWorker, go: LeaseGranted, now: float) -> None:
        player.busy = True
        player.waited(now)
        if not go.lease.samples:
            self._tell(worker, go, now, now, StepOutcome(0, 0.0, 0))
        elif player.in_flight:
            # An exchange is under way behind: the weights at hand are those to compute on.
            self._compute(worker, go, now)
        else:
            self._pull(worker, player, go, now)

    def _pull(self, worker: int, player: SimulatedWorker, go: LeaseGranted, now: float) -> None:
        """The newest weights, those that the coordinator knows of at least; then compute."""

        def taken(ended: float) -> None:
            player.comm_s += ended - now
            self._compute(worker, go, ended)

        def answer(at_s: float) -> None:
            arrive = self._answer(worker, player, at_s)
            cores = self._fleet.cores[worker]
            if cores.crowded:
                cores.run(arrive, self._pull_own_s, taken)
            else:
                taken(arrive + self._pull_own_s)

        self._when_made(go.version, now + self._latency[worker], answer)

    def _answer(self, worker: int, player: SimulatedWorker, at_s: float) -> float:
        """The servers' answer to a pull; when it has arrived."""
        self._catch_up(at_s)
        player.base = self._seen
        self._world.learner.pull(worker)
        sent = self._transfer(self._out, worker, at_s, self._pull_bytes)
        return sent + self._latency[worker]

    def _pull_together(
        self, unit: tuple[int, ...], version: int, now: float, then: Callable[[float], None]
    ) -> None:
        """The same for a group, through its first."""
        chief = unit[0]

        def answer(at_s: float) -> None:
            arrive = self._answer(chief, self._players[chief], at_s) + self._within(unit)
            for worker in unit[1:]:
                self._players[worker].base = self._seen
                self._world.learner.pull(worker)

            def taken(ended: float) -> None:
                for worker in unit:
                    self._players[worker].comm_s += ended - now
                then(ended)

            self._fleet.cores[chief].run(arrive, self._pull_own_s, taken)

        self._when_made(version, now + self._latency[chief], answer)

    def _within(self, unit: tuple[int, ...]) -> float:
        """The first of a group passes the weights on: half of an all-reduce."""
        if len(unit) < 2:
            return 0.0
        hosts = [self._fleet.hosts[w] for w in unit]
        return allreduce_s(self._world.pool, hosts, self._pull_bytes) / 2

    def _compute(self, worker: int, go: LeaseGranted, now: float) -> None:
        lease = go.lease
        epoch = lease.epoch + lease.start / self._world.work.samples
        # With overlap newer weights come in meanwhile: the gradient belongs to those of now.
        player = self._players[worker]
        early = None
        if self._overlap:
            early = self._world.learner.compute(worker, lease, player.handle + 1)

        def computed(ended: float) -> None:
            late = self._fleet.delay(worker, epoch)
            busy_s = ended - now
            player.busy_s += busy_s
            player.comm_s += late
            if early is None:
                then = partial(self._push, worker, go, busy_s)
            else:
                then = partial(self._land, worker, go, busy_s, early)
            self._world.timeline.schedule(ended + late, then)

        self._fleet.compute_one(worker, lease.hi - lease.lo, now, epoch, computed)

    def _land(
        self, worker: int, go: LeaseGranted, busy_s: float, told: StepOutcome, now: float
    ) -> None:
        """With overlap the exchange before this one must have landed first."""
        player = self._players[worker]
        if player.in_flight and player.landing is None:
            player.blocked = lambda at_s: self._land(worker, go, busy_s, told, max(now, at_s))
            return
        base = player.base
        landed = now
        if player.in_flight:
            assert player.landing is not None
            landed = max(now, player.landing)
            player.comm_s += landed - now
            player.in_flight, player.base = False, player.incoming
        self._world.timeline.schedule(
            landed, lambda at_s: self._push(worker, go, busy_s, at_s, told, base)
        )

    def _push(
        self,
        worker: int,
        go: LeaseGranted,
        busy_s: float,
        now: float,
        early: StepOutcome | None = None,
        base: int | None = None,
    ) -> None:
        player = self._players[worker]
        told = early or self._world.learner.compute(worker, go.lease, player.handle + 1)
        if told.diverged is not None:
            self._world.diverging(worker, told, go.lease, now)
        cores = self._fleet.cores[worker]
        if cores.crowded:
            packed = partial(self._send, worker, go, busy_s, now, told, base)
            cores.run(now, self._push_own_s, packed)
        else:
            self._send(worker, go, busy_s, now, told, base, now + self._push_own_s)

    def _send(
        self,
        worker: int,
        go: LeaseGranted,
        busy_s: float,
        computed_s: float,
        told: StepOutcome,
        base: int | None,
        now: float,
    ) -> None:
        """The gradient leaves."""
        sent = self._transfer(self._in, worker, now, self._push_bytes)
        self.bytes_sent += self._push_bytes
        self.bytes_before += self._before_bytes
        if not self._overlap:
            self._players[worker].comm_s += sent - computed_s
        self._tell(worker, go, sent, computed_s, told, busy_s, base)

    def _tell(
        self,
        worker: int,
        go: LeaseGranted,
        at_s: float,
        computed_s: float,
        told: StepOutcome,
        busy_s: float = 0.0,
        base: int | None = None,
    ) -> None:
        """The gradient is on its way to the servers, word of it to the coordinator."""
        player = self._players[worker]
        samples = go.lease.samples
        if base is None:
            base = player.base if samples else go.version
        comm_s = at_s - computed_s
        self._post(worker, go, at_s, base, told, busy_s, comm_s, gradient=samples > 0)
        handle = player.handle
        free_at = at_s
        if self._overlap and samples:
            self._exchange_behind(worker, handle, at_s)
            free_at = computed_s
        player.idle_since = free_at
        player.busy = False
        if player.queue:
            self._begin(worker, player, player.queue.pop(0), free_at)

    def _post(
        self,
        worker: int,
        go: LeaseGranted,
        at_s: float,
        base: int,
        told: StepOutcome,
        busy_s: float,
        comm_s: float,
        *,
        gradient: bool,
    ) -> None:
        """Word of a push to the coordinator, with `gradient` the push itself to the servers."""
        world, player = self._world, self._players[worker]
        player.handle += 1
        step = world.steps_of(worker)
        world.steps[worker] += 1
        handle, samples = player.handle, go.lease.samples
        measured = StepStats(
            samples,
            told.predictions or samples,
            told.loss_sum,
            told.correct,
            busy_s,
            comm_s,
            told.norms,
        )
        message = GradientPushed(worker, handle, go.lease.id, samples, base, step, measured)

        def come(now: float) -> None:
            actions = self._shard.on_gradient(worker, handle)
            if actions:
                self._carry_out(actions, now)

        if gradient:
            world.send_push(worker, message, at_s, come)
        else:
            world.send(worker, message, at_s)

    def _exchange_behind(self, worker: int, handle: int, sent_s: float) -> None:
        """Weights come back while the next batch is computed on those at hand."""
        player = self._players[worker]
        player.in_flight, player.landing = True, None

        def fetch(now: float) -> None:
            self._catch_up(now)
            player.incoming = self._seen
            self._world.learner.pull(worker)
            arrive = self._transfer(self._out, worker, now, self._pull_bytes)
            player.landing = arrive + self._latency[worker] + self._pull_own_s
            blocked, player.blocked = player.blocked, None
            if blocked is not None:
                blocked(player.landing)

        if self._aggregates:
            # A buffered gradient may wait long for its update: then take what is there.
            self._world.timeline.schedule(sent_s + self._latency[worker], fetch)
        else:
            self._fetching[worker, handle] = fetch

    # ---- groups -------------------------------------------------------------------------------

    def _gather(self, worker: int, go: LeaseGranted, now: float) -> None:
        """A group steps when all of it has been told to."""
        unit = self._unit_of[worker]
        here = self._gathering.setdefault(unit, {})
        here[worker] = (go, now)
        if len(here) < len(unit):
            return
        del self._gathering[unit]
        begins = max(at_s for _, at_s in here.values())
        for member, (_, at_s) in here.items():
            self._players[member].waited(begins)
            if self._players[member].idle_since is None:
                self._players[member].wait_s += begins - at_s
        version = max(go.version for go, _ in here.values())
        ended: dict[int, tuple[float, float]] = {}

        def start(at_s: float) -> None:
            for member in unit:
                self._compute_member(unit, member, here[member][0], at_s, ended, here)

        self._pull_together(unit, version, begins, start)

    def _compute_member(
        self,
        unit: tuple[int, ...],
        member: int,
        go: LeaseGranted,
        now: float,
        ended: dict[int, tuple[float, float]],
        here: dict[int, tuple[LeaseGranted, float]],
    ) -> None:
        epoch = go.lease.epoch + go.lease.start / self._world.work.samples

        def computed(at_s: float) -> None:
            self._players[member].busy_s += at_s - now
            ended[member] = (now, at_s + self._fleet.delay(member, epoch))
            if len(ended) == len(unit):
                last = max(end for _, end in ended.values())
                self._world.timeline.schedule(
                    last, lambda t: self._sum_in_group(unit, t, ended, here)
                )

        if go.lease.samples:
            self._fleet.compute_one(member, go.lease.samples, now, epoch, computed)
        else:
            computed(now)

    def _sum_in_group(
        self,
        unit: tuple[int, ...],
        now: float,
        ended: dict[int, tuple[float, float]],
        here: dict[int, tuple[LeaseGranted, float]],
    ) -> None:
        hosts = [self._fleet.hosts[w] for w in unit]
        exchange_s = allreduce_s(self._world.pool, hosts, self._world.work.bytes)
        summed = now + exchange_s
        chief = unit[0]
        sent = self._transfer(self._in, chief, summed + self._push_own_s, self._push_bytes)
        self.bytes_sent += self._push_bytes + self._world.work.bytes * (len(unit) > 1) * len(unit)
        self.bytes_before = self.bytes_sent
        parts = []
        for member in unit:
            go = here[member][0]
            began, end = ended[member]
            self._players[member].wait_s += now - end
            self._players[member].comm_s += sent - now if member == chief else exchange_s
            told = StepOutcome(0, 0.0, 0)
            if go.lease.samples:
                handle = self._players[member].handle + 1
                told = self._world.learner.compute(member, go.lease, handle)
                if told.diverged is not None:
                    self._world.diverging(member, told, go.lease, now)
                parts.append((member, handle, go.lease.samples / go.lease.batch))
            at_s = sent if member == chief else summed
            player = self._players[member]
            busy_s = end - began
            self._post(member, go, at_s, player.base, told, busy_s, 0.0, gradient=member == chief)
            player.idle_since = at_s
        if parts and parts[0][0] != chief:
            parts.insert(0, (chief, self._players[chief].handle, 0.0))
        self._world.learner.combine_gradients(parts)

    # ---- servers ------------------------------------------------------------------------------

    def on_order(self, message: Message, now: float) -> None:
        if isinstance(message, ApplyUpdate):
            self._carry_out(self._shard.on_apply(message), now)
        else:
            assert isinstance(message, ClipFactor)
            self._carry_out(self._shard.on_clip(message.version, message.factor), now)

    def _carry_out(self, actions: list[ShardAction], now: float) -> None:
        for action in actions:
            if isinstance(action, StepOptimizer):
                self._orders.append((action, now + self._server_latency))
                self._make_next()
                for part in action.order.parts if self._fetching else ():
                    fetch = self._fetching.pop((part.worker, part.handle), None)
                    if fetch is not None:
                        self._when_made(action.order.version, now, fetch)
            elif isinstance(action, SumGradients):
                self._sum_up(action.order, now)

    def _sum_up(self, order: ApplyUpdate, now: float) -> None:
        square = self._world.learner.grad_sq_norm(order)
        for server in range(self._servers):
            # Which part of the norm lies where makes no difference to the whole.
            part = square if server == 0 else 0.0
            message = ShardSqNorm(server, order.version, part)
            self._world.send(server % self._workers, message, now + self._server_latency)

    def _make_next(self) -> None:
        """Updates are made one after another; each is there when its service is over."""
        while self._orders and not self._at_work and not self._is_gone():
            update, at_s = self._orders.popleft()
            seconds = self._apply_s + len(update.order.parts) * self._receive_s
            begins = max(at_s, self._made[-1])
            if self._server_cores.crowded:
                self._at_work = True
                self._server_cores.run(begins, seconds, partial(self._made_late, update))
            else:
                self._has_made(update, begins + seconds)

    def _made_late(self, update: StepOptimizer, ended: float) -> None:
        self._at_work = False
        self._has_made(update, ended)
        self._make_next()

    def _has_made(self, update: StepOptimizer, ended: float) -> None:
        self._made.append(ended)
        self._unapplied.append(update)
        if self._awaiting:
            for then in self._awaiting.pop(len(self._made) - 1, ()):
                self._world.timeline.schedule(ended, then)

    def _is_gone(self) -> bool:
        """A server dies with the machine that it lives on."""
        dead = self._world.dead
        if not dead:
            return False
        return any(s % self._workers in dead for s in range(self._servers))

    def _when_made(self, version: int, now: float, then: Callable[[float], None]) -> None:
        """At `now`, or as soon after as the version is there.

        Not before its time: what other workers do until then belongs before it.
        """
        if version < len(self._made):
            self._world.timeline.schedule(max(now, self._made[version]), then)
        else:
            waiting = self._awaiting.setdefault(version, [])
            waiting.append(lambda at_s: then(max(now, at_s)))

    def _catch_up(self, now: float) -> None:
        """Let the learner make all updates that have happened by now."""
        made, seen = self._made, self._seen
        while seen + 1 < len(made) and made[seen + 1] <= now:
            seen += 1
            update = self._unapplied.popleft()
            self._world.learner.apply(update.order, update.factor)
        self._seen = seen

    def settle(self, worker: int, version: int, now: float, then: Callable[[float], None]) -> None:
        # What comes now is no waiting for work any more: evaluation, saving, another strategy.
        player = self._players[worker]
        player.waited(now)
        player.idle_since = None

        def answer(at_s: float) -> None:
            self._catch_up(at_s)
            sent = self._transfer(self._out, worker, at_s, self._world.work.bytes)
            then(sent + self._latency[worker])

        self._when_made(version, now + self._latency[worker], answer)

    def leave(self) -> None:
        clocks = self._world.clocks
        for worker, player in enumerate(self._players):
            clocks.add("wait", worker, player.wait_s)
            clocks.add("comm_exposed", worker, player.comm_s)
            clocks.computed(worker, player.busy_s)

    # ---- ways ---------------------------------------------------------------------------------

    def _transfer(self, lane: FifoResource, worker: int, now: float, nbytes: float) -> float:
        """When a message has left; one machine's processes need no network between them."""
        if self._one_machine:
            return now
        through = lane.reserve(now, nbytes / self._lane_bytes_per_s)
        own = now + nbytes / self._link_bytes_per_s[worker]
        return through if through > own else own
