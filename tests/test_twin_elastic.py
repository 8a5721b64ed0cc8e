"""Simulated runs that lose workers and machines: the rules of real runs, in virtual time."""

from __future__ import annotations

import dataclasses
from collections import Counter
from pathlib import Path

import pytest
import torch

from conftest import RunCli, read_result
from fault_invariants import ElasticAudit, InvariantChecker
from paceline import Job
from paceline.cluster.pool import DownPeriod, Host, Pool
from paceline.launch.deadlines import SILENCE_S
from paceline.plan.cost_model import Workload
from paceline.protocol.run_spec import RunSpec
from paceline.specs.fault import parse_fault
from paceline.strategies.registry import parse_strategy
from paceline.telemetry.run_folder import RunFolder
from paceline.twin.faults import inject_faults
from paceline.twin.run import TwinOptions, prepare_twin
from paceline.twin.simulator import Simulator
from paceline.twin.updates import WeightsBackend

WORK = Workload(
    model="any",
    data="any",
    shapes=((100, 300), (300,)),
    item_bytes=4,
    flops_per_sample=1e8,
    samples=2000,
    batch=60,
    epochs=3,
    evaluated={"val": 100},
    slots=1,
)
STRATEGIES = (
    "allreduce",
    "allreduce(shares=8)",
    "local_sgd(h=8)",
    "diloco(h=4)",
    "ps",
    "ps(sync=bsp)",
    "ps(sync=ssp(2))",
    "ps(overlap=true)",
    "grouped(size=2)",
    "switch(allreduce, ps, local_sgd(h=4), at=(30%, 60%))",
)
FAULTS = (
    "kill worker=1 at=20%",
    "stop worker=2 at=40% for=30s",
    "kill worker=3 at=70%",
    "kill worker=1 at=71%",
)


def play(
    strategy: str,
    pool: Pool,
    *faults: str,
    weights: WeightsBackend | None = None,
    work: Workload = WORK,
    min_workers: int = 1,
    restarts: int = 3,
) -> Simulator:
    spec, workers = parse_strategy(strategy), len(pool.slots)
    plan = RunSpec(strategy=spec, workers=workers, min_workers=min_workers)
    world = Simulator(plan, pool, work, weights or WeightsBackend(), restarts=restarts)
    parsed = [parse_fault(text, workers, plan.servers) for text in faults]
    inject_faults(world, parsed, lambda event: None)
    InvariantChecker(world, spec)
    world.run()
    return world


def machines(count: int = 4, **changes: object) -> tuple[Host, ...]:
    return tuple(Host(host=f"m{i}", speed=1 + 0.2 * i) for i in range(count))


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_lost_workers_return_and_each_sample_counts_once(strategy: str) -> None:
    audit = ElasticAudit(Counter())
    world = play(strategy, Pool(hosts=machines()), *FAULTS, weights=audit)
    assert world.end is not None
    assert (world.end.status, world.end.error) == ("done", None)
    expected = Counter((e, p) for e in range(3) for p in range(WORK.samples))
    assert audit.seen == expected
    assert world.coordinator.history.samples == expected.total()
    views = world.coordinator.history.views
    reasons = "; ".join(row.reason for row in views)
    assert "worker 1 was killed (injected: --fault 'kill worker=1 at=20%')" in reasons
    assert f"worker 2 sent no heartbeat for {SILENCE_S:g} s" in reasons
    assert {"worker 1 joined", "worker 2 joined"} <= set(reasons.split("; "))
    assert [row.number for row in views] == list(range(1, len(views) + 1))
    again = play(strategy, Pool(hosts=machines()), *FAULTS)
    assert again.timeline.now == world.timeline.now
    for totals in world.coordinator.totals.values():
        seconds = sum(totals["phases"].values())
        assert seconds == pytest.approx(world.timeline.now, rel=0.02)


def test_interrupted_local_steps_are_computed_again() -> None:
    rows = play("local_sgd(h=8)", Pool(hosts=machines()), *FAULTS).coordinator.history.views
    assert all(0 <= row.recomputed <= 8 * WORK.batch for row in rows)
    assert any(row.recomputed for row in rows)


def test_machines_fail_and_return() -> None:
    bad = Host(host="bad", workers=2, startup_s=1.0, down=(DownPeriod(from_s=1.0, to_s=15.0),))
    world = play("allreduce", Pool(hosts=(*machines(2), bad)))
    lost, *later = world.coordinator.history.views
    assert lost.members == [0, 1]
    assert lost.seconds == pytest.approx(1.0 + SILENCE_S + 0.1, abs=0.1)
    assert later[-1].members == [0, 1, 2, 3]
    assert later[0].seconds >= 16.0


def test_failures_follow_the_mean_time_between_them() -> None:
    long = dataclasses.replace(WORK, epochs=20)
    pool = Pool(hosts=machines(10), mtbf_s=300.0, repair_s=5.0)
    world = play("allreduce", pool, work=long)
    lost = sum(row.reason.count("died") for row in world.coordinator.history.views)
    assert 0.5 < lost / (10 * world.timeline.now / 300.0) < 1.5
    assert world.coordinator.history.samples == 20 * WORK.samples


def test_fewer_than_the_minimum_wait_or_end_the_run() -> None:
    fault, pool = "kill worker=1 at=50%", Pool(hosts=machines(2))
    world = play("allreduce", pool, fault, min_workers=2)
    assert world.end is not None
    assert (world.end.status, world.end.error) == ("done", None)
    assert [row.members for row in world.coordinator.history.views] == [[0, 1]]
    world = play("allreduce", pool, fault, min_workers=2, restarts=0)
    assert world.end is not None
    assert world.end.status == "failed"
    assert "worker 1 was killed" in str(world.end.error)


def test_a_loss_changes_neither_batches_nor_updates(tmp_path: Path) -> None:
    """Gradients are sums over the same batches, however many workers compute them."""
    job = Job(model="mlp-128", data="digits", epochs=2, dtype="float64")
    weights = []
    for faults in ((), ("kill worker=1 at=20%", "kill worker=0 at=60%")):
        hosts = (host.model_copy(update={"startup_s": 0.01}) for host in machines())
        pool = Pool(hosts=tuple(hosts))
        options = TwinOptions(out=tmp_path / "unused", pool=pool)
        work, backend = prepare_twin(job, 4, options, RunFolder(options.out))
        world = play("allreduce", pool, *faults, weights=backend, work=work)
        assert world.coordinator.history.samples == 2 * work.samples
        model = backend.replica.model  # type: ignore[attr-defined]
        weights.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
    assert world.coordinator.history.views
    torch.testing.assert_close(weights[0], weights[1], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("strategy", ["allreduce", "local_sgd(h=4)", "ps", "grouped(size=2)"])
def test_the_command_shows_views(run_cli: RunCli, tmp_path: Path, strategy: str) -> None:
    options = ("twin", "--cluster", 4, "--epochs", 3, "--strategy", strategy, "--quiet")
    faults = ("--fault", "kill worker=1 at=30%", "--min-workers", 1)
    finished = run_cli(*options, *faults, "--restarts", 0, "--out", tmp_path / "run")
    assert finished.code == 0, finished.stderr
    result = read_result(tmp_path / "run")
    assert [row["members"] for row in result["views"]] == [[0, 2, 3]]
    assert result["samples"] == 3 * 1297
    assert result["test_acc"] > 0.5


def test_reasons_of_many_changes_stay_short() -> None:
    """A machine fails every two seconds, and no view is complete before the next failure."""
    work = dataclasses.replace(WORK, epochs=100, batch=500)
    pool = Pool(hosts=machines(100), mtbf_s=200.0, repair_s=5.0)
    world = play("allreduce", pool, work=work)
    assert world.end is not None
    assert "more changes; worker" in str(world.end.error)
    assert len(str(world.end.error)) < 600
