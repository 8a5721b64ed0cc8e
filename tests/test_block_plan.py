"""Assignment of rows to workers: each exactly once per epoch, for any blocks and failures."""

from __future__ import annotations

import random
from collections import Counter, deque
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.protocol.balance import split_batch
from paceline.protocol.block_plan import (
    BlockDealer,
    BlockLayout,
    EpochBlockPlan,
    layout_fingerprint,
    merge_ranges,
    take_rows,
)
from paceline.protocol.coordinator import Coordinator
from paceline.protocol.ledger import Ledger
from paceline.protocol.messages import (
    CheckpointWritten,
    EnterPhase,
    EpochEnd,
    EpochEndReply,
    FinishRun,
    GradientPushed,
    Lease,
    LeaseGranted,
    PhaseEntered,
    PlannedSteps,
    Quiesce,
    Quiesced,
    SaveCheckpoint,
    ServerReady,
    StepsApplied,
    StepStats,
    WorkerFinished,
    WorkerReady,
    message_from_wire,
    message_to_wire,
)
from paceline.protocol.pace import Send
from paceline.protocol.run_spec import EndRun, RunSpec
from paceline.strategies.registry import make_pace, make_switch_policy, parse_strategy

files = st.lists(st.lists(st.integers(1, 40), min_size=1, max_size=4), min_size=1, max_size=13)
"""Files of unequal sizes, each of a few row groups."""


@st.composite
def layouts(draw: st.DrawFn) -> BlockLayout:
    sizes = draw(files)
    by_file = draw(st.booleans())
    rows = tuple(size for file in sizes for size in file)
    units = tuple(n for n, file in enumerate(sizes) for _ in file)
    if not by_file:
        units = tuple(range(len(rows)))
    return BlockLayout(rows, units, draw(st.sampled_from([0, 1, 20, 100, 10_000])), draw(seeds))


seeds = st.integers(0, 2**31 - 1)


@given(layouts(), st.integers(0, 50))
def test_an_epoch_has_every_block_once(layout: BlockLayout, epoch: int) -> None:
    plan = EpochBlockPlan(layout, epoch)
    blocks = [block for window in plan.windows for block in window.blocks]
    assert sorted(blocks) == list(range(len(layout.rows)))
    if not layout.window:
        assert blocks == sorted(blocks)
    assert [w.lo for w in plan.windows] == [0, *(w.hi for w in plan.windows)][:-1]
    assert plan.row_count == sum(layout.rows)
    for window in plan.windows:
        assert window.hi - window.lo == sum(layout.rows[b] for b in window.blocks)
        # More than a window's rows only where a single block has more.
        assert len(window.blocks) == 1 or window.hi - window.lo <= layout.window
    assert [piece for deal in plan.deals for piece in deal] == [(w.lo, w.hi) for w in plan.windows]
    again = EpochBlockPlan(layout, epoch)
    assert again.windows == plan.windows


@given(layouts(), st.integers(0, 5))
def test_a_file_goes_to_one_worker(layout: BlockLayout, epoch: int) -> None:
    plan = EpochBlockPlan(layout, epoch)
    deal_of = {lo: number for number, deal in enumerate(plan.deals) for lo, _ in deal}
    owners: dict[int, set[int]] = {}
    for window in plan.windows:
        for block in window.blocks:
            owners.setdefault(layout.units[block], set()).add(deal_of[window.lo])
    assert all(len(deals) == 1 for deals in owners.values())


def test_shuffled_epochs_differ() -> None:
    layout = BlockLayout((5,) * 40, tuple(range(40)), 10, 3)
    orders = [[w.blocks for w in EpochBlockPlan(layout, epoch).windows] for epoch in range(4)]
    assert len({str(order) for order in orders}) == 4


@given(layouts(), st.integers(1, 7), seeds)
def test_whoever_asks_each_place_is_drawn_once(
    layout: BlockLayout, workers: int, seed: int
) -> None:
    """Unequal speeds, places given back by workers that are gone, and a fresh start in between."""
    rng = random.Random(seed)
    plan = EpochBlockPlan(layout, 0)
    allotment = BlockDealer(plan)
    left = plan.row_count
    seen: Counter[int] = Counter()
    while left:
        chance = rng.random()
        if chance < 0.03:
            pieces = allotment.remaining()
            workers = rng.randint(1, 7)
            allotment = BlockDealer(plan, pieces)
            assert allotment.remaining() == pieces
        worker = rng.randrange(workers)
        count = min(left, rng.randint(1, 60))
        drawn = allotment.draw(worker, count)
        assert sum(hi - lo for lo, hi in drawn) == count
        if 0.03 <= chance < 0.1:
            allotment.return_rows(drawn)
            allotment.drop_worker(worker)
            continue
        left -= count
        for lo, hi in drawn:
            seen.update(range(lo, hi))
    assert seen == Counter(range(plan.row_count))
    assert allotment.remaining() == []


@given(st.integers(2, 7), st.integers(2, 60), st.integers(2, 30))
def test_windows_are_read_by_one_worker_but_for_the_last(
    workers: int, blocks: int, rows: int
) -> None:
    """Of one big file nobody reads all: only what is left at the end is shared."""
    plan = EpochBlockPlan(BlockLayout((rows,) * blocks, tuple(range(blocks)), rows, 0), 0)
    allotment = BlockDealer(plan)
    readers: dict[int, set[int]] = {}
    for start in range(0, plan.row_count, workers):
        for worker, (lo, hi) in enumerate(
            pairwise(split_batch(min(workers, plan.row_count - start), workers))
        ):
            for a, _ in allotment.draw(worker, hi - lo):
                readers.setdefault(plan.find_window(a), set()).add(worker)
    shared = sum(len(who) - 1 for who in readers.values())
    # Each time a worker runs dry at the end it halves another's rest.
    assert shared <= workers * max(1, rows.bit_length())
    if blocks >= 4 * workers:
        assert sum(len(who) == 1 for who in readers.values()) >= blocks - 2 * workers


def test_pieces_can_be_cut_and_joined() -> None:
    assert merge_ranges([(0, 3), (3, 5), (9, 10)]) == ((0, 5), (9, 10))
    queue = deque(((0, 5), (9, 12)))
    taken = [take_rows(queue, n) for n in (2, 0, 4, 2)]
    assert taken == [((0, 2),), (), ((2, 5), (9, 10)), ((10, 12),)]


def test_messages_carry_places() -> None:
    lease = Lease(1, 0, 0, 8, 0, 4, ((3, 5), (9, 11)), ((11, 20),))
    go = LeaseGranted(0, lease, -1)
    ready = WorkerReady(0, 8, 4, 1, (), 0.0, BlockLayout((4, 4), (0, 1), 4, 7))
    for message in (go, ready, PlannedSteps(0, 0, 8, 4, None, ((0, 8),), ())):
        plain = message_to_wire(message)
        listed = {k: _as_lists(v) for k, v in plain.items()}
        assert message_from_wire(listed) == message


def _as_lists(value: Any) -> Any:
    """As they come off the wire."""
    if isinstance(value, (list, tuple)):
        return [_as_lists(v) for v in value]
    if isinstance(value, dict):
        return {k: _as_lists(v) for k, v in value.items()}
    return value


# ---- through the coordinator -----------------------------------------------------------------


class Workers:
    """Carries out what a coordinator orders, in an order of its own, and keeps account."""

    def __init__(self, rng: random.Random, layout: BlockLayout, batch: int, epochs: int) -> None:
        self._rng = rng
        self._layout = layout
        self._batch = batch
        self._epochs = epochs
        self.seen: dict[int, Counter[int]] = {}
        self.order: dict[int, list[tuple[int, int]]] = {}
        self.memory: dict[str, Any] | None = None
        self._steps: Counter[int] = Counter()

    def note(self, worker: int, lease: Lease) -> None:
        assert sum(hi - lo for lo, hi in lease.row_ranges) == lease.samples
        for lo, hi in lease.row_ranges:
            self.seen.setdefault(lease.epoch, Counter()).update(range(lo, hi))
            self.order.setdefault(worker, []).append((lo, hi))

    def run(self, strategy: str, workers: int, *, every: int, until_save: int | None) -> str:
        """Train until the end, or until so many checkpoints; returns how it ended."""
        plan = RunSpec(strategy=parse_strategy(strategy), workers=workers, checkpoint_samples=every)
        coordinator = Coordinator(
            plan, now=0.0, paces=make_pace, policies=make_switch_policy, memory=self.memory
        )
        queue: list[Any] = []
        now = 0.0
        samples = sum(self._layout.rows)
        for worker in range(workers):
            queue.append(
                WorkerReady(worker, samples, self._batch, self._epochs, (), 0.0, self._layout)
            )
        queue += [ServerReady(i, "127.0.0.1", 1) for i in range(plan.servers)]
        self._steps = Counter()
        saves = 0
        while queue:
            now += 0.1
            event = queue.pop(self._rng.randrange(len(queue)))
            for action in coordinator.handle(event, now):
                if isinstance(action, EndRun):
                    assert action.status == "done", action.error
                    return "done"
                if not isinstance(action, Send):
                    continue
                worker, message = action.worker, action.message
                if isinstance(message, PlannedSteps):
                    queue.append(self._advance(worker, workers, message))
                elif isinstance(message, LeaseGranted):
                    self.note(worker, message.lease)
                    step = self._steps[worker]
                    self._steps[worker] += 1
                    measured = StepStats(message.lease.samples, 1, 0.0, 0)
                    queue.append(
                        GradientPushed(
                            worker,
                            step,
                            message.lease.id,
                            message.lease.samples,
                            message.version,
                            step,
                            measured,
                        )
                    )
                elif isinstance(message, SaveCheckpoint):
                    self.memory = message.coordinator_state
                    saves += worker == 0
                    queue.append(CheckpointWritten(worker, ""))
                    if until_save is not None and saves >= until_save and worker == workers - 1:
                        return "saved"
                elif isinstance(message, EnterPhase):
                    queue.append(PhaseEntered(worker))
                elif isinstance(message, Quiesce):
                    queue.append(Quiesced(worker, "same", 0.1))
                elif isinstance(message, EpochEnd):
                    queue.append(EpochEndReply(worker, True))
                elif isinstance(message, FinishRun):
                    queue.append(WorkerFinished(worker, {}))
        raise AssertionError("nobody has anything to say any more")

    def _advance(self, worker: int, workers: int, steps: PlannedSteps) -> StepsApplied:
        rows = deque(steps.pieces)
        done = 0
        for start in range(steps.start, steps.stop, steps.batch):
            stop = min(start + steps.batch, steps.stop)
            cuts = split_batch(stop - start, workers, steps.batch_weights)
            lo, hi = start + cuts[worker], start + cuts[worker + 1]
            ranges = take_rows(rows, hi - lo)
            self.note(worker, Lease(0, steps.epoch, start, stop, lo, hi, ranges))
            done += hi - lo
            self._steps[worker] += 1
        measured = StepStats(done, done, 0.0, 0, 1.0)
        return StepsApplied(worker, steps.epoch, steps.stop, self._steps[worker], measured)


STRATEGIES = ("allreduce", "allreduce(balance=auto)", "ps", "ps(sync=bsp)", "local_sgd(h=2)")


@pytest.mark.parametrize("strategy", STRATEGIES)
@given(layouts(), st.integers(1, 7), st.integers(1, 7), st.integers(7, 40), seeds)
def test_each_sample_once_an_epoch_across_a_change_of_workers(
    strategy: str, layout: BlockLayout, first: int, second: int, batch: int, seed: int
) -> None:
    """A run is broken off at a checkpoint, often in mid-epoch, and resumed with other workers."""
    rng = random.Random(seed)
    workers = Workers(rng, layout, batch, epochs=2)
    samples = sum(layout.rows)
    every = max(1, samples // 3)
    ended = workers.run(strategy, first, every=every, until_save=rng.randint(1, 4))
    if ended == "saved":
        assert workers.memory is not None
        assert workers.memory["shards"]["layout"] == layout_fingerprint(layout)
    if ended == "saved" and workers.memory["history"]["epoch"] < 2:
        assert workers.run(strategy, second, every=every, until_save=None) == "done"
    assert set(workers.seen) == {0, 1}
    for seen in workers.seen.values():
        assert seen == Counter(range(samples))


@given(layouts(), st.integers(1, 7), st.integers(7, 40), seeds, seeds)
def test_even_shares_read_the_same_whatever_the_timing(
    layout: BlockLayout, workers: int, batch: int, one: int, two: int
) -> None:
    """Under planned work the shard plan follows from seed, epoch and workers alone."""
    orders = []
    for seed in (one, two):
        run = Workers(random.Random(seed), layout, batch, epochs=2)
        run.run("allreduce", workers, every=10**9, until_save=None)
        orders.append({w: merge_ranges(pieces) for w, pieces in run.order.items()})
    assert orders[0] == orders[1]


def test_resuming_with_another_division_is_refused() -> None:
    layout = BlockLayout((10,) * 6, tuple(range(6)), 20, 0)
    workers = Workers(random.Random(0), layout, 8, epochs=1)
    assert workers.run("allreduce", 2, every=20, until_save=1) == "saved"
    for other in (None, BlockLayout((10,) * 6, tuple(range(6)), 30, 0)):
        plan = RunSpec(strategy=parse_strategy("allreduce"), workers=1)
        coordinator = Coordinator(
            plan, now=0.0, paces=make_pace, policies=make_switch_policy, memory=workers.memory
        )
        actions = coordinator.handle(WorkerReady(0, 60, 8, 1, (), 0.0, other), 1.0)
        ends = [a for a in actions if isinstance(a, EndRun)]
        assert ends[0].usage
        assert "--shard" in (ends[0].error or "")


def test_a_ledger_takes_back_what_a_lost_worker_held() -> None:
    ledger = Ledger(40, layout=BlockLayout((10,) * 4, tuple(range(4)), 10, 0))
    seen: Counter[int] = Counter()
    held = ledger.take(0, 15, 40)
    assert held is not None
    ledger.draw_rows(held.id, 0, 15)
    ledger.return_all_of(0)
    while (entry := ledger.take(1, 7, 40)) is not None:
        for lo, hi in ledger.draw_rows(entry.id, 1, entry.hi - entry.lo):
            seen.update(range(lo, hi))
        ledger.acknowledge(entry.id, 1)
    assert seen == Counter(range(40))
    assert ledger.remaining_rows() == []
