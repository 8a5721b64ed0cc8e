"""Workers of a fault schedule: plain objects whose weights are the samples that they contain."""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field

from elastic_server import FakeServer, Samples, ServerGone, ServerSilent, Violation
from paceline.protocol.balance import split_batch
from paceline.protocol.coordinator import Coordinator
from paceline.protocol.messages import (
    CheckpointWritten,
    Dismiss,
    EnterPhase,
    EpochEnd,
    EpochEndReply,
    Evaluate,
    Evaluated,
    ExchangeFailed,
    FinishRun,
    FormGroup,
    GradientPushed,
    GroupFormed,
    LeaseGranted,
    Message,
    PhaseEntered,
    PlannedSteps,
    Quiesce,
    Quiesced,
    Regroup,
    SaveCheckpoint,
    StateOffered,
    StepsApplied,
    StepStats,
    WorkerFinished,
)
from paceline.specs.strategy import LocalSteps, Strategy


@dataclass(eq=False)
class Exchange:
    """The group of one view: what its members have contributed to each synchronous step."""

    size: int
    given: dict[tuple[int, int], dict[int, Samples]] = field(default_factory=dict)


@dataclass(eq=False)
class World:
    """What the workers of one schedule share."""

    coordinator: Coordinator
    samples: int
    """Samples of an epoch."""
    servers: dict[int, FakeServer] = field(default_factory=dict)
    """Server processes by their port; one that is started again has another."""
    exchanges: dict[int, Exchange] = field(default_factory=dict)
    workers: dict[int, FakeWorker] = field(default_factory=dict)
    """Workers that the supervisor knows, by number."""
    zombies: list[FakeWorker] = field(default_factory=list)
    """Workers that were cut off, and continue in their old view."""

    @property
    def strategy(self) -> Strategy:
        return self.coordinator.plan.strategy

    def members(self) -> list[FakeWorker]:
        """Workers of the current view that are alive."""
        view = self.coordinator.view.number
        return [w for w in self.workers.values() if w.alive and w.view == view]


@dataclass(eq=False)
class FakeWorker:
    world: World
    number: int
    view: int = 0
    rank: int = 0
    size: int = 1
    weights: Samples = field(default_factory=Counter)
    """Samples in the last complete state."""
    local: Samples = field(default_factory=Counter)
    """Samples of local steps since the last synchronization."""
    complete_at: int = -1
    reached: int = -1
    holds_state: bool = True
    phase: int = 0
    step: int = 0
    handle: int = 0
    local_steps: int = 0
    blocked: tuple[int, int] | None = None
    shards: list[list[FakeServer]] = field(default_factory=list)
    """Servers of each shard that this worker uses."""
    version: int = 0
    """Version of the servers at the last quiesce."""
    has_runner: bool = False
    fresh: bool = True
    ended_view: int = -1
    """The last view of which it knows that it has ended."""
    interrupted: bool = False
    settling: bool = False
    """True if the first message of the inbox is being handled."""
    inbox: deque[Message] = field(default_factory=deque)
    plan: deque[tuple[PlannedSteps, int, int]] = field(default_factory=deque)
    outbox: deque[tuple[Message, int]] = field(default_factory=deque)
    alive: bool = True
    """False if it was killed. A worker that was cut off lives, and does not know it."""

    def say(self, message: Message) -> None:
        self.outbox.append((message, self.view))

    def interrupt(self) -> None:
        self.interrupted, self.blocked = True, None
        if self.settling:
            self.inbox.popleft()
            self.settling = False
        self.plan.clear()
        self.say(ExchangeFailed(self.rank, self.step, "interrupted"))

    def is_complete(self) -> bool:
        exchange = self.world.exchanges[self.view]
        assert self.blocked is not None
        return len(exchange.given[self.blocked]) == exchange.size

    def can_act(self) -> bool:
        if self.blocked is None:
            return bool(self.plan or self.inbox)
        return self.is_complete() or self.ended_view >= self.view

    def act(self) -> None:
        if self.blocked is not None:
            if self.is_complete():
                self.finish_step()
            else:
                self.interrupt()
        elif self.plan:
            self.begin_step()
        else:
            self.handle_next()

    def handle_next(self) -> None:
        message = self.inbox.popleft()
        try:
            self.receive(message)
        except ServerGone:
            self.settling = False
            self.interrupt()
        except ServerSilent:
            if self.settling:
                self.inbox.appendleft(message)
            self.world.exchanges[self.view].given[-3, self.view] = {}
            self.blocked = (-3, self.view)  # Until it is interrupted.

    def begin_step(self) -> None:
        steps, start, stop = self.plan[0]
        cuts = split_batch(stop - start, self.size, steps.batch_weights)
        own = range(start + cuts[self.rank], start + cuts[self.rank + 1])
        self.local.update((steps.epoch, position) for position in own)
        self.local_steps += 1
        phase = self.world.strategy.phases[self.phase]
        syncs = not isinstance(phase, LocalSteps)
        if not syncs and self.local_steps < phase.steps_between_syncs:  # type: ignore[attr-defined]
            self.end_step()
            return
        self.contribute((steps.epoch, stop))

    def contribute(self, key: tuple[int, int]) -> None:
        given = self.world.exchanges[self.view].given.setdefault(key, {})
        given[self.rank] = self.local.copy()
        self.blocked = key

    def finish_step(self) -> None:
        self.synchronize()
        if self.plan:  # Otherwise it settles.
            self.end_step()

    def synchronize(self) -> None:
        assert self.blocked is not None
        for part in self.world.exchanges[self.view].given[self.blocked].values():
            self.weights.update(part)
        self.local.clear()
        self.local_steps, self.blocked = 0, None

    def end_step(self) -> None:
        steps, start, stop = self.plan.popleft()
        self.step += 1
        self.reached = steps.epoch * self.world.samples + stop
        if not self.local_steps:
            self.complete_at = self.reached
        share = len(range(start, stop)) // self.size
        slow = 3.0 if self.number == 0 else 1.0
        measured = StepStats(share, share, 1.0, 0, busy_s=slow, comm_s=0.1, steps=1)
        self.say(StepsApplied(self.rank, steps.epoch, stop, self.step, measured))

    def receive(self, message: Message) -> None:
        if self.interrupted and not isinstance(message, Regroup):
            return
        match message:
            case PlannedSteps():
                for start in range(message.start, message.stop, message.batch):
                    stop = min(start + message.batch, message.stop)
                    self.plan.append((message, start, stop))
            case LeaseGranted():
                self.push(message)
            case Regroup():
                self.regroup(message)
            case Dismiss():
                self.alive = False  # It exits.
            case FormGroup():
                source = next((w for w in self.world.members() if w.rank == message.source), None)
                if source is None or self not in self.world.members():
                    self.world.exchanges[self.view].given[-2, self.view] = {}
                    self.blocked = (-2, self.view)  # Until it is interrupted.
                    return
                if message.broadcast:
                    self.weights = source.weights.copy()
                if self.weights != source.weights:
                    raise Violation("workers continue from different states")
                self.complete_at = self.reached = message.samples
                self.holds_state = True
                self.say(GroupFormed(self.rank))
            case EnterPhase():
                self.enter(message)
            case Quiesce():
                self.settle(message)
            case Dismiss():
                pass  # It exits.
            case _:
                self.say(self.answer(message))

    def regroup(self, message: Regroup) -> None:
        self.interrupted = self.settling = False
        self.plan.clear()
        self.local.clear()
        self.local_steps = 0
        keeps = message.entering and self.fresh
        if self.has_servers() and self.has_runner and not keeps:
            lost = {port for _, port in message.lost_servers}
            # Others may be lost already without the knowledge of the coordinator.
            self.shards = [[s for s in c if s.alive and s.port not in lost] for c in self.shards]
            self.holds_state = all(self.shards)
            if self.holds_state and not self.are_settled(message.version):
                self.wait_in(message)
                return
            if self.holds_state:
                self.weights = self.pull()
        self.has_runner = False
        self.view = message.view
        self.rank, self.size = message.workers.index(self.number), len(message.workers)
        self.world.exchanges.setdefault(message.view, Exchange(self.size))
        offer = StateOffered(self.rank, self.complete_at, self.reached, self.holds_state)
        self.say(offer)

    def has_servers(self) -> bool:
        return (
            self.world.strategy.phases[self.phase].servers_for(self.world.coordinator.plan.workers)
            > 0
        )

    def enter(self, message: EnterPhase) -> None:
        self.settling = False
        if self.has_runner and self.has_servers() and not self.are_settled(self.version):
            self.wait_in(message)
            return
        self.phase = message.phase
        self.handle = self.version = 0
        self.has_runner = self.fresh = True
        self.shards = [[self.world.servers[port]] for _, port in message.servers]
        for shard, _, port in message.backups:
            self.shards[shard].append(self.world.servers[port])
        for shard, copies in enumerate(self.shards):
            if shard % self.size == self.rank:
                for server in copies:
                    server.load(self.weights, self.view)
        self.say(PhaseEntered(self.rank))

    def wait_in(self, message: Message) -> None:
        """Handles the message again, until servers have applied what it needs."""
        self.inbox.appendleft(message)
        self.settling = True

    def lose_coordinator(self) -> None:
        """Loses what is in transit; what it is doing it completes."""
        self.outbox.clear()
        kept = list(self.inbox)[: int(self.settling)]
        self.inbox = deque(kept)

    def are_settled(self, version: int) -> bool:
        """All copies of all shards have applied this version."""
        return all(server.has(version) for copies in self.shards for server in copies)

    def pull(self) -> Samples:
        weights = [copies[0].weights for copies in self.shards]
        if any(each != weights[0] for each in weights) and self not in self.world.zombies:
            raise Violation("shards contain different samples")
        return weights[0].copy()

    def settle(self, message: Quiesce) -> None:
        self.fresh = False
        self.settling = True
        if self.has_servers():
            self.version = message.version
            if not all(copies[0].has(message.version) for copies in self.shards):
                self.inbox.appendleft(message)
                return
            self.weights = self.pull()
        elif self.local_steps:
            self.contribute((-1, message.samples))
            self.inbox.appendleft(message)  # It is answered when all have contributed.
            return
        self.settling = False
        self.complete_at = self.reached = message.samples
        digest = str(hash(frozenset(self.weights.items())))
        self.say(Quiesced(self.rank, digest, 0.1))

    def push(self, message: LeaseGranted) -> None:
        lease = message.lease
        self.handle += 1
        self.fresh = False
        if lease.samples:
            gradient = Counter((lease.epoch, p) for p in range(lease.lo, lease.hi))
            for copies in self.shards:
                copies[0].check()  # It pulls before.
                for server in copies:
                    server.push(self.rank, self.handle, gradient, self.view)
        measured = StepStats(lease.samples, lease.samples, 0.5, 0, busy_s=1.0, steps=1)
        done = (self.rank, self.handle, lease.id, lease.samples, message.version, self.step)
        self.say(GradientPushed(*done, measured))
        self.step += 1

    def answer(self, message: Message) -> Message:
        match message:
            case Evaluate():
                return Evaluated(self.rank, 1.0, 1, 2)
            case SaveCheckpoint():
                return CheckpointWritten(self.rank, "path")
            case EpochEnd():
                return EpochEndReply(self.rank, True)
            case FinishRun():
                return WorkerFinished(self.rank, {})
        raise AssertionError(message)
