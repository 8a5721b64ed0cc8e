"""Fault schedules of the membership: workers are lost, return with an old view, and join.

    python tests/elastic_schedules.py --count 20000 --seed 7      run many
    python tests/elastic_schedules.py --only 4711                 replay one

The coordinator is that of real runs. Workers are plain objects whose weights are the samples that
they contain, so at the end the weights themselves show whether each sample was trained once.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections import Counter, deque
from dataclasses import dataclass, field

from paceline.protocol.balance import split_batch
from paceline.protocol.coordinator import Coordinator
from paceline.protocol.exchange_probe import ExchangeProbe
from paceline.protocol.messages import (
    CheckpointWritten,
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
    ServerReady,
    StateOffered,
    StepsApplied,
    StepStats,
    WorkerFinished,
    WorkerReady,
)
from paceline.protocol.pace import Send, SendToServers
from paceline.protocol.run_spec import EmitEvent, EndRun, InterruptWorker, RunSpec
from paceline.protocol.shard import ServerShard, StepOptimizer
from paceline.specs.strategy import LocalSteps
from paceline.strategies.registry import make_pace, make_switch_policy, parse_strategy

STRATEGIES = (
    "allreduce",
    "allreduce(balance=auto)",
    "local_sgd(h=3)",
    "diloco(h=4)",
    "ps",
    "ps(sync=bsp)",
    "ps(sync=ssp(0))",
    "ps(sync=ssp(2))",
    "ps(sync=dssp(1, 4))",
    "ps(sync=kasync(2))",
    "ps(sync=gba)",
    "switch(allreduce, ps, at=50%)",
    "switch(ps, allreduce, at=30%)",
    "switch(local_sgd(h=3), ps(sync=bsp), allreduce, at=(30%, 60%))",
    "switch(allreduce, ps, when=straggler(greedy, windows=1))",
    "auto",
)
MAX_EVENTS = 100_000

Samples = Counter[tuple[int, int]]


class Violation(AssertionError):
    """An invariant does not hold."""


@dataclass(eq=False)
class Exchange:
    """The group of one view: what its members have contributed to each synchronous step."""

    size: int
    given: dict[tuple[int, int], dict[int, Samples]] = field(default_factory=dict)


@dataclass(eq=False)
class FakeWorker:
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
    has_runner: bool = False
    fresh: bool = True
    ended_view: int = -1
    """The last view of which it knows that it has ended."""
    interrupted: bool = False
    inbox: deque[Message] = field(default_factory=deque)
    plan: deque[tuple[PlannedSteps, int, int]] = field(default_factory=deque)
    outbox: deque[tuple[Message, int]] = field(default_factory=deque)
    alive: bool = True
    """False if it was killed. A worker that was cut off lives, and does not know it."""


class ElasticPlay:
    """A run in which every next event is chosen at random."""

    def __init__(self, strategy: str, *, workers: int, seed: int, faults: int, joins: int) -> None:
        self.random = random.Random(seed)
        self.spec = parse_strategy(strategy)
        rng = self.random
        self.samples, self.batch = rng.randint(12, 40), rng.randint(workers, 8)
        self.epochs = rng.randint(1, 3)
        self.plan = RunSpec(
            strategy=self.spec,
            workers=workers,
            min_workers=1,
            checkpoint_samples=rng.choice((None, 9)),
        )
        self.coordinator = Coordinator(
            self.plan, now=0.0, paces=make_pace, policies=make_switch_policy
        )
        self.workers = {w: FakeWorker(w, rank=w, size=workers) for w in range(workers)}
        self.zombies: list[FakeWorker] = []
        self.exchanges: dict[int, Exchange] = {0: Exchange(workers)}
        self.faults, self.joins = faults, joins
        self.shard = ServerShard()
        self.server: Samples = Counter()
        self.server_view = 0
        self.gradients: dict[tuple[int, int], Samples] = {}
        self.lost: list[int] = []
        self.renew: tuple[int, int] | None = None
        self.end: EndRun | None = None
        self.now = 0.0

    # ---- the play -----------------------------------------------------------------------------

    def run(self) -> EndRun:
        for worker in self.workers.values():
            self.say(worker, self.ready(worker.number))
        for server in range(self.plan.servers):
            self.carry_out(self.coordinator.handle(ServerReady(server, "127.0.0.1", 1), 0.0))
        for _ in range(MAX_EVENTS):
            if self.end is not None:
                self.check_end()
                return self.end
            self.now += self.random.random()
            self.next_event()
            self.check()
        raise Violation("the run does not end")

    def next_event(self) -> None:
        rng = self.random
        living = [w for w in self.workers.values() if w.alive]
        if self.faults and rng.random() < 0.02 and self.coordinator.live_workers > 1:
            victim = rng.choice(living)
            if self.coordinator.can_lose(victim.number):
                self.faults -= 1
                self.lose(victim)
                return
        if self.lost and self.joins and rng.random() < 0.05:
            self.joins -= 1
            self.join(self.lost.pop(rng.randrange(len(self.lost))))
            return
        choices: list[tuple[str, FakeWorker]] = []
        for worker in [*living, *self.zombies]:
            if worker.outbox:
                choices.append(("hear", worker))
            if (worker.blocked is None and (worker.plan or worker.inbox)) or (
                worker.blocked is not None
                and (self.is_complete(worker) or worker.ended_view >= worker.view)
            ):
                choices.append(("act", worker))
        if not choices:
            if self.renew is not None:
                view, number = self.renew
                self.renew = None
                text = f"an exchange of worker {number} failed"
                self.carry_out(self.coordinator.renew(view, text, self.now))
                return
            raise Violation("everybody waits: the run is stuck")
        kind, worker = rng.choice(choices)
        if kind == "hear":
            message, view = worker.outbox.popleft()
            if isinstance(message, ExchangeFailed):
                self.renew = (view, worker.number)
            self.carry_out(self.coordinator.handle(message, self.now, view))
        else:
            self.act(worker)

    def ready(self, number: int) -> WorkerReady:
        probe = ExchangeProbe(0.001, 0.001, 0.01, 1000)
        facts = (number, self.samples, self.batch, self.epochs, ("val",))
        return WorkerReady(*facts, speed=100.0 + number, cv=0.1, exchange=probe)

    def lose(self, victim: FakeWorker) -> None:
        """Kills a worker, or cuts it off: then it goes on in its old view."""
        if self.random.random() < 0.3:
            self.zombies.append(victim)
            # A worker is named in its first message: that of a lost one comes from nobody.
            victim.outbox = deque(m for m in victim.outbox if not isinstance(m[0], WorkerReady))
        else:
            # What it has sent may still arrive, or not.
            victim.alive = False
            while victim.outbox and self.random.random() < 0.7:
                message, view = victim.outbox.popleft()
                self.carry_out(self.coordinator.handle(message, self.now, view))
                if self.end is not None:
                    return
        if not self.coordinator.can_lose(victim.number):
            return
        del self.workers[victim.number]
        self.lost.append(victim.number)
        self.carry_out(self.coordinator.lose(victim.number, "lost", self.now))

    def join(self, number: int) -> None:
        worker = self.workers[number] = FakeWorker(number, holds_state=False)
        self.coordinator.members.add(number, self.now)
        self.say(worker, self.ready(number))

    def say(self, worker: FakeWorker, message: Message) -> None:
        worker.outbox.append((message, worker.view))

    def carry_out(self, actions: list[object]) -> None:
        for action in actions:
            if isinstance(action, Send):
                if action.worker in self.workers:
                    self.workers[action.worker].inbox.append(action.message)
            elif isinstance(action, SendToServers):
                self.apply(self.shard.on_apply(action.message))  # type: ignore[arg-type]
            elif isinstance(action, InterruptWorker):
                worker = self.workers.get(action.worker)
                if worker is not None:
                    worker.ended_view = action.view
            elif isinstance(action, EndRun):
                self.end = action
            else:
                assert isinstance(action, EmitEvent)

    # ---- a worker -----------------------------------------------------------------------------

    def interrupt(self, worker: FakeWorker) -> None:
        worker.interrupted, worker.blocked = True, None
        worker.plan.clear()
        self.say(worker, ExchangeFailed(worker.rank, worker.step, "interrupted"))

    def is_complete(self, worker: FakeWorker) -> bool:
        exchange = self.exchanges[worker.view]
        assert worker.blocked is not None
        return len(exchange.given[worker.blocked]) == exchange.size

    def act(self, worker: FakeWorker) -> None:
        if worker.blocked is not None:
            if self.is_complete(worker):
                self.finish_step(worker)
            else:
                self.interrupt(worker)
        elif worker.plan:
            self.begin_step(worker)
        else:
            self.receive(worker, worker.inbox.popleft())

    def begin_step(self, worker: FakeWorker) -> None:
        steps, start, stop = worker.plan[0]
        cuts = split_batch(stop - start, worker.size, steps.batch_weights)
        own = range(start + cuts[worker.rank], start + cuts[worker.rank + 1])
        worker.local.update((steps.epoch, position) for position in own)
        worker.local_steps += 1
        phase = self.spec.phases[worker.phase]
        syncs = not isinstance(phase, LocalSteps)
        if not syncs and worker.local_steps < phase.steps_between_syncs:  # type: ignore[attr-defined]
            self.end_step(worker)
            return
        self.contribute(worker, (steps.epoch, stop))

    def contribute(self, worker: FakeWorker, key: tuple[int, int]) -> None:
        given = self.exchanges[worker.view].given.setdefault(key, {})
        given[worker.rank] = worker.local.copy()
        worker.blocked = key

    def finish_step(self, worker: FakeWorker) -> None:
        self.synchronize(worker)
        if worker.plan:  # Otherwise it settles.
            self.end_step(worker)

    def synchronize(self, worker: FakeWorker) -> None:
        assert worker.blocked is not None
        for part in self.exchanges[worker.view].given[worker.blocked].values():
            worker.weights.update(part)
        worker.local.clear()
        worker.local_steps, worker.blocked = 0, None

    def end_step(self, worker: FakeWorker) -> None:
        steps, start, stop = worker.plan.popleft()
        worker.step += 1
        worker.reached = steps.epoch * self.samples + stop
        if not worker.local_steps:
            worker.complete_at = worker.reached
        share = len(range(start, stop)) // worker.size
        slow = 3.0 if worker.number == 0 else 1.0
        measured = StepStats(share, share, 1.0, 0, busy_s=slow, comm_s=0.1, steps=1)
        self.say(worker, StepsApplied(worker.rank, steps.epoch, stop, worker.step, measured))

    def receive(self, worker: FakeWorker, message: Message) -> None:
        if worker.interrupted and not isinstance(message, Regroup):
            return
        match message:
            case PlannedSteps():
                for start in range(message.start, message.stop, message.batch):
                    stop = min(start + message.batch, message.stop)
                    worker.plan.append((message, start, stop))
            case LeaseGranted():
                self.push(worker, message)
            case Regroup():
                self.regroup(worker, message)
            case FormGroup():
                source = next((w for w in self.members() if w.rank == message.source), None)
                if source is None or worker not in self.members():
                    self.exchanges[worker.view].given[-2, worker.view] = {}
                    worker.blocked = (-2, worker.view)  # Until it is interrupted.
                    return
                if message.broadcast:
                    worker.weights = source.weights.copy()
                if worker.weights != source.weights:
                    raise Violation("workers continue from different states")
                worker.complete_at = worker.reached = message.samples
                worker.holds_state = True
                self.say(worker, GroupFormed(worker.rank))
            case EnterPhase():
                self.enter(worker, message)
            case Quiesce():
                self.settle(worker, message)
            case _:
                self.say(worker, self.answer(worker, message))

    def members(self) -> list[FakeWorker]:
        view = self.coordinator.view.number
        return [w for w in self.workers.values() if w.alive and w.view == view]

    def regroup(self, worker: FakeWorker, message: Regroup) -> None:
        worker.interrupted = False
        worker.plan.clear()
        worker.local.clear()
        worker.local_steps = 0
        keeps = message.entering and worker.fresh
        if self.has_servers(worker) and worker.has_runner and not keeps:
            if self.shard.version < message.version and worker not in self.zombies:
                raise Violation("a worker would wait for an update that cannot be applied")
            worker.weights = self.server.copy()
        worker.has_runner = False
        worker.view = message.view
        worker.rank, worker.size = message.workers.index(worker.number), len(message.workers)
        self.exchanges.setdefault(message.view, Exchange(worker.size))
        offer = StateOffered(worker.rank, worker.complete_at, worker.reached, worker.holds_state)
        self.say(worker, offer)

    def has_servers(self, worker: FakeWorker) -> bool:
        return self.spec.phases[worker.phase].servers_for(self.plan.workers) > 0

    def enter(self, worker: FakeWorker, message: EnterPhase) -> None:
        worker.phase = message.phase
        worker.handle = 0
        worker.has_runner = worker.fresh = True
        if self.has_servers(worker) and worker.rank == 0 and worker.view >= self.server_view:
            self.shard.reset()
            self.server, self.gradients = worker.weights.copy(), {}
            self.server_view = worker.view
        self.say(worker, PhaseEntered(worker.rank))

    def settle(self, worker: FakeWorker, message: Quiesce) -> None:
        worker.fresh = False
        if self.has_servers(worker):
            if self.shard.version < message.version:
                worker.inbox.appendleft(message)
                return
            worker.weights = self.server.copy()
        elif worker.local_steps:
            self.contribute(worker, (-1, message.samples))
            worker.inbox.appendleft(message)  # It is answered when all have contributed.
            return
        worker.complete_at = worker.reached = message.samples
        digest = str(hash(frozenset(worker.weights.items())))
        self.say(worker, Quiesced(worker.rank, digest, 0.1))

    def push(self, worker: FakeWorker, message: LeaseGranted) -> None:
        lease = message.lease
        worker.handle += 1
        worker.fresh = False
        if lease.samples and worker.view == self.server_view:
            key = (worker.rank, worker.handle)
            self.gradients[key] = Counter((lease.epoch, p) for p in range(lease.lo, lease.hi))
            self.apply(self.shard.on_gradient(*key))
        measured = StepStats(lease.samples, lease.samples, 0.5, 0, busy_s=1.0, steps=1)
        self.say(
            worker,
            GradientPushed(
                worker.rank,
                worker.handle,
                lease.id,
                lease.samples,
                message.version,
                worker.step,
                measured,
            ),
        )
        worker.step += 1

    def apply(self, actions: list[object]) -> None:
        for action in actions:
            if isinstance(action, StepOptimizer):
                for part in action.order.parts:
                    self.server.update(self.gradients.pop((part.worker, part.handle)))

    def answer(self, worker: FakeWorker, message: Message) -> Message:
        match message:
            case Evaluate():
                return Evaluated(worker.rank, 1.0, 1, 2)
            case SaveCheckpoint():
                return CheckpointWritten(worker.rank, "path")
            case EpochEnd():
                return EpochEndReply(worker.rank, True)
            case FinishRun():
                return WorkerFinished(worker.rank, {})
        raise AssertionError(message)

    # ---- invariants ---------------------------------------------------------------------------

    def check(self) -> None:
        history = self.coordinator.history
        if history.samples > self.samples * self.epochs:
            raise Violation(f"{history.samples} samples are counted")
        twice = [s for s, n in self.server.items() if n > 1]
        twice += [s for w in self.workers.values() for s, n in w.weights.items() if n > 1]
        if twice:
            raise Violation(f"sample {twice[0]} was trained twice")

    def check_end(self) -> None:
        assert self.end is not None
        if "no other worker holds" in (self.end.error or ""):
            if any(w.holds_state for w in self.members()):
                raise Violation(
                    f"the run ended although a worker holds its state: {self.end.error}"
                )
            return
        if self.end.status != "done":
            raise Violation(f"the run ended {self.end.status}: {self.end.error}")
        expected = Counter((e, p) for e in range(self.epochs) for p in range(self.samples))
        if self.coordinator.history.samples != expected.total():
            raise Violation(f"{self.coordinator.history.samples} samples are counted")
        for worker in self.members():
            if worker.weights != expected:
                lacking = expected - worker.weights
                raise Violation(f"worker {worker.number} ends without {len(lacking)} samples")


def run_schedule(seed: int) -> int:
    """Runs the schedule of a seed; returns the number of views."""
    rng = random.Random(seed)
    play = ElasticPlay(
        rng.choice(STRATEGIES),
        workers=rng.randint(2, 5),
        seed=seed,
        faults=rng.randint(0, 6),
        joins=rng.randint(0, 4),
    )
    play.run()
    return play.coordinator.view.number


def run_schedules(seeds: range) -> int:
    """Runs many; returns the number of views. Raises Violation with the first bad seed."""
    views = 0
    for seed in seeds:
        try:
            views += run_schedule(seed)
        except Exception as error:
            why = f"{type(error).__name__}: {error}"
            raise Violation(
                f"{why}\nreplay: python tests/elastic_schedules.py --only {seed}"
            ) from error
    return views


def main() -> None:
    parser = argparse.ArgumentParser(prog="python tests/elastic_schedules.py")
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", type=int)
    args = parser.parse_args()
    if args.only is not None:
        print(f"passed, with {run_schedule(args.only)} changes of the view")
        return
    try:
        views = run_schedules(range(args.seed, args.seed + args.count))
    except Violation as violation:
        print(violation, file=sys.stderr)
        sys.exit(1)
    print(f"{args.count} schedules passed, with {views} changes of the view")


if __name__ == "__main__":
    main()
