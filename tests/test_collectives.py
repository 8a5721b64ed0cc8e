"""Collectives made of messages: any number of workers, equal bits, and their cost formulas."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import get_args

import numpy as np
import pytest
import torch

from paceline.cluster.pool import Pool, equal_machines
from paceline.comm.algorithm_choice import (
    NetworkProbe,
    choose_algorithms,
    describe_algorithms,
    fastest_algorithm,
)
from paceline.comm.in_process_group import InProcessGroup
from paceline.comm.message_collectives import (
    BackgroundAllReduce,
    MessageCollectives,
    make_algorithm,
)
from paceline.errors import PeerLost, SpecError
from paceline.plan.cost_model import Workload, allreduce_s
from paceline.plan.lockstep import all_reduce_s
from paceline.plan.pool_arrays import PoolArrays
from paceline.specs.collectives import (
    ALGORITHMS,
    COLLECTIVES,
    FLAT,
    all_reduce_steps,
    butterfly,
    candidates,
    ring,
    tree,
)
from paceline.strategies.registry import parse_strategy

SIZES = [1, 2, 3, 4, 5, 6, 7, 8, 9]
NUMBERS = 23
"""Not divisible by most numbers of workers; with more than this many, parts would be empty."""


def on_all(
    size: int,
    act: Callable[[InProcessGroup], torch.Tensor],
    machines: list[tuple[int, ...]] | None = None,
    timeout_s: float = 20.0,
) -> list[torch.Tensor]:
    """What `act` returns on each member of a group of threads; raises what one of them raised."""
    groups = InProcessGroup.create(size, timeout_s, machines)
    found: dict[int, torch.Tensor] = {}
    failed: list[BaseException] = []

    def run(group: InProcessGroup) -> None:
        try:
            found[group.rank] = act(group)
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=run, args=(group,)) for group in groups]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    if failed:
        raise failed[0]
    return [found[rank] for rank in range(size)]


def vector(rank: int, numbers: int = NUMBERS, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(numbers, generator=torch.Generator().manual_seed(rank)).to(dtype)


def make_workload() -> Workload:
    return Workload(
        model="m",
        data="d",
        shapes=((1000,),),
        item_bytes=4,
        flops_per_sample=1.0,
        samples=100,
        batch=8,
        epochs=1,
        evaluated={},
        slots=0,
    )


def total(size: int) -> torch.Tensor:
    return torch.stack([vector(rank).double() for rank in range(size)]).sum(0)


@pytest.mark.parametrize("numbers", [NUMBERS, 3, 1])
@pytest.mark.parametrize("name", FLAT)
def test_every_all_reduce_gives_all_workers_the_same_bits(name: str, numbers: int) -> None:
    for size in SIZES:

        def act(group: InProcessGroup) -> torch.Tensor:
            x = vector(group.rank, numbers)
            make_algorithm(group, name)(x)
            return x

        sums = on_all(size, act)
        expected = torch.stack([vector(r, numbers).double() for r in range(size)]).sum(0)
        torch.testing.assert_close(sums[0].double(), expected, rtol=1e-5, atol=1e-5)
        assert all(torch.equal(sums[0], other) for other in sums[1:]), (name, size)


@pytest.mark.parametrize(
    "machines",
    [
        [(0, 1, 2)],
        [(0,), (1,), (2,)],
        [(0, 1), (2, 3)],
        [(0, 1, 2), (3,)],
        [(0, 3), (1,), (2, 4, 5)],
    ],
    ids=str,
)
def test_the_hierarchical_all_reduce_adds_up_machine_by_machine(
    machines: list[tuple[int, ...]],
) -> None:
    def act(group: InProcessGroup) -> torch.Tensor:
        x = vector(group.rank)
        make_algorithm(group, "hierarchical")(x)
        return x

    size = sum(map(len, machines))
    sums = on_all(size, act, machines)
    torch.testing.assert_close(sums[0].double(), total(size), rtol=1e-5, atol=1e-5)
    assert all(torch.equal(sums[0], other) for other in sums[1:])


@pytest.mark.parametrize("size", SIZES)
def test_the_other_collectives_do_what_their_names_say(size: int) -> None:
    def act(group: InProcessGroup) -> torch.Tensor:
        flat, rank = MessageCollectives(group), group.rank
        sent = vector(rank)
        flat.broadcast(sent)
        assert torch.equal(sent, vector(0))
        summed = vector(rank)
        flat.reduce(summed)
        if rank == 0:
            torch.testing.assert_close(summed.double(), total(size), rtol=1e-5, atol=1e-5)
        parts = list(torch.full((size, 3), -1.0))
        parts[rank] = vector(rank, 3)
        flat.gather(parts)
        if rank == 0:
            assert torch.equal(torch.stack(parts), torch.stack([vector(r, 3) for r in range(size)]))
        parts = [vector(r, 3) for r in range(size)] if rank == 0 else list(torch.zeros(size, 3))
        flat.scatter(parts)
        assert torch.equal(parts[rank], vector(rank, 3))
        flat.all_gather(parts)
        assert torch.equal(torch.stack(parts), torch.stack([vector(r, 3) for r in range(size)]))
        pieces = torch.tensor_split(vector(rank), size)
        flat.reduce_scatter(pieces)
        own = torch.tensor_split(total(size), size)[rank]
        torch.testing.assert_close(pieces[rank].double(), own, rtol=1e-5, atol=1e-5)
        out = [torch.tensor([10.0 * rank + r]) for r in range(size)]
        got = [torch.zeros(1) for _ in range(size)]
        flat.all_to_all(out, got)
        assert torch.cat(got).tolist() == [10.0 * r + rank for r in range(size)]
        prefix = vector(rank)
        flat.scan(prefix)
        torch.testing.assert_close(prefix.double(), total(rank + 1), rtol=1e-5, atol=1e-5)
        return prefix

    on_all(size, act)


def test_sums_in_the_background_are_formed_in_order_and_end_with_the_thread() -> None:
    def act(group: InProcessGroup) -> torch.Tensor:
        sums = BackgroundAllReduce(group, ["tree", "butterfly"])
        tensors = [vector(group.rank) * k for k in (1, 2, 3)]
        names = ["tree", "butterfly", "tree"]
        ended: list[int] = []
        pending = [sums.start(x, name) for x, name in zip(tensors, names, strict=True)]
        for place, one in enumerate(pending):
            one.get_future().add_done_callback(lambda _, place=place: ended.append(place))
        for one in pending:
            one.wait()
        assert ended == [0, 1, 2]
        sums.close()
        return torch.stack(tensors)

    found = on_all(3, act)
    expected = torch.stack([total(3) * k for k in (1, 2, 3)])
    torch.testing.assert_close(found[0].double(), expected, rtol=1e-5, atol=1e-5)
    assert torch.equal(found[0], found[1])


def test_a_worker_that_never_arrives_is_an_error_within_the_deadline() -> None:
    def act(group: InProcessGroup) -> torch.Tensor:
        x = vector(group.rank)
        if group.rank != 2:
            sums = BackgroundAllReduce(group, ["butterfly"])
            try:
                sums.start(x, "butterfly").wait()
            finally:
                sums.close()
        return x

    with pytest.raises(PeerLost, match="no message of worker"):
        on_all(4, act, timeout_s=0.2)


def test_formulas_by_hand() -> None:
    assert ring(4, 8e6).seconds(0.001, 1e6) == pytest.approx(2 * 3 * (0.001 + 2.0))
    assert tree(8, 1e6).seconds(0.001, 1e6) == pytest.approx(2 * 3 * (0.001 + 1.0))
    assert butterfly(8, 1e6) == (3, 3e6)
    assert butterfly(6, 1e6) == (4, 4e6)  # two levels of four workers, before and after
    assert COLLECTIVES["gather"](4, 8e6) == (3, 6e6)
    assert COLLECTIVES["scatter"](4, 8e6) == (1, 6e6)
    assert COLLECTIVES["scan"](5, 1e6) == (3, 3e6)
    for name, formula in COLLECTIVES.items():
        if name != "point-to-point":
            assert formula(1, 1e6).seconds(1.0, 1.0) == 0.0, name


def test_auto_takes_the_cheapest_for_the_size_the_latency_and_the_bandwidth() -> None:
    lan = NetworkProbe(ring_hop_s=1e-3, message_s=1e-3, bytes_per_s=12.5e6)
    assert fastest_algorithm(lan, 8, 8, 100) == "butterfly"
    assert fastest_algorithm(lan, 8, 8, 100e6) == "ring"
    slow_messages = NetworkProbe(ring_hop_s=1e-4, message_s=1e-2, bytes_per_s=12.5e6)
    assert fastest_algorithm(slow_messages, 8, 8, 100) == "ring"
    # Two machines with four workers each: only one vector per machine crosses the network.
    assert fastest_algorithm(lan, 8, 2, 100e6) == "hierarchical"


def test_workers_of_one_machine_share_its_link() -> None:
    assert all_reduce_steps("butterfly", 8, 2, 1e6).nbytes == 4e6
    assert all_reduce_steps("hierarchical", 8, 2, 1e6) == (2 + 2 * 2, 1e6)
    assert all_reduce_steps("ring", 4, 1, 1e6) == (6, 0.0)
    assert candidates(4, 4) == candidates(4, 1) == tuple(FLAT)
    assert set(candidates(4, 2)) | {"auto"} == set(ALGORITHMS)


def test_the_choice_is_equal_on_all_workers_and_kept_by_a_resumed_run() -> None:
    def act(group: InProcessGroup) -> torch.Tensor:
        chosen, reason = choose_algorithms("auto", None, [100, 40_000_000], group)
        assert "Mbit/s" in reason
        kept, why = choose_algorithms("auto", ["tree", "ring"], [100, 4_000_000], group)
        assert (kept, why) == (["tree", "ring"], "the algorithm was chosen before")
        assert choose_algorithms("tree", None, [1, 2], group) == (["tree", "tree"], "")
        return torch.tensor([FLAT_NAMES.index(name) for name in chosen])

    found = on_all(4, act)
    assert all(torch.equal(found[0], other) for other in found)
    assert describe_algorithms(["ring", "butterfly", "ring"]) == (
        "butterfly (1 bucket), ring (2 buckets)"
    )


FLAT_NAMES = list(FLAT)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("allreduce(algorithm=tree, codec=fp16)", "algorithm=tree and codec cannot be combined"),
        ("allreduce(algorithm=butterfly, shard=full)", "and shard=full cannot be combined"),
        ("allreduce(algorithm=ring, via=shared)", "and via=shared cannot be combined"),
        ("allreduce(algorithm=star)", "must be one of auto, ring, tree, butterfly, hierarchical"),
    ],
)
def test_options_that_exclude_an_algorithm_are_refused_in_one_line(text: str, problem: str) -> None:
    with pytest.raises(SpecError, match=problem) as error:
        parse_strategy(text)
    assert "\n" not in str(error.value)


def test_every_algorithm_is_known_to_pools_to_the_planner_and_to_the_twin() -> None:
    pool = equal_machines(8)
    assert set(ALGORITHMS) == set(get_args(Pool.model_fields["collective"].annotation))
    for nbytes in (1e3, 1e8):
        times = {name: allreduce_s(pool, pool.slots, nbytes, name) for name in ALGORITHMS}
        assert times["auto"] == min(times.values())
        assert allreduce_s(pool, pool.slots, nbytes) == times["ring"]
        for name in ALGORITHMS:
            fixed = pool.model_copy(update={"collective": name})
            assert allreduce_s(fixed, fixed.slots, nbytes, "auto") == times[name]
            arrays = PoolArrays(pool, make_workload())
            assert all_reduce_s(arrays, np.arange(8), nbytes, name) == pytest.approx(times[name])
