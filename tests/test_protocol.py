"""The state machines: exact actions, and properties under random schedules; no processes."""

from __future__ import annotations

import itertools
import random
from collections import Counter, deque
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from paceline.errors import SpecError, WireError
from paceline.protocol.balance import split_batch
from paceline.protocol.clock import (
    AspClock,
    BspClock,
    ClockDecision,
    DsspClock,
    GbaClock,
    KAsyncClock,
    Push,
    SspClock,
)
from paceline.protocol.coordinator import Coordinator
from paceline.protocol.history import History
from paceline.protocol.ledger import ALL_WORKERS, Ledger
from paceline.protocol.membership import Membership
from paceline.protocol.messages import (
    KINDS,
    ApplyUpdate,
    CheckpointWritten,
    ClipFactor,
    EnterPhase,
    EpochEnd,
    EpochEndReply,
    Evaluate,
    Evaluated,
    FinishRun,
    GradientPushed,
    GradientRef,
    Heartbeat,
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
    ShardSqNorm,
    StepsApplied,
    StepStats,
    WorkerFinished,
    WorkerReady,
    message_from_wire,
    message_to_wire,
)
from paceline.protocol.pace import Send, SendToServers
from paceline.protocol.run_spec import EmitEvent, EndRun, RunSpec
from paceline.protocol.shard import SendWeights, ServerShard, StepOptimizer, SumGradients
from paceline.protocol.switch_policy import RunHorizon
from paceline.protocol.throughput import TrainTotals
from paceline.specs.schedule import Constant
from paceline.specs.stop_condition import parse_stop_condition
from paceline.specs.strategy import Strategy
from paceline.strategies.ps.sync import Gba
from paceline.strategies.registry import make_pace, make_switch_policy, parse_strategy
from paceline.telemetry.events import EpochRow, Event

# ---- ledger -----------------------------------------------------------------------------------


@given(
    samples=st.integers(1, 60),
    moves=st.lists(
        st.tuples(st.integers(0, 3), st.integers(1, 9), st.sampled_from("takb")), max_size=80
    ),
)
def test_ledger_gives_every_position_exactly_once(samples: int, moves: list[Any]) -> None:
    """Whatever is taken, acknowledged, given back or lost with its worker."""
    ledger = Ledger(samples)
    held: dict[int, list[Any]] = {w: [] for w in range(4)}
    done: Counter[int] = Counter()

    def take(worker: int, count: int) -> None:
        entry = ledger.take(worker, count, samples)
        if entry is not None:
            held[worker].append(entry)

    def acknowledge(worker: int) -> None:
        if held[worker]:
            entry = held[worker].pop(0)
            ledger.acknowledge(entry.id, worker)
            done.update(range(entry.lo, entry.hi))

    for worker, count, move in moves:
        if move == "t":
            take(worker, count)
        elif move == "a":
            acknowledge(worker)
        elif move == "k":
            ledger.return_all_of(worker)
            held[worker] = []
        elif held[worker]:
            ledger.return_lease(held[worker].pop().id, worker)
        assert max(done.values(), default=1) == 1
        assert all(done[p] for p in range(ledger.frontier))
    while ledger.frontier < samples:
        for worker in held:
            take(worker, 5)
            acknowledge(worker)
    assert done == Counter(range(samples))
    assert len(ledger._out) == sum(len(h) for h in held.values())


def test_ledger_refuses_an_acknowledgement_that_comes_twice_or_from_another() -> None:
    ledger = Ledger(10)
    entry = ledger.take(0, 4, 10)
    assert entry is not None
    with pytest.raises(KeyError, match="worker 1 does not hold lease"):
        ledger.acknowledge(entry.id, 1)
    ledger.acknowledge(entry.id, 0)
    with pytest.raises(KeyError):
        ledger.acknowledge(entry.id, 0)


@given(
    count=st.integers(0, 200),
    weights=st.lists(st.integers(0, 50), min_size=1, max_size=9).filter(any),
)
def test_shares_cover_the_batch_in_proportion(count: int, weights: list[int]) -> None:
    even = split_batch(count, len(weights))
    sizes = [b - a for a, b in itertools.pairwise(even)]
    assert sum(sizes) == count
    assert max(sizes) - min(sizes) <= 1
    cuts = split_batch(count, len(weights), tuple(weights))
    assert (cuts[0], cuts[-1]) == (0, count)
    shares = [(b - a, w) for (a, b), w in zip(itertools.pairwise(cuts), weights, strict=True)]
    assert all(share >= count * w // sum(weights) for share, w in shares)
    assert not any(share for share, w in shares if not w)
    # No other division finishes earlier: each worker would need longer for one sample more.
    slowest = max(Fraction(share, w) for share, w in shares if w)
    assert all(Fraction(share + 1, w) >= slowest for share, w in shares if w)


# ---- clocks and shard -------------------------------------------------------------------------


def push(worker: int, handle: int = 1) -> Push:
    return Push(worker, handle, 4, 0.5, 0)


def test_asp_applies_and_releases_at_once() -> None:
    verdict = AspClock(3).on_push(push(2), 0.0)
    assert verdict.updates == [[push(2)]]
    assert verdict.release == [2]


def test_bsp_waits_for_all_and_sums_in_the_order_of_workers() -> None:
    clock = BspClock(3)
    assert clock.on_push(push(2), 0.0).release == []
    assert clock.on_push(push(0), 0.0).updates == []
    verdict = clock.on_push(push(1), 0.0)
    assert verdict.updates == [[push(0), push(1), push(2)]]
    assert verdict.release == [0, 1, 2]


@given(st.lists(st.integers(0, 4), max_size=100))
def test_lag_is_the_distance_to_the_slowest(advances: list[int]) -> None:
    counts = AspClock(5)
    plain = [0] * 5
    for worker in advances:
        counts.advance(worker)
        plain[worker] += 1
        assert [counts.lag(w) for w in range(5)] == [c - min(plain) for c in plain]


def order(version: int, *workers: int, clip: float | None = None) -> ApplyUpdate:
    return ApplyUpdate(version, tuple(GradientRef(w, version, 1.0) for w in workers), 1.0, clip)


@given(st.permutations(["g0", "g1", "a1", "a2", "pull"]))
def test_shard_applies_in_order_whatever_comes_first(arrivals: list[str]) -> None:
    shard = ServerShard()
    happened: list[Any] = []
    for arrival in arrivals:
        if arrival == "g0":
            happened += shard.on_gradient(0, 1)
        elif arrival == "g1":
            happened += shard.on_gradient(1, 2)
        elif arrival == "a1":
            happened += shard.on_apply(order(1, 0))
        elif arrival == "a2":
            happened += shard.on_apply(order(2, 1))
        else:
            happened += shard.on_pull(9, at_least=2)
    updates = [a.order.version for a in happened if isinstance(a, StepOptimizer)]
    assert updates == [1, 2]
    assert [a for a in happened if isinstance(a, SendWeights)] == [SendWeights(9, 2)]


def test_shard_ignores_orders_that_come_again() -> None:
    shard = ServerShard()
    shard.on_gradient(0, 1)
    assert len(shard.on_apply(order(1, 0))) == 1
    assert shard.on_apply(order(1, 0)) == []


def test_shard_sums_first_and_updates_when_the_norm_is_known() -> None:
    shard = ServerShard()
    shard.on_gradient(0, 1)
    clipped = order(1, 0, clip=1.0)
    assert shard.on_apply(clipped) == [SumGradients(clipped)]
    assert shard.version == 0
    assert shard.on_clip(1, 0.25) == [StepOptimizer(clipped, 0.25, summed=True)]


# ---- messages ---------------------------------------------------------------------------------

EXAMPLES: list[Message] = [
    PlannedSteps(1, 0, 64, 32, None),
    PlannedSteps(1, 0, 64, 32, (1, 0)),
    LeaseGranted(3, Lease(1, 0, 0, 8, 2, 4), -1),
    EnterPhase(0, (("127.0.0.1", 5),), True),
    Quiesce(4, 8),
    SaveCheckpoint("1", {"history": {"rows": [{"a": None}]}}),
    WorkerReady(0, 10, 2, None, ("val",)),
    GradientPushed(0, 1, 2, 3, 4, 5, StepStats(1, 1, 0.5, 1)),
    StepsApplied(0, 0, 4, 1, StepStats(4, 4, None, 0)),
    order(1, 0, 1),
    WorkerFinished(0, {"phases": {"wait": 1.0}}),
]


@pytest.mark.parametrize("message", EXAMPLES, ids=lambda m: type(m).__name__)
def test_messages_survive_the_wire(message: Message) -> None:
    import msgpack

    assert message_from_wire(msgpack.unpackb(msgpack.packb(message_to_wire(message)))) == message


@pytest.mark.parametrize(
    "plain",
    [{"kind": "Nonsense"}, {"kind": "Quiesce"}, {"kind": "Quiesce", "version": 1, "x": 2}, 7],
)
def test_strange_messages_are_refused(plain: object) -> None:
    with pytest.raises(WireError):
        message_from_wire(plain)


def test_every_kind_of_message_is_known() -> None:
    assert {type(m).__name__ for m in EXAMPLES} <= set(KINDS)


# ---- the whole run, played with random delays -------------------------------------------------


def make_coordinator(plan: RunSpec) -> Coordinator:
    return Coordinator(plan, now=0.0, paces=make_pace, policies=make_switch_policy)


class Play:
    """Workers and servers as plain objects; each delivered message is chosen at random."""

    def __init__(self, plan: RunSpec, *, samples: int, batch: int, epochs: int, seed: int) -> None:
        self.random = random.Random(seed)
        self.coordinator = make_coordinator(plan)
        self.plan, self.samples, self.batch, self.epochs = plan, samples, batch, epochs
        self.now = 0.0
        self.inbox: list[deque[Message]] = [deque() for _ in range(plan.workers)]
        self.shards = [ServerShard() for _ in range(plan.servers)]
        self.to_coordinator: list[deque[Message]] = [deque() for _ in range(plan.workers)]
        self.seen: Counter[tuple[int, int]] = Counter()
        self.handles = [0] * plan.workers
        self.steps = [0] * plan.workers
        self.events: list[Event] = []
        self.end: EndRun | None = None
        self.max_ahead = 0

    def run(self) -> EndRun:
        for worker in range(self.plan.workers):
            ready = WorkerReady(worker, self.samples, self.batch, self.epochs, ("val", "test"))
            self.to_coordinator[worker].append(ready)
        for server in range(self.plan.servers):
            self.give(ServerReady(server, "127.0.0.1", 1))
        for _ in range(200_000):
            if self.end is not None:
                return self.end
            choices = [("w", w) for w, box in enumerate(self.inbox) if box]
            choices += [("c", w) for w, box in enumerate(self.to_coordinator) if box]
            assert choices, "everybody waits: the run is stuck"
            kind, worker = self.random.choice(choices)
            self.now += self.random.random()
            if kind == "c":
                self.give(self.to_coordinator[worker].popleft())
            else:
                self.act(worker, self.inbox[worker].popleft())
        raise AssertionError("the run does not end")

    def give(self, message: Message) -> None:
        for action in self.coordinator.handle(message, self.now):
            if isinstance(action, Send):
                self.inbox[action.worker].append(action.message)
            elif isinstance(action, SendToServers):
                for index in range(action.servers):
                    self.order(index, action.message)
            elif isinstance(action, EmitEvent):
                self.events.append(action.event)
            else:
                self.end = action

    def order(self, server: int, message: Message) -> None:
        shard = self.shards[server]
        actions = (
            shard.on_clip(message.version, message.factor)
            if isinstance(message, ClipFactor)
            else shard.on_apply(message)  # type: ignore[arg-type]
        )
        self.carry_out(server, actions)

    def carry_out(self, server: int, actions: list[Any]) -> None:
        for action in actions:
            if isinstance(action, SumGradients):
                self.to_coordinator[0].append(ShardSqNorm(server, action.order.version, 4.0))

    def act(self, worker: int, message: Message) -> None:
        out = self.to_coordinator[worker]
        if isinstance(message, PlannedSteps):
            start = message.start
            while start < message.stop:
                stop = min(start + message.batch, message.stop)
                cuts = split_batch(stop - start, self.plan.workers, message.batch_weights)
                for position in range(start + cuts[worker], start + cuts[worker + 1]):
                    self.seen[message.epoch, position] += 1
                share = cuts[worker + 1] - cuts[worker]
                slow = 3.0 if worker == 0 and self.random.random() < 0.9 else 1.0
                measured = StepStats(share, share, 1.0 * share, share, busy_s=slow, comm_s=0.1)
                self.steps[worker] += 1
                step = self.steps[worker]
                out.append(StepsApplied(worker, message.epoch, stop, step, measured))
                start = stop
        elif isinstance(message, LeaseGranted):
            lease = message.lease
            for position in range(lease.lo, lease.hi):
                self.seen[lease.epoch, position] += 1
            self.handles[worker] += 1
            self.steps[worker] += 1
            handle, step = self.handles[worker], self.steps[worker] - 1
            if lease.samples and not self.follows(worker):
                for server, shard in enumerate(self.shards):
                    self.carry_out(server, shard.on_gradient(worker, handle))
            measured = StepStats(lease.samples, lease.samples, 0.5 * lease.samples, 0, busy_s=1.0)
            out.append(
                GradientPushed(
                    worker, handle, lease.id, lease.samples, message.version, step, measured
                )
            )
        elif isinstance(message, Quiesce) and self.lags_behind(message.version):
            self.inbox[worker].appendleft(message)  # A pull of that version is not answered yet.
        else:
            out.append(self.answer(worker, message))

    def lags_behind(self, version: int) -> bool:
        phase = self.plan.strategy.phases[self.coordinator.history.phase]
        used = self.shards[: phase.servers_for(self.plan.workers)]
        return any(shard.version < version for shard in used)

    def follows(self, worker: int) -> bool:
        """Another worker of its group pushes for it."""
        return any(worker in group[1:] for group in self.groups)

    def answer(self, worker: int, message: Message) -> Message:
        if isinstance(message, EnterPhase):
            self.groups = message.groups
            if worker == 0:
                for shard in self.shards:
                    shard.reset()
            return PhaseEntered(worker)
        if isinstance(message, Quiesce):
            return Quiesced(worker, "same", 0.1)
        if isinstance(message, Evaluate):
            return Evaluated(worker, 1.0, 1, 2)
        if isinstance(message, SaveCheckpoint):
            return CheckpointWritten(worker, "path")
        if isinstance(message, EpochEnd):
            return EpochEndReply(worker, True)
        assert isinstance(message, FinishRun)
        return WorkerFinished(worker, {})


STRATEGIES = [
    "allreduce",
    "ps",
    "ps(sync=ssp(0))",
    "ps(sync=ssp(2))",
    "ps(sync=ssp(inf))",
    "ps(sync=dssp(1, 4))",
    "ps(sync=kasync(1))",
    "ps(sync=gba, servers=2)",
    "ps(damp=inverse)",
    "ps(overlap=true)",
    "ps(sync=gba, overlap=true)",
    "switch(ps(sync=ssp(1)), ps(sync=gba), ps(sync=dssp), at=(30%, 60%))",
    "local_sgd(h=3)",
    "grouped(size=1)",
    "grouped(size=1, by=speed)",
    "switch(grouped(size=1), allreduce, at=50%)",
    "diloco(h=5)",
    "allreduce(balance=auto)",
    "switch(local_sgd, allreduce, at=50%)",
    "switch(allreduce, ps, when=auto)",
    "switch(allreduce, ps, when=straggler(greedy))",
    "switch(allreduce, ps, when=straggler(elastic))",
    "switch(allreduce, ps, when=plateau(window=1, patience=1))",
    "ps(sync=bsp)",
    "ps(servers=3)",
    "switch(allreduce, ps, at=50%)",
    "switch(ps, allreduce, at=samples(13))",
    "switch(allreduce, ps(sync=bsp, servers=2), single, ps, at=(10%, 40%, 90%))",
]


def horizon(samples: int, batch: int, epochs: int) -> RunHorizon:
    return RunHorizon(
        workers=3, samples_per_epoch=samples, epochs=epochs, batch=batch, schedule=Constant()
    )


def placeable(spec: Strategy, samples: int, batch: int, epochs: int) -> bool:
    try:
        make_switch_policy(
            spec,
            horizon(samples, batch, epochs),
        )
    except SpecError:
        return False
    return True


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("switch(allreduce, ps, at=samples(95))", "at or beyond the end"),
        ("switch(allreduce, ps, at=samples(91))", "at or beyond the end"),
        ("switch(allreduce, ps, single, at=(samples(3), samples(7)))", "different batches"),
        ("switch(allreduce, ps, single, at=(50%, 25%))", "must be increasing"),
    ],
)
def test_points_that_cannot_be_placed_are_refused(text: str, complaint: str) -> None:
    with pytest.raises(SpecError, match=complaint):
        make_switch_policy(
            parse_strategy(text),
            horizon(95, 10, 1),
        )


def test_a_point_inside_a_batch_moves_to_its_end() -> None:
    policy = make_switch_policy(
        parse_strategy("switch(allreduce, ps, at=48%)"),
        horizon(95, 10, 2),
    )
    assert policy.next_stop(History(samples=20)) == 95
    assert policy.decide(History(samples=90)) is None
    decision = policy.decide(History(samples=95))
    assert decision is not None
    assert (decision.phase, decision.reason) == (1, "at=48%")


@settings(max_examples=150, deadline=None)
@given(
    strategy=st.sampled_from(STRATEGIES),
    workers=st.integers(1, 5),
    samples=st.integers(20, 90),
    batch=st.integers(5, 16),
    epochs=st.integers(1, 3),
    clip=st.sampled_from([None, 1.0]),
    every=st.sampled_from([None, 17]),
    seed=st.integers(0, 2**32),
)
def test_random_schedules_end_with_every_sample_counted_once(
    strategy: str,
    workers: int,
    samples: int,
    batch: int,
    epochs: int,
    clip: float | None,
    every: int | None,
    seed: int,
) -> None:
    spec = parse_strategy(strategy)
    assume(placeable(spec, samples, batch, epochs))
    plan = RunSpec(strategy=spec, workers=workers, clip=clip, checkpoint_samples=every)
    play = Play(plan, samples=samples, batch=batch, epochs=epochs, seed=seed)
    end = play.run()
    assert end == EndRun("done", None)
    expected = {(e, p) for e in range(epochs) for p in range(samples)}
    assert play.seen == Counter(expected)
    history = play.coordinator.history
    assert history.samples == epochs * samples
    assert len(history.rows) == epochs
    if getattr(spec, "when", None) is None:
        assert len(history.switches) == len(spec.phases) - 1
    for shard in play.shards[: spec.phases[history.phase].servers_for(workers)]:
        assert shard.version == play.coordinator._pace.version  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("strategy", "workers", "updates"),
    [("allreduce", 3, 9), ("ps(sync=bsp)", 3, 9), ("ps", 3, 25), ("single", 1, 9)],
)
def test_updates_are_counted_as_each_strategy_makes_them(
    strategy: str, workers: int, updates: int
) -> None:
    """98 samples in batches of 12 are 9 synchronous updates, or leases of 4 asynchronously."""
    plan = RunSpec(strategy=parse_strategy(strategy), workers=workers)
    play = Play(plan, samples=98, batch=12, epochs=1, seed=1)
    play.run()
    assert play.coordinator.history.updates == updates


def test_rate_of_asynchronous_updates_adds_up_to_the_batches_of_an_epoch() -> None:
    """Each sample weighs one over its global batch, also in a last batch that is short."""
    plan = RunSpec(strategy=parse_strategy("ps(damp=none)"), workers=5)
    play = Play(plan, samples=50, batch=12, epochs=1, seed=3)
    scales = []
    original = play.order
    play.order = lambda s, m: (scales.append(m.lr_scale), original(s, m))[1]  # type: ignore
    play.run()
    assert sum(scales) == pytest.approx(5)


def test_shares_of_corrected_updates_add_up_to_the_batches_of_an_epoch() -> None:
    plan = RunSpec(strategy=parse_strategy("ps"), workers=5)
    play = Play(plan, samples=50, batch=12, epochs=1, seed=3)
    fractions = []
    original = play.order
    play.order = lambda s, m: (fractions.append(m.fraction), original(s, m))[1]  # type: ignore
    play.run()
    assert sum(share for share, _, _ in fractions) == pytest.approx(5)
    assert all(delay >= 0 for _, delay, _ in fractions)


def run_until_done(**changes: Any) -> Coordinator:
    plan = RunSpec(strategy=parse_strategy("allreduce"), workers=2, **changes)
    play = Play(plan, samples=20, batch=10, epochs=6, seed=0)
    assert play.run().status == "done"
    return play.coordinator


def test_until_and_patience_stop_early() -> None:
    # The play's validation accuracy is always 1/2 and its loss never gets better.
    assert run_until_done(until=parse_stop_condition("val_acc>=0.5")).history.epoch == 1
    assert run_until_done(until=parse_stop_condition("val_acc>0.5")).history.epoch == 6
    assert run_until_done(patience=2).history.epoch == 3


def test_replicas_that_differ_end_the_run() -> None:
    plan = RunSpec(strategy=parse_strategy("allreduce"), workers=2)
    play = Play(plan, samples=20, batch=10, epochs=1, seed=0)
    usual = play.answer
    play.answer = lambda w, m: (  # type: ignore[method-assign]
        Quiesced(w, f"sum {w}", 0.1) if isinstance(m, Quiesce) else usual(w, m)
    )
    end = play.run()
    assert end.status == "failed"
    assert "worker 1 and worker 0 hold different weights" in str(end.error)


def test_divergence_names_step_and_worker() -> None:
    plan = RunSpec(strategy=parse_strategy("allreduce"), workers=2)
    coordinator = make_coordinator(plan)
    (end,) = coordinator.handle(LossDiverged(1, 17, float("nan"), "it is not finite"), 1.0)
    assert isinstance(end, EndRun)
    assert end.status == "diverged"
    assert "NaN at step 17 of worker 1" in str(end.error)


def test_workers_that_disagree_on_the_data_are_refused() -> None:
    coordinator = make_coordinator(RunSpec(strategy=parse_strategy("allreduce"), workers=2))
    coordinator.handle(WorkerReady(0, 10, 2, 1, ()), 0.0)
    (end,) = coordinator.handle(WorkerReady(1, 11, 2, 1, ()), 0.0)
    assert isinstance(end, EndRun)
    assert "worker 1 has 11 samples" in str(end.error)


# ---- membership and history -------------------------------------------------------------------


def test_the_one_who_computes_is_stuck_not_those_who_wait_for_it() -> None:
    members = Membership(3, now=0.0)
    members.on_heartbeat(0, 5, "comm_exposed", 10, 1.0)
    members.on_heartbeat(1, 5, "forward", 9, 1.0)
    members.on_heartbeat(2, 5, "comm_exposed", 10, 1.0)
    assert members.find_stuck(4.0, lambda phase: 5.0) == []
    assert [w for w, _ in members.find_stuck(7.0, lambda phase: 5.0)] == [1]
    members.on_heartbeat(1, 6, "comm_exposed", 11, 7.0)
    assert members.find_stuck(8.0, lambda phase: 5.0) == []
    assert [w for w, _ in members.find_stuck(20.0, lambda phase: 5.0)] == [0, 1, 2]


def test_a_coordinator_takes_heartbeats_at_any_time() -> None:
    coordinator = make_coordinator(RunSpec(strategy=parse_strategy("single"), workers=1))
    assert coordinator.handle(Heartbeat(0, 3, "forward", 7), 1.0) == []
    assert coordinator.members.last_step(0) == 3


def test_history_survives_being_written_down() -> None:
    history = History(
        samples=9, updates=3, phase=1, epoch=2, rows=[EpochRow(epoch=1, val_loss=0.5)]
    )
    history.staleness.update([0, 1, 1])
    history.tally = TrainTotals(samples=4, predictions=4, loss_sum=2.0, correct=3)
    assert History.from_plain(history.to_plain()) == history
    assert history.tally.loss == 0.5
    assert ALL_WORKERS not in range(100)


# ---- bounded staleness ------------------------------------------------------------------------


def play_clock(
    clock: Any, workers: int, steps: int, speeds: list[float], seed: int, slow_s: float = 0.0
) -> Any:
    """Workers of given speeds against a clock: starts of steps (worker, lag), waiting, the end.

    Waiting time is the time between a worker's push and its release.
    """
    rng = random.Random(seed)
    clock.begin()
    now, waited = 0.0, 0.0

    def takes(worker: int) -> float:
        # Now and then a machine is slow for a while: every worker in turn, `slow_s` at a time.
        slow = slow_s > 0 and int(now / slow_s) % (2 * workers) == 2 * worker
        return speeds[worker] * rng.uniform(0.9, 1.1) * (4.0 if slow else 1.0)

    due = {w: takes(w) for w in range(workers)}
    held: dict[int, float] = {}
    starts = []
    for handle in range(steps):
        worker = min(due, key=lambda w: (due[w], w))
        now = due.pop(worker)
        verdict = clock.on_push(Push(worker, handle, 1, 1 / workers, 0), now)
        held[worker] = now
        assert due or verdict.release, "everybody waits"
        for released in verdict.release:
            waited += now - held.pop(released)
            starts.append((released, clock.lag(released)))
            due[released] = now + takes(released)
    return starts, waited, now


@given(
    speeds=st.lists(st.floats(0.2, 5.0), min_size=2, max_size=6),
    bound=st.integers(0, 6),
    seed=st.integers(0, 10_000),
)
@settings(deadline=None)
def test_ssp_never_exceeds_its_bound_and_never_stops_everybody(
    speeds: list[float], bound: int, seed: int
) -> None:
    starts, _, _ = play_clock(SspClock(len(speeds), bound), len(speeds), 300, speeds, seed)
    assert max(lag for _, lag in starts) <= bound


@given(
    speeds=st.lists(st.floats(0.2, 5.0), min_size=2, max_size=6),
    low=st.integers(0, 4),
    span=st.integers(0, 8),
    seed=st.integers(0, 10_000),
)
@settings(deadline=None)
def test_dssp_keeps_its_upper_bound(speeds: list[float], low: int, span: int, seed: int) -> None:
    clock = DsspClock(len(speeds), low, low + span)
    starts, _, _ = play_clock(clock, len(speeds), 300, speeds, seed)
    assert max(lag for _, lag in starts) <= low + span


@pytest.mark.parametrize("seed", range(5))
def test_dssp_waits_less_than_ssp_at_its_lower_bound(seed: int) -> None:
    """On machines that are slow in turn; a lasting straggler sets everybody's pace under both."""
    speeds = [1.0, 1.1, 1.2, 1.3]
    _, strict, _ = play_clock(SspClock(4, 3), 4, 4000, speeds, seed, slow_s=12)
    _, dynamic, _ = play_clock(DsspClock(4, 3, 15), 4, 4000, speeds, seed, slow_s=12)
    assert dynamic < strict


@given(order=st.permutations([0, 0, 0, 1, 1, 2]))
def test_ssp_without_a_bound_admits_every_order_that_asp_does(order: list[int]) -> None:
    ssp, asp = SspClock(3, float("inf")), AspClock(3)
    for handle, worker in enumerate(order):
        mine = Push(worker, handle, 4, 0.5, 0)
        assert ssp.on_push(mine, 0.0) == asp.on_push(mine, 0.0)


def test_kasync_makes_an_update_of_the_first_k() -> None:
    clock = KAsyncClock(4, 2)
    assert clock.on_push(push(3), 0.0) == ClockDecision()
    assert clock.on_push(push(1), 0.0) == ClockDecision([[push(1), push(3)]], [1, 3])
    clock.on_push(push(0), 0.0)
    assert clock.flush() == ClockDecision([[push(0)]], [0])


def test_gba_buffers_to_a_global_batch_and_lets_everybody_go_on() -> None:
    clock = GbaClock(2)
    assert clock.on_push(push(0, 1), 0.0) == ClockDecision([], [0])
    assert clock.on_push(push(0, 2), 0.0) == ClockDecision([[push(0, 1), push(0, 2)]], [0])
    assert [Gba(stale=2, decay=0.5).gradient_weight(s) for s in (0, 2, 3, 5)] == [1, 1, 0.5, 0.125]
