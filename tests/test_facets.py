"""Facets of the registered strategies: what the planner and the twin know about each of them."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

from paceline.cluster.pool import Host, Link, Pool
from paceline.comm.in_process_group import InProcessGroup
from paceline.errors import PeerLost
from paceline.plan.cost_model import Workload
from paceline.plan.estimate import estimate
from paceline.plan.pool_arrays import PoolArrays
from paceline.strategies.registry import BASELINE, cost, parse_strategy, records, simulation

WORK = Workload(
    model="made-up",
    data="none",
    shapes=((300, 300), (300,)),
    item_bytes=4,
    flops_per_sample=1e7,
    samples=1000,
    batch=100,
    epochs=4,
    evaluated={},
    slots=1,
)
POOL = Pool(
    hosts=tuple(Host(host=f"m{i}", speed=s) for i, s in enumerate((1.0, 1.0, 0.3))),
    link=Link(mbit_s=1000, latency_ms=0.1),
)


def step_s(strategy: str) -> float:
    return estimate(PoolArrays(POOL, WORK), np.arange(3), parse_strategy(strategy)).step_s


def test_every_built_in_strategy_can_be_planned_and_simulated() -> None:
    for name, record in records().items():
        assert cost(parse_strategy(record.examples[0])) is not None, name
        for phase in parse_strategy(record.examples[0]).phases:
            assert simulation(phase) is not None, name
    assert BASELINE in records()


@pytest.mark.parametrize(
    ("point", "fraction"), [("25%", 0.25), ("epoch(1)", 0.25), ("samples(3000)", 0.75)]
)
def test_switch_costs_its_phases_by_their_samples(point: str, fraction: float) -> None:
    first, second = step_s("allreduce"), step_s("ps")
    expected = fraction * first + (1 - fraction) * second
    assert step_s(f"switch(allreduce, ps, at={point})") == pytest.approx(expected)
    assert first != second


def test_switch_point_beyond_the_run_costs_the_first_phase_only() -> None:
    assert step_s("switch(allreduce, ps, at=epoch(9))") == pytest.approx(step_s("allreduce"))


def test_switch_with_a_trigger_widens_the_interval() -> None:
    """The switch point is not known before the run, so either phase may last for most of it."""
    arrays, hosts = PoolArrays(POOL, WORK), np.arange(3)
    fixed = estimate(arrays, hosts, parse_strategy("switch(allreduce, ps, at=50%)"))
    trigger = estimate(arrays, hosts, parse_strategy("switch(allreduce, ps, when=plateau)"))
    low, high = (estimate(arrays, hosts, parse_strategy(s)).seconds for s in ("ps", "allreduce"))
    assert trigger.seconds == pytest.approx(fixed.seconds)
    assert trigger.seconds_interval[0] < min(low, high)
    assert trigger.seconds_interval[1] > max(low, high)


def test_staleness_of_a_switch_is_the_mean_over_its_samples() -> None:
    arrays, hosts = PoolArrays(POOL, WORK), np.arange(3)
    ps = estimate(arrays, hosts, parse_strategy("ps")).staleness
    found = estimate(arrays, hosts, parse_strategy("switch(allreduce, ps, at=75%)"))
    assert found.staleness == pytest.approx(0.25 * ps)


# ---- groups of threads ------------------------------------------------------------------------


def run_members(size: int, call: Callable[[InProcessGroup], object]) -> list[object]:
    groups = InProcessGroup.create(size, timeout_s=10)
    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(call, groups))


def test_in_process_group_collectives() -> None:
    def call(group: InProcessGroup) -> list[float]:
        total = torch.tensor([float(group.rank + 1)])
        group.all_reduce(total)
        largest = torch.tensor([float(group.rank)])
        group.all_reduce(largest, largest=True)
        sent = torch.tensor([float(group.rank)])
        group.broadcast(sent, 2)
        every = group.all_gather(torch.tensor([group.rank * 10.0]))
        group.barrier()
        inner = group.new_subgroup(((0, 1), (2, 3)))
        pair = torch.tensor([float(group.rank)])
        inner.all_reduce(pair)
        return [*total, *largest, *sent, *torch.cat(every), *pair]

    found = run_members(4, call)
    for rank, values in enumerate(found):
        assert values == [10, 3, 2, 0, 10, 20, 30, 1 if rank < 2 else 5]


def test_in_process_group_sums_in_rank_order() -> None:
    """Results must not depend on which thread arrives last."""
    parts = [torch.tensor([x], dtype=torch.float32) for x in (1e8, 1.0, -1e8)]

    def call(group: InProcessGroup) -> float:
        tensor = parts[group.rank].clone()
        group.all_reduce(tensor)
        return float(tensor)

    expected = float(parts[0] + parts[1] + parts[2])
    for _ in range(20):
        assert run_members(3, call) == [expected] * 3


def test_in_process_group_names_a_member_that_left() -> None:
    def call(group: InProcessGroup) -> None:
        if group.rank == 1:
            group.abort()
        else:
            group.barrier()

    with pytest.raises(PeerLost, match="another member left a collective"):
        run_members(2, call)
