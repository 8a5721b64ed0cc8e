"""Corrections of plans by past runs: measured machines and strategies."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.cluster.pool import Host, Jitter, Link, Pool, StepCost
from paceline.errors import UsageError
from paceline.plan.cost_model import Workload
from paceline.plan.estimate import estimate
from paceline.plan.pool_arrays import PoolArrays
from paceline.plan.run_log import (
    MAX_RUNS,
    LoggedRun,
    WorkerTiming,
    add_record,
    calibrate_from_log,
    history_path,
    logged_curves,
    read_history,
)
from paceline.plan.search import (
    choose_hosts_by_speed,
    choose_server_hosts,
    parse_objective,
    search,
    search_strategy,
)
from paceline.strategies.registry import parse_strategy

WORK = Workload(
    model="m",
    data="d",
    shapes=((1000, 100),),
    item_bytes=4,
    flops_per_sample=1e6,
    samples=10_000,
    batch=100,
    epochs=2,
    evaluated={},
    slots=1,
)
STILL = Jitter(shape="uniform", cv=0.0)


def make_pool(*costs: float, link: Link | None = None) -> Pool:
    """A machine for each cost of a sample, all links alike."""
    hosts = tuple(
        Host(host=f"h{i}", measured={"m": StepCost(per_sample_s=cost)}, jitter=STILL, startup_s=0)
        for i, cost in enumerate(costs)
    )
    return Pool(hosts=hosts, link=link or Link(mbit_s=float("inf"), latency_ms=0.0))


def play(truth: Pool, strategy: str, names: tuple[str, ...], batch: int = 100) -> LoggedRun:
    """A run as it would go if the machines were as `truth` says."""
    machines = PoolArrays(truth, dataclasses.replace(WORK, batch=batch))
    places = [i for i, h in enumerate(truth.hosts) if h.host in names]
    found = estimate(machines, np.array(places), parse_strategy(strategy))
    share = batch / len(places)
    return LoggedRun(
        model="m",
        batch=batch,
        strategy=strategy,
        machines=names,
        work=tuple(
            WorkerTiming(truth.hosts[i].host, share, share * float(machines.per_sample[i]))
            for i in places
        ),
        step_s=found.step_s,
        predicted_step_s=1.0,
        started="",
    )


def predict(machines: PoolArrays, places: list[int], strategy: str) -> float:
    return estimate(machines, np.array(places), parse_strategy(strategy)).step_s


def test_a_machine_slower_than_its_figures_is_found_out() -> None:
    said, truth = make_pool(1e-3, 1e-3, 1e-3), make_pool(1e-3, 1e-3, 9e-3)
    before = search(calibrate_from_log(said, WORK, []), parse_objective("time", None, None))
    assert len(before.chosen.machines) == 3
    record = play(truth, "allreduce", ("h0", "h1", "h2"))
    after = search(
        calibrate_from_log(said, WORK, [record]), parse_objective("time", None, None), ["allreduce"]
    )
    assert after.chosen.machines == (0, 1)


@given(
    st.lists(st.floats(1e-5, 1e-1), min_size=2, max_size=5),
    st.lists(st.floats(1e-5, 1e-1), min_size=5, max_size=5),
    st.sampled_from(["allreduce", "ps", "local_sgd(h=8)"]),
)
def test_a_run_that_was_made_is_predicted_as_it_was(
    said: list[float], true: list[float], strategy: str
) -> None:
    pool, truth = make_pool(*said), make_pool(*true[: len(said)])
    names = tuple(h.host for h in pool.hosts)
    record = play(truth, strategy, names)
    machines = calibrate_from_log(pool, WORK, [record])
    assert predict(machines, list(range(len(said))), strategy) == pytest.approx(record.step_s)


def test_exchanging_is_corrected_for_each_strategy_by_itself() -> None:
    """The links are ten times slower than the pool says: that shows in the step, not in compute."""
    said = make_pool(1e-4, 1e-4, link=Link(mbit_s=1000, latency_ms=0.1))
    truth = make_pool(1e-4, 1e-4, link=Link(mbit_s=100, latency_ms=0.1))
    record = play(truth, "allreduce", ("h0", "h1"))
    plain, taught = calibrate_from_log(said, WORK, []), calibrate_from_log(said, WORK, [record])
    assert predict(plain, [0, 1], "allreduce") < 0.6 * record.step_s
    assert predict(taught, [0, 1], "allreduce") == pytest.approx(record.step_s)
    assert predict(taught, [0, 1], "ps") == predict(plain, [0, 1], "ps")
    assert predict(taught, [0], "single") == predict(plain, [0], "single")


def test_what_a_step_takes_beside_computing_is_learnt_for_one_machine_too() -> None:
    pool = make_pool(1e-3, 1e-3)
    record = dataclasses.replace(play(pool, "single", ("h0",)), step_s=0.25)
    machines = calibrate_from_log(pool, WORK, [record])
    assert predict(machines, [0], "single") == pytest.approx(0.25)
    plain = calibrate_from_log(pool, WORK, [])
    assert predict(machines, [0, 1], "allreduce") == predict(plain, [0, 1], "allreduce")


def test_startup_and_curves_are_learnt_from_runs_of_the_same_job() -> None:
    pool = make_pool(1e-3, 1e-3)
    run = play(pool, "allreduce", ("h0", "h1"))
    curve = ((10_000, 0.5), (20_000, 0.6))
    same = dataclasses.replace(run, data="d", epochs=2, startup_s=7.0, curve=curve)
    longer = dataclasses.replace(same, epochs=3)
    inexact = dataclasses.replace(same, strategy="local_sgd(h=8)")
    assert logged_curves([run, longer, inexact, same], WORK) == [curve]
    machines = calibrate_from_log(pool, WORK, [run, same])
    assert estimate(machines, np.array([0]), parse_strategy("single")).startup_s == 7.0


def test_runs_on_the_same_machines_correct_more_than_others() -> None:
    pool = make_pool(1e-3, 1e-3, 1e-3)
    run = play(pool, "allreduce", ("h0", "h1"))
    slow = dataclasses.replace(run, step_s=10 * run.step_s)
    others = [play(pool, "allreduce", ("h1", "h2"))] * 3
    machines = calibrate_from_log(pool, WORK, [*others, slow])
    assert predict(machines, [0, 1], "allreduce") == pytest.approx(slow.step_s)
    assert predict(machines, [1, 2], "allreduce") == pytest.approx(run.step_s)


def test_only_runs_of_the_same_model_count_and_only_the_last() -> None:
    said, slow = make_pool(1e-3, 1e-3), make_pool(5e-3, 5e-3)
    old = [play(slow, "allreduce", ("h0", "h1"))] * 10
    new = [play(said, "allreduce", ("h0", "h1"))] * MAX_RUNS
    other = dataclasses.replace(old[0], model="another")
    expected = predict(calibrate_from_log(said, WORK, []), [0, 1], "allreduce")
    for records in ([other], [*old, *new]):
        machines = calibrate_from_log(said, WORK, records)
        assert predict(machines, [0, 1], "allreduce") == pytest.approx(expected)


def test_the_interval_follows_past_errors() -> None:
    pool = make_pool(1e-3, 1e-3)
    record = play(pool, "allreduce", ("h0", "h1"))
    steady = calibrate_from_log(pool, WORK, [record] * 3)
    wild = calibrate_from_log(
        pool,
        WORK,
        [dataclasses.replace(record, step_s=record.step_s * f) for f in (0.5, 1.0, 1.5)],
    )
    chosen = np.array([0, 1])
    narrow, wide = (
        estimate(m, chosen, parse_strategy("allreduce")).seconds_interval for m in (steady, wild)
    )
    assert narrow[1] / narrow[0] < 1.11
    assert wide[1] / wide[0] > 2.5


def test_the_history_file_is_next_to_the_pool_and_reads_back(tmp_path: Path) -> None:
    path = history_path(tmp_path / "my pool.yaml")
    assert path == tmp_path / "my pool.history.jsonl"
    assert read_history(path) == []
    record = dataclasses.replace(
        play(make_pool(1e-3, 2e-3), "ps", ("h0", "h1")), curve=((100, 0.5),), startup_s=2.0
    )
    add_record(path, record)
    add_record(path, record)
    assert read_history(path) == [record, record]


@pytest.mark.parametrize("line", ["nonsense", "{}", '{"work": 3}', "[]", "null"])
def test_damaged_history_names_the_line(tmp_path: Path, line: str) -> None:
    path = tmp_path / "p.history.jsonl"
    add_record(path, play(make_pool(1e-3, 2e-3), "ps", ("h0", "h1")))
    with path.open("a") as file:
        file.write(line + "\n")
    with pytest.raises(UsageError, match=r"p\.history\.jsonl, line 2 is not a run record"):
        read_history(path)


# ---- choices that a run makes ----------------------------------------------------------------


def test_servers_go_where_the_links_are_best() -> None:
    pool = make_pool(1e-3, 1e-3, 1e-3)
    hosts = [
        h.model_copy(update={"link": Link(mbit_s=rate)})
        for h, rate in zip(pool.hosts, (100, 1000, 10_000), strict=True)
    ]
    machines = PoolArrays(pool.model_copy(update={"hosts": tuple(hosts)}), WORK)
    assert choose_server_hosts(machines, [0, 1, 2], 1) == [2]
    assert choose_server_hosts(machines, [0, 1, 2], 2) == [2, 1]
    assert choose_server_hosts(machines, [0, 1], 1) == [1]
    assert choose_server_hosts(PoolArrays(pool, WORK), [0, 1, 2], 2) == []


def test_the_best_strategy_on_machines_that_are_given() -> None:
    """One is slow: with equal shares, all workers wait for it."""
    pool = make_pool(1e-3, 1e-3, 2e-2)
    found = search_strategy(PoolArrays(pool, WORK), parse_objective("time", None, None))
    assert found.chosen.machines == (0, 1, 2)
    equal = estimate(PoolArrays(pool, WORK), np.arange(3), parse_strategy("allreduce"))
    assert found.chosen.strategy != "allreduce"
    assert found.chosen.seconds < equal.seconds


def test_machines_that_hold_the_others_back_are_left_out() -> None:
    hosts = [Host(host=f"h{i}", gflops=g) for i, g in enumerate((10.0, 9.0, 1.0, 8.0))]
    chosen, why = choose_hosts_by_speed(Pool(hosts=tuple(hosts)))
    assert [h.host for h in chosen] == ["h0", "h1", "h3"]
    assert "3 of 4 machines, 24 GFLOP/s in lockstep; with h2" in why


@given(st.lists(st.floats(0.1, 1000), min_size=1, max_size=7))
def test_no_other_choice_computes_more_in_step(speeds: list[float]) -> None:
    pool = Pool(hosts=tuple(Host(host=f"h{i}", gflops=g) for i, g in enumerate(speeds)))
    chosen, _ = choose_hosts_by_speed(pool)
    together = len(chosen) * min(h.gflops for h in chosen)
    for size in range(1, len(speeds) + 1):
        best = size * sorted(speeds, reverse=True)[size - 1]
        assert together >= best * (1 - 1e-12)


def test_a_strategy_for_several_is_not_answered_with_one() -> None:
    """Exchanging over such a link costs more than it saves."""
    slow = Link(mbit_s=0.1, latency_ms=100)
    machines = PoolArrays(make_pool(1e-4, 1e-4, 1e-4, link=slow), WORK)
    objective = parse_objective("time", None, None)
    assert len(search(machines, objective, ["allreduce"]).chosen.machines) == 1
    several = search(machines, objective, ["allreduce"], allow_single_host=False)
    assert len(several.chosen.machines) == 2
    only = PoolArrays(make_pool(1e-4), WORK)
    assert search(only, objective, ["allreduce"], allow_single_host=False).chosen.machines == (0,)
