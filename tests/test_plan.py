"""The planner: its choices compared with brute force and with the twin, and explanations."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import random
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from conftest import RunCli
from paceline.cluster.gpu_rates import estimate_gpu
from paceline.cluster.pool import (
    Gpu,
    Host,
    Jitter,
    Link,
    Pool,
    StepCost,
    Watts,
    equal_machines,
    read_pool,
)
from paceline.errors import UsageError
from paceline.plan.cost_model import Workload
from paceline.plan.estimate import Estimate, estimate, find_guesses
from paceline.plan.explanation import plan_to_json
from paceline.plan.learning_curve import AccuracyGoal, LearningCurve
from paceline.plan.pool_arrays import PoolArrays
from paceline.plan.run_log import calibrate_from_log, history_path, read_history
from paceline.plan.search import OBJECTIVES, candidates, parse_objective, search
from paceline.protocol.run_spec import RunSpec
from paceline.strategies.model_parallel_cost import StageHost
from paceline.strategies.pipeline.cost import estimate_pipeline
from paceline.strategies.pipeline.spec import PipelineParallel
from paceline.strategies.registry import parse_strategy
from paceline.twin.simulator import Simulator
from paceline.twin.updates import WeightsBackend

WORK = Workload(
    model="made-up",
    data="none",
    shapes=((300, 300),),
    item_bytes=4,
    flops_per_sample=1e8,
    samples=12_800,
    batch=128,
    epochs=2,
    evaluated={},
    slots=1,
)


def draw_pool(rng: random.Random, count: int) -> Pool:
    hosts = []
    for index in range(count):
        idle = rng.uniform(10, 150)
        hosts.append(
            Host(
                host=f"h{index}",
                cores=4,
                speed=rng.choice([0.2, 0.5, 1, 1, 2, 4]) * rng.uniform(0.8, 1.2),
                watts=Watts(idle=idle, busy=idle * rng.uniform(1.1, 4)),
                price_per_hour=rng.uniform(0.02, 3),
                link=Link(
                    mbit_s=rng.choice([100, 1000, 10_000]), latency_ms=rng.choice([0.05, 0.5, 5])
                ),
            )
        )
    return Pool(hosts=tuple(hosts), jitter=Jitter(cv=rng.choice([0, 0.05, 0.2])))


def draw_work(rng: random.Random) -> Workload:
    rows = int(10 ** rng.uniform(2, 5))
    changes = {
        "shapes": ((rows, 100),),
        "flops_per_sample": 10 ** rng.uniform(6, 9),
        "batch": rng.choice([64, 128, 512]),
    }
    return Workload(**{**vars(WORK), **changes})


def try_all(machines: PoolArrays) -> list[Estimate]:
    found = []
    count = len(machines.hosts)
    for size in range(1, count + 1):
        for chosen in itertools.combinations(range(count), size):
            for text in candidates() if size > 1 else ("single",):
                spec = parse_strategy(text)
                if size == 1 or spec.servers_for(size) <= size:
                    found.append(estimate(machines, np.array(chosen), spec))
    return found


def compare_with_brute_force(seeds: range, most: int) -> float:
    worst = 0.0
    for seed in seeds:
        rng = random.Random(seed)
        machines = PoolArrays(draw_pool(rng, rng.randint(2, most)), draw_work(rng))
        every = try_all(machines)
        best = {o: min(e.value(o) for e in every) for o in OBJECTIVES}
        for text in ("time", "energy", "cost", "time=0.5,energy=0.5"):
            objective = parse_objective(text, None, None)
            ours = objective.score(search(machines, objective).chosen, best)
            worst = max(worst, ours / min(objective.score(e, best) for e in every) - 1)
    return worst


def test_choices_are_within_five_percent_of_brute_force() -> None:
    assert compare_with_brute_force(range(25), 7) < 0.05


@pytest.mark.slow
def test_choices_are_within_five_percent_of_brute_force_on_200_pools() -> None:
    assert compare_with_brute_force(range(200), 8) < 0.05


def test_limits_are_kept() -> None:
    machines = PoolArrays(draw_pool(random.Random(3), 6), WORK)
    fastest = search(machines, parse_objective("time", None, None)).chosen
    frugal = search(machines, parse_objective("energy", None, None)).chosen
    assert frugal.joules <= fastest.joules
    deadline = (fastest.seconds + frugal.seconds) / 2
    between = search(machines, parse_objective("energy", deadline, None)).chosen
    assert between.seconds <= deadline
    with pytest.raises(UsageError, match="no plan meets the limits"):
        search(machines, parse_objective("time", fastest.seconds / 2, None))
    with pytest.raises(UsageError, match="no plan meets the limits"):
        search(machines, parse_objective("time", None, 1e-9))


def test_ten_thousand_machines_are_planned() -> None:
    machines = PoolArrays(draw_pool(random.Random(1), 10_000), WORK)
    found = search(machines, parse_objective("time", None, None))
    assert 1 <= len(found.chosen.machines) <= WORK.batch


def test_a_machine_too_small_is_left_out_and_named() -> None:
    big = Workload(**{**vars(WORK), "shapes": ((100_000, 10_000),)})
    hosts = (Host(host="large", memory_gb=64), Host(host="small", memory_gb=2))
    machines = PoolArrays(Pool(hosts=hosts), big)
    objective = parse_objective("time", None, None)
    plain = plan_to_json(machines, search(machines, objective), objective)
    assert plain["chosen"]["machines"] == ["large"]
    assert plain["left_out"] == [{"host": "small", "why": "the model needs 12.4 GB, it has 2 GB"}]
    with pytest.raises(UsageError, match=r"the model fits on no machine: it needs 12\.4 GB"):
        search(PoolArrays(Pool(hosts=hosts[1:]), big), objective)


def test_a_model_for_no_machine_alone_is_split_over_several() -> None:
    """Ten layers of 1.2 GB with their gradients and momentum: two machines have room for them."""
    layers = ((10_000, 10_000),) * 10
    big = Workload(**{**vars(WORK), "shapes": layers, "gradient_ready": (), "batch": 64})
    sizes = {"a": 2, "b": 2, "c": 9, "d": 3, "e": 8}
    hosts = tuple(Host(host=name, memory_gb=size) for name, size in sizes.items())
    machines = PoolArrays(Pool(hosts=hosts), big)
    objective = parse_objective("cost", None, None)
    with pytest.raises(UsageError, match="no price_per_hour"):
        search(machines, objective)
    objective = parse_objective("energy", None, None)
    plain = plan_to_json(machines, search(machines, objective), objective)
    assert plain["chosen"]["machines"] == ["c", "e"]
    assert plain["chosen"]["strategy"].startswith("pipeline(")
    assert "does not fit on one machine" in plain["why"]
    assert "2 stages on c and e" in plain["why"]
    assert plain["one_machine"] is None
    assert {row["host"] for row in plain["left_out"]} == {"a", "b", "d"}


PUBLISHED = {"gpu": ("de", 11), "cpu": ("abc", 33), "single": ("a", 50), "energy": ("ab", 52)}
"""Machines and seconds of each arm of the published pool, 64 samples per worker and step."""


def published_arm(names: str) -> tuple[PoolArrays, np.ndarray]:
    """The published pool, its milliseconds per step read as earlier runs on it."""
    path = Path(__file__).parents[1] / "examples" / "published-pool.yaml"
    work = Workload(
        **{
            **vars(WORK),
            "model": "cnn-small",
            "data": "mnist",
            "shapes": ((347_146,),),
            "samples": 60_000,
            "batch": 64 * len(names),
            "epochs": 3,
        }
    )
    pool = read_pool(path)
    machines = calibrate_from_log(pool, work, read_history(history_path(path)))
    chosen = np.array([i for i, h in enumerate(pool.hosts) if h.host in names])
    return machines, chosen


def test_published_arms_come_out_in_the_published_order() -> None:
    seconds = {}
    for arm, (names, published) in PUBLISHED.items():
        found = estimate(*published_arm(names), parse_strategy("allreduce"))
        assert found.train_s == pytest.approx(published, rel=0.05)
        seconds[arm] = found.seconds
    assert sorted(seconds, key=lambda arm: seconds[arm]) == list(PUBLISHED)


@pytest.mark.parametrize("text", ["time", "energy"])
def test_two_energy_efficient_machines_are_no_better_than_one(text: str) -> None:
    """They took 52 s, and one of them alone took 50 s."""
    machines, chosen = published_arm("ab")
    hosts = tuple(machines.hosts[i] for i in chosen)
    path = Path(__file__).parents[1] / "examples" / "published-pool.yaml"
    records = read_history(history_path(path))
    pool = machines.pool.model_copy(update={"hosts": hosts})
    # The study kept 64 samples per worker; alone, a machine takes twice as many steps.
    pair = calibrate_from_log(pool, machines.work, records)
    alone = calibrate_from_log(pool, dataclasses.replace(machines.work, batch=64), records)
    objective = parse_objective(text, None, None)
    one = estimate(alone, np.array([0]), parse_strategy("single")).value(text)
    assert one < estimate(pair, np.array([0, 1]), parse_strategy("allreduce")).value(text)
    plain = plan_to_json(alone, search(alone, objective, ["allreduce"]), objective)
    assert plain["why"].startswith("use one machine, a")


def test_an_energy_efficient_machine_draws_less_and_a_gpu_more() -> None:
    hosts = (
        Host(host="plain"),
        Host(host="green", energy_efficient=True),
        Host(host="gpu", gpus=(Gpu(model="RTX 2060"),)),
        Host(host="known", energy_efficient=True, watts=Watts(idle=5, busy=9)),
    )
    machines = PoolArrays(Pool(hosts=hosts), WORK)
    assert list(machines.busy_w) == [120, 60, 280, 9]
    assert find_guesses(machines, np.array([3])) == ["startup", "speed of known"]
    assert find_guesses(machines, np.array([0, 1])) == [
        "startup",
        "speed of plain and 1 more",
        "links",
        "watts",
    ]


def test_gpus_compute_at_their_measured_rate_or_at_that_of_their_model() -> None:
    def speed(*gpus: Gpu, device: bool = True) -> tuple[float, float]:
        work = dataclasses.replace(WORK, uses_gpus=device)
        machines = PoolArrays(Pool(hosts=(Host(host="g", gpus=gpus, gflops=20),)), work)
        return WORK.flops_per_sample / 1e9 / machines.per_sample[0], machines.doubt[0]

    assert speed(Gpu(gflops=500)) == (pytest.approx(500), 0.35)
    assert speed(Gpu(gflops=500, count=4)) == (pytest.approx(2000), 0.35)
    assert speed(Gpu(gflops=500), device=False) == (pytest.approx(20), 0.35)
    known = speed(Gpu(model="NVIDIA GeForce RTX 2080 Ti"))
    assert known == (pytest.approx(0.3 * 13_400), 0.7)
    assert estimate_gpu("NVIDIA A100-SXM4-40GB").gflops > estimate_gpu("Tesla V100-PCIE").gflops
    assert not estimate_gpu("Voodoo 2").known
    assert estimate_gpu("Tesla T4").known


def test_a_plan_says_what_is_part_of_its_seconds() -> None:
    work = dataclasses.replace(WORK, checkpoints=2, evaluated={"val": 1000, "test": 1000})
    host = Host(host="a", startup_s=3.0, measured={"any": StepCost(per_sample_s=1e-4)})
    found = estimate(PoolArrays(Pool(hosts=(host,)), work), np.array([0]), parse_strategy("single"))
    assert found.startup_s == 3.0
    assert found.train_s == pytest.approx(2.56)
    assert found.evaluation_s == pytest.approx(3000 * 1e-4 / 3)
    assert found.checkpoint_s == pytest.approx(2 * (0.005 + 720_000 / 200e6))
    parts = found.startup_s + found.train_s + found.evaluation_s + found.checkpoint_s
    assert found.seconds == pytest.approx(parts)
    unknown = host.model_copy(update={"startup_s": None})
    wide = estimate(
        PoolArrays(Pool(hosts=(unknown,)), work), np.array([0]), parse_strategy("single")
    )
    low, high = wide.seconds_interval
    assert high - low > found.seconds_interval[1] - found.seconds_interval[0]


@given(
    st.lists(st.floats(0, 1), min_size=1, max_size=8),
    st.integers(1, 4),
    st.floats(0.01, 0.99),
)
def test_the_interval_of_a_curve_contains_its_estimate(
    accuracies: list[float], runs: int, target: float
) -> None:
    points = tuple((100 * (i + 1), a) for i, a in enumerate(accuracies))
    curve = LearningCurve((points,) * runs, 1000)
    low, high = curve.interval(target)
    assert low <= curve.samples_to(target) <= high
    assert math.isinf(curve.samples_to(target)) == (curve.best < target)


def test_the_time_to_an_accuracy_follows_the_curve_and_the_efficiency() -> None:
    machines = PoolArrays(equal_machines(8), dataclasses.replace(WORK, epochs=4))
    points = tuple((12_800 * (i + 1), a) for i, a in enumerate((0.5, 0.7, 0.8, 0.85)))
    every = np.arange(8)
    whole = estimate(machines, every, parse_strategy("allreduce"))
    machines.goal = AccuracyGoal(0.6, LearningCurve((points,), 1000))
    part = estimate(machines, every, parse_strategy("allreduce"))
    assert part.train_s == pytest.approx(whole.train_s * 1.5 / 4)
    assert part.seconds_interval[0] < part.seconds < part.seconds_interval[1]
    sparse = estimate(machines, every, parse_strategy("local_sgd(h=4)"))
    assert sparse.train_s * sparse.samples_per_s == pytest.approx(19_200 / sparse.efficiency)
    machines.goal = AccuracyGoal(0.84, LearningCurve((points,), 1000))
    never = estimate(machines, every, parse_strategy("local_sgd(h=16)"))
    assert math.isinf(never.seconds)
    assert math.isfinite(never.seconds_interval[0])
    found = search(machines, parse_objective("time", None, None))
    assert math.isfinite(found.chosen.seconds)
    json.dumps(plan_to_json(machines, found, parse_objective("time", None, None)), allow_nan=False)


def test_less_progress_per_sample_counts_against_a_strategy() -> None:
    machines = PoolArrays(equal_machines(8), WORK)
    fast = estimate(machines, np.arange(8), parse_strategy("diloco"))
    assert fast.efficiency < 0.2
    assert fast.value("time") > 4 * fast.seconds
    assert fast.value("energy") / fast.joules == pytest.approx(fast.value("time") / fast.seconds)


@pytest.mark.parametrize(
    "strategy",
    [
        "allreduce",
        "allreduce(balance=auto)",
        "ps",
        "local_sgd(h=8)",
        "single",
        "grouped(size=2)",
        "switch(allreduce, ps, at=50%)",
    ],
)
@pytest.mark.parametrize("slow", [1.0, 3.0])
def test_estimates_agree_with_the_twin(strategy: str, slow: float) -> None:
    """The same model, added up here and played there."""
    pool = equal_machines(4)
    hosts = [
        h.model_copy(update={"speed": 1 / slow if i == 0 else 1.0})
        for i, h in enumerate(pool.hosts)
    ]
    pool = pool.model_copy(update={"hosts": tuple(hosts)})
    if strategy == "single":
        pool = pool.model_copy(update={"hosts": pool.hosts[:1]})
    machines = PoolArrays(pool, WORK)
    chosen = np.arange(len(pool.hosts))
    found = estimate(machines, chosen, parse_strategy(strategy))
    added = found.train_s + found.evaluation_s  # a simulated run has no startup
    spec = parse_strategy(strategy)
    plan = RunSpec(strategy=spec, workers=len(pool.slots))
    simulator = Simulator(plan, pool, WORK, WeightsBackend())
    simulator.run()
    assert added == pytest.approx(simulator.timeline.now, rel=0.10)


def test_plan_on_the_command_line(run_cli: RunCli, tmp_path: Path) -> None:
    pool = tmp_path / "pool.yaml"
    pool.write_text(draw_pool(random.Random(0), 4).to_yaml())
    done = run_cli("plan", "--pool", pool, "--out", tmp_path / "plan")
    assert done.code == 0, done.stderr
    assert "plan: " in done.stdout
    assert "not used: " in done.stdout
    assert (tmp_path / "plan" / "plan.html").stat().st_size > 10_000
    told = run_cli("plan", "--pool", pool, "--json", "--objective", "time=0.7,cost=0.3")
    assert json.loads(told.stdout)["objective"] == {"time": 0.7, "cost": 0.3}
    for arguments, complaint in [
        (("--objective", "speed"), "must be one of time, energy, cost"),
        (("--objective", "time=x"), "must be a number"),
        (("--deadline", "0"), "--deadline must be greater than 0, got 0"),
        (("--pool", tmp_path / "none.yaml"), "none.yaml"),
    ]:
        wrong = run_cli("plan", "--pool", pool, *arguments)
        assert wrong.code == 2
        assert complaint in wrong.stderr
        assert len(wrong.stderr.strip().splitlines()) == 1


def test_time_to_an_accuracy_on_the_command_line(run_cli: RunCli, tmp_path: Path) -> None:
    pool = tmp_path / "pool.yaml"
    pool.write_text(draw_pool(random.Random(0), 3).to_yaml())
    common = ("plan", "--pool", pool, "--epochs", "3", "--until", "val_acc>=0.8")
    unknown = run_cli(*common)
    assert unknown.code == 0, unknown.stderr
    assert "the time to val_acc>=0.8 is unknown" in unknown.stderr
    learned = run_cli(*common, "--learn", "2", "--json")
    assert learned.code == 0, learned.stderr
    plain = json.loads(learned.stdout)
    assert plain["accuracy"]["runs"] == 2
    assert 0 < plain["accuracy"]["epochs"] < 3
    assert "startup" in plain["guesses"]
    run = tmp_path / "run"
    trained = run_cli(
        *("twin", "--cluster", "1", "--strategy", "single", "--epochs", "3", "--out", run)
    )
    assert trained.code == 0, trained.stderr
    like = run_cli(*common, "--like", run)
    assert like.code == 0, like.stderr
    assert "until val_acc>=0.8" in like.stdout
    assert "epochs in 1 run" in like.stdout
    assert "variation between seeds" in like.stdout
    for arguments, complaint in [
        ((*common[:-1], "val_acc>=0.999", "--like", run), "choose a lower target"),
        ((*common, "--like", tmp_path), "is not a finished run"),
        ((*common[:5], "--like", run), "--like and --learn require a target"),
    ]:
        wrong = run_cli(*arguments)
        assert wrong.code == 2
        assert complaint in wrong.stderr


def test_a_pipeline_waits_as_the_formula_says() -> None:
    layers = ((100, 100),) * 12
    work = Workload(**{**vars(WORK), "shapes": layers, "gradient_ready": (), "batch": 64})
    machine = StageHost(0.0, 1e-3, math.inf, math.inf, 0.0)
    for stages in (2, 3, 4):
        for micro in (1, 4, 16):
            spec = PipelineParallel(stages=stages, micro=micro)
            found = estimate_pipeline(work, spec, [machine] * stages, 64.0)
            assert found is not None
            waits = 1 - found.busy[0] / found.step_s
            assert waits == pytest.approx((stages - 1) / (micro + stages - 1))
            assert sum(found.busy) == pytest.approx(64e-3)


def test_an_unequal_pair_gets_an_unequal_cut() -> None:
    layers = ((100, 100),) * 12
    work = Workload(**{**vars(WORK), "shapes": layers, "gradient_ready": (), "batch": 64})
    fast, slow = (StageHost(0.0, s, math.inf, math.inf, 0.0) for s in (1e-3, 3e-3))
    even, fitted = (
        estimate_pipeline(work, PipelineParallel(stages=2, micro=8, cut=cut), [fast, slow], 64.0)
        for cut in ("even", "auto")
    )
    assert even is not None
    assert fitted is not None
    assert fitted.busy[0] == pytest.approx(fitted.busy[1])
    assert fitted.step_s < 0.75 * even.step_s
