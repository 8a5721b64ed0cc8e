"""The twin: simulated runs compared with real ones, and invariants of simulated runs."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from conftest import RunCli, read_result
from paceline import models
from paceline.cluster.pool import Host, Jitter, Link, Pool, SlowPeriod, StepCost, equal_machines
from paceline.cluster.pool_file import pool_from_mapping
from paceline.codecs.registry import parse_codec
from paceline.comm.buckets import plan_layout
from paceline.errors import Diverged, RunFailed, UsageError
from paceline.job import Job
from paceline.plan.cost_model import (
    Workload,
    allreduce_s,
    encoded_bytes,
    exposed_s,
    exposed_without_layers_s,
    fill_buckets,
    with_measured_gradient_size,
)
from paceline.protocol.balance import GUMBEL_SCALE, SpeedBalancer, balance_exponent, split_batch
from paceline.protocol.messages import Lease, StepStats
from paceline.protocol.run_spec import RunSpec
from paceline.specs.slowdown import parse_slowdown
from paceline.strategies.registry import parse_strategy
from paceline.twin.clusters import apply_what_if, read_cluster
from paceline.twin.machines import JitterSource, share_evenly
from paceline.twin.run import TwinOptions, run_twin
from paceline.twin.simulator import Simulator
from paceline.twin.timeline import FifoResource, SharedCores, Timeline
from paceline.twin.updates import NOTHING, StepOutcome, WeightsBackend, WeightUpdates
from paceline.twin.workload import workload_of_job

EVERY_STRATEGY = [
    "single",
    "allreduce",
    "allreduce(balance=auto)",
    "allreduce(codec=int8)",
    "allreduce(codec=powersgd(2))",
    "ps",
    "ps(sync=bsp)",
    "ps(sync=ssp(0))",
    "ps(sync=ssp(2))",
    "ps(sync=dssp(1, 5))",
    "ps(sync=kasync(2))",
    "ps(sync=gba)",
    "ps(damp=inverse, servers=2)",
    "ps(overlap=true)",
    "ps(sync=gba, overlap=true)",
    "ps(codec=topk(0.05))",
    "ps(codec=fp16)",
    "grouped(size=2)",
    "grouped(size=2, by=speed)",
    "local_sgd(h=3)",
    "local_sgd(drift=0.05)",
    "diloco(h=3)",
    "pipeline(stages=2, micro=3)",
    "pipeline(stages=2, micro=3, cut=auto)",
    "tensor(size=2)",
    "allreduce(shard=optimizer)",
    "allreduce(shard=full)",
    "switch(pipeline(stages=2, micro=3), allreduce, at=50%)",
    "switch(allreduce, ps, at=50%)",
    "switch(ps, grouped(size=2), local_sgd(h=2), allreduce, at=(20%, 50%, 70%))",
    "switch(allreduce, ps, when=auto)",
    "switch(allreduce, ps, when=straggler(greedy, windows=1))",
    "switch(allreduce, ps, when=straggler(elastic, windows=1))",
    "switch(allreduce, ps, when=plateau(1, 0.9, 1))",
]

WORK = Workload(
    model="made-up",
    data="none",
    shapes=((100, 20), (100,)),
    item_bytes=4,
    flops_per_sample=1e6,
    samples=600,
    batch=60,
    epochs=3,
    evaluated={"val": 100},
    slots=1,
)


def play(
    strategy: str,
    pool: Pool,
    work: Workload = WORK,
    *,
    weights: WeightsBackend | None = None,
    seed: int = 0,
    clip: float | None = None,
    slow: str | None = None,
) -> Simulator:
    """A virtual run without a folder; the world tells what came of it."""
    spec = parse_strategy(strategy)
    workers = 1 if spec.name == "single" else len(pool.slots)
    slowdowns = (parse_slowdown("slow", slow, workers),) if slow else ()
    world = Simulator(
        RunSpec(strategy=spec, workers=workers, clip=clip),
        pool,
        work,
        weights or WeightsBackend(),
        seed=seed,
        slowdowns=slowdowns,
    )
    world.run()
    return world


def unequal(count: int = 4, **changes: Any) -> Pool:
    hosts = [Host(host=f"m{i}", speed=1 + 0.3 * i) for i in range(count)]
    return Pool(hosts=tuple(hosts), jitter=Jitter(cv=0.2), **changes)


class Watching(WeightsBackend, WeightUpdates):
    """Counts which positions were computed."""

    uses_leases = True

    def __init__(self) -> None:
        self.seen: Counter[tuple[int, int]] = Counter()

    def enter(self, *args: Any, **settings: Any) -> WeightUpdates:
        return self

    def _see(self, leases: Sequence[Lease]) -> None:
        for lease in leases:
            self.seen.update((lease.epoch, p) for p in range(lease.lo, lease.hi))

    def step(self, leases: Sequence[Lease]) -> list[StepOutcome]:
        self._see(leases)
        return []

    def compute(self, worker: int, lease: Lease) -> StepOutcome:
        self._see([lease])
        return NOTHING

    def push_group(
        self, members: Sequence[int], leases: Sequence[Lease], handle: int
    ) -> list[StepOutcome]:
        self._see(leases)
        return [NOTHING for _ in members]


# ---- every strategy ---------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", EVERY_STRATEGY)
@pytest.mark.parametrize("clip", [None, 1.0])
def test_every_strategy_sees_each_sample_once(strategy: str, clip: float | None) -> None:
    watching = Watching()
    world = play(strategy, unequal(), weights=watching, clip=clip)
    assert world.end is not None
    assert world.end.status == "done"
    assert watching.seen == Counter((e, p) for e in range(3) for p in range(600))
    assert world.coordinator.history.samples == 1800


@pytest.mark.parametrize("strategy", EVERY_STRATEGY)
def test_every_second_of_a_worker_is_accounted_for(strategy: str) -> None:
    world = play(strategy, unequal())
    for totals in world.coordinator.totals.values():
        phases = totals["phases"]
        assert all(value >= -1e-12 for value in phases.values()), phases
        assert sum(phases.values()) == pytest.approx(world.timeline.now, rel=0.02)


@pytest.mark.parametrize("workers", [2, 3])
def test_oversubscribed_machines_play_every_strategy(workers: int) -> None:
    pool = Pool(hosts=(Host(host="here", cores=1, workers=workers),))
    for strategy in ("allreduce", "ps", "ps(sync=ssp(1))", "local_sgd(h=3)", "ps(overlap=true)"):
        world = play(strategy, pool)
        assert world.end is not None
        assert world.end.status == "done"
        # One core computes it all: no strategy can be faster than that.
        alone = 1800 * WORK.flops_per_sample / 1e10
        assert world.timeline.now > alone


@given(seed=st.integers(0, 1000), strategy=st.sampled_from(EVERY_STRATEGY))
@settings(max_examples=30, deadline=None)
def test_the_same_seed_gives_the_same_run(seed: int, strategy: str) -> None:
    first, second = (play(strategy, unequal(), seed=seed) for _ in range(2))
    assert first.timeline.now == second.timeline.now
    assert first.timeline.events == second.timeline.events
    assert first.coordinator.history == second.coordinator.history
    assert first.coordinator.totals == second.coordinator.totals


def test_ssp_keeps_its_bound_in_virtual_runs() -> None:
    for seed in range(5):
        lags = {}
        for strategy in ("ps(sync=ssp(2))", "ps(sync=dssp(2, 6))", "ps"):
            world = play(strategy, unequal(), seed=seed, slow="worker=0,factor=6")
            lags[strategy] = world.coordinator.history.max_lag
        assert lags["ps(sync=ssp(2))"] <= 2
        assert lags["ps(sync=dssp(2, 6))"] <= 6
        assert lags["ps"] > 6


def test_a_slow_machine_holds_up_all_reduce_and_not_the_server() -> None:
    heavy = Workload(**{**vars(WORK), "flops_per_sample": 1e8})
    even, slowed = equal_machines(4), "worker=0,factor=3"
    times = {
        name: play(text, even, heavy, slow=slowed if hurt else None).timeline.now
        for name, text, hurt in [
            ("calm", "allreduce", False),
            ("allreduce", "allreduce", True),
            ("balanced", "allreduce(balance=auto)", True),
            ("ps", "ps", True),
        ]
    }
    assert times["allreduce"] == pytest.approx(3 * times["calm"], rel=0.15)
    assert times["ps"] < 0.6 * times["allreduce"]
    assert times["balanced"] < 0.7 * times["allreduce"]


def test_a_machine_that_dies_ends_the_run_and_is_named() -> None:
    hosts = (Host(host="good"), Host(host="bad", fails_at_s=0.01))
    for strategy in ("allreduce", "ps"):
        world = play(strategy, Pool(hosts=hosts), Workload(**{**vars(WORK), "epochs": 10_000}))
        assert world.end is not None
        assert (world.end.status, world.timeline.now) == ("failed", pytest.approx(10.01))
        assert "worker 1 (bad) died" in str(world.end.error)


def test_slow_periods_end() -> None:
    slow = SlowPeriod(from_s=0.0, to_s=0.5, factor=4)
    pools = [
        Pool(hosts=(Host(host="a", slow=(slow,) if hurt else ()),), jitter=Jitter(cv=0))
        for hurt in (True, False)
    ]
    hurt, calm = (play("single", p, Workload(**{**vars(WORK), "epochs": 30})) for p in pools)
    # A quarter of the work of the first half second, and the rest as ever.
    assert hurt.timeline.now == pytest.approx(calm.timeline.now + 0.5 * 3 / 4, rel=0.02)


# ---- beside real runs -------------------------------------------------------------------------


def train_both(run_cli: RunCli, tmp_path: Path, strategy: str, workers: int, *more: Any) -> Path:
    common = ("--strategy", strategy, "--epochs", 2, "--quiet", *more)
    real = run_cli(
        *("train", "--out", tmp_path / "real", "--workers", workers, *common),
        *("--checkpoint-every", "never", "--threads", 1),
    )
    assert real.code == 0, real.stderr
    twin = run_cli(
        *("twin", "--out", tmp_path / "twin", "--cluster", workers, *common, "--threads", 1)
    )
    assert twin.code == 0, twin.stderr
    return tmp_path


def test_one_virtual_machine_is_a_real_single_run_bit_for_bit(
    run_cli: RunCli, tmp_path: Path
) -> None:
    train_both(run_cli, tmp_path, "single", 1, "--model", "resnet8", "--batch", 64)
    weights = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("real", "twin")]
    assert weights[0] == weights[1]
    real, twin = read_result(tmp_path / "real"), read_result(tmp_path / "twin")
    for name in ("test_loss", "test_acc", "val_loss", "train_loss", "samples", "updates"):
        assert real[name] == twin[name], name
    assert (real["virtual"], twin["virtual"]) == (False, True)
    assert set(real) == set(twin)


@pytest.mark.parametrize(
    "strategy",
    [
        "allreduce",
        *(
            pytest.param(text, marks=pytest.mark.slow)
            for text in (
                "switch(allreduce, local_sgd(h=3), ps(sync=bsp), at=(30%, 70%))",
                "ps(sync=bsp)",
                "local_sgd(h=4)",
                "local_sgd(drift=0.05)",
                "diloco(h=4)",
                "allreduce(codec=topk(0.05))",
            )
        ),
    ],
)
def test_synchronous_strategies_learn_what_real_runs_learn(
    run_cli: RunCli, tmp_path: Path, strategy: str
) -> None:
    train_both(
        *(run_cli, tmp_path, strategy, 3),
        *("--model", "resnet8", "--batch", 66, "--dtype", "float64", "--clip", 3.0),
    )
    real, twin = (load_file(tmp_path / n / "model.safetensors") for n in ("real", "twin"))
    for name, tensor in real.items():
        assert float((tensor - twin[name]).abs().max()) < 1e-9, name


def test_results_are_byte_identical_and_depths_agree_on_time(tmp_path: Path) -> None:
    job = Job(epochs=2, checkpoint_every="never")
    spec = parse_strategy("switch(allreduce, ps, at=50%)")
    for name, depth in [("a", "learn"), ("b", "learn"), ("c", "cost")]:
        run_twin(job, spec, TwinOptions(out=tmp_path / name, pool=unequal(), depth=depth))
    files = ["result.json", "run.json", "events/run.jsonl", "model.safetensors"]
    for file in files:
        assert (tmp_path / "a" / file).read_bytes() == (tmp_path / "b" / file).read_bytes(), file
    learnt, cost = read_result(tmp_path / "a"), read_result(tmp_path / "c")
    assert learnt["seconds"] == cost["seconds"]
    assert learnt["phases"] == cost["phases"]
    assert cost["test_acc"] is None
    assert learnt["test_acc"] > 0.2


@pytest.mark.parametrize("codec", ["onebit", "topk(0.02)", "int8", "powersgd(4)"])
def test_codecs_learn_on_servers(codec: str, tmp_path: Path) -> None:
    """Error feedback makes up for what is left out, between parameters too."""
    job = Job(model="mlp-300-100", epochs=15, checkpoint_every="never", lr=0.02)
    result = run_twin(
        job,
        parse_strategy(f"ps(codec={codec})"),
        TwinOptions(out=tmp_path / "run", pool=equal_machines(2), threads=1),
    )
    assert result["test_acc"] > 0.85


def test_onebit_learns_on_real_servers(run_cli: RunCli, tmp_path: Path) -> None:
    done = run_cli(
        *("train", "--out", tmp_path / "run", "--strategy", "ps(codec=onebit)", "--workers", 2),
        *("--model", "mlp-300-100", "--epochs", 15, "--lr", 0.02),
        *("--checkpoint-every", "never", "--quiet"),
    )
    assert done.code == 0, done.stderr
    # 87 to 94% over runs, whose updates come in another order each time; a tenth is chance.
    assert read_result(tmp_path / "run")["test_acc"] > 0.8


# ---- clusters ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("plain", "complaint"),
    [
        ({"hosts": [{"host": "a", "speed": 0}]}, "hosts.0.speed is 0"),
        ({"hosts": [{"host": "a", "link": {"mbit_s": -1}}]}, "hosts.0.link.mbit_s is -1"),
        ({"hosts": [{"host": "a", "sped": 1}]}, "did you mean 'speed'"),
        ({"hosts": [{"host": "a", "measured": {"m": {"per_sample_s": 0}}}]}, "per_sample_s is 0"),
        ({"hosts": [{"host": "a"}, {"host": "a"}]}, "is listed twice"),
        ({"hosts": [{"host": "a", "slow": [{"factor": 0}]}]}, "factor is 0"),
        ({"hosts": []}, "hosts is"),
        ({}, "hosts is missing"),
        ([], "a mapping"),
    ],
)
def test_a_bad_cluster_file_is_one_clear_line(
    plain: Any, complaint: str, tmp_path: Path, run_cli: RunCli
) -> None:
    with pytest.raises(UsageError, match=r"pool here\.yaml: ") as raised:
        pool_from_mapping(plain, "here.yaml")
    assert complaint in str(raised.value)
    assert "\n" not in str(raised.value)


def test_mistakes_on_the_command_line_write_nothing(run_cli: RunCli, tmp_path: Path) -> None:
    file = tmp_path / "pool.yaml"
    file.write_text(yaml.safe_dump({"hosts": [{"host": "a", "speed": -2}]}))
    out = tmp_path / "out"
    for arguments, complaint in [
        (("--cluster", file), "speed is -2"),
        (
            ("--cluster", tmp_path / "none.yaml"),
            "was not found; use a pool file, a number of machines, or one of",
        ),
        (("--cluster", "0"), "at least one machine"),
        (("--cluster", "3", "--workers", "4"), "--workers must be 1 to 3, got 4"),
        (("--cluster", "2", "--strategy", "ps(servers=3)"), "needs 3 servers"),
        (("--cluster", "2", "--depth", "deep"), "--depth must be 'learn' or 'cost', got 'deep'"),
        (("--cluster", "2", "--without", "2"), "--without must be a worker from 0 to 1, got 2"),
        (("--cluster", "2", "--bandwidth", "0"), "--bandwidth must be greater than 0, got 0"),
        (("--cluster", "2", "--batch", "1"), "smaller than"),
        ((), "exactly one of --cluster, --calibrate and --probe is required"),
        (("--calibrate", tmp_path), "does not contain a run"),
    ]:
        done = run_cli("twin", "--out", out, "--quiet", *arguments)
        assert done.code == 2, (arguments, done.stderr)
        assert complaint in done.stderr
        assert len(done.stderr.strip().splitlines()) == 1
        assert not out.exists()


def test_a_pool_survives_its_own_file() -> None:
    pool = unequal(link=Link(mbit_s=100, latency_ms=2))
    assert pool_from_mapping(yaml.safe_load(pool.to_yaml()), "here") == pool
    endless = unequal(link=Link(mbit_s=float("inf")))
    text = json.dumps(endless.to_plain(), allow_nan=False)
    assert pool_from_mapping({"format": 1, **json.loads(text)}, "here") == endless


def test_what_if_leaves_workers_out_and_widens_links() -> None:
    pool = Pool(hosts=(Host(host="a", workers=2), Host(host="b", link=Link(mbit_s=10))))
    changed = apply_what_if(pool, without=(0, 2), bandwidth=2)
    assert [(h.host, h.workers) for h in changed.hosts] == [("a", 1)]
    assert changed.link.mbit_s == 2 * pool.link.mbit_s
    assert apply_what_if(pool, bandwidth=2).hosts[1].link == Link(mbit_s=20)
    with pytest.raises(UsageError, match="removes every worker"):
        apply_what_if(pool, without=(0, 1, 2))


def test_a_recorded_run_becomes_a_cluster(run_cli: RunCli, tmp_path: Path) -> None:
    """The same run without its slow worker: what-if on a real trace."""
    real = run_cli(
        *("train", "--out", tmp_path / "real", "--workers", 2, "--model", "resnet8"),
        *("--batch", 64, "--epochs", 2, "--slow", "worker=1,factor=4"),
        *("--checkpoint-every", "never", "--quiet"),
    )
    assert real.code == 0, real.stderr
    rates = []
    for name, more in [("same", ()), ("without", ("--without", 1))]:
        done = run_cli(
            *("twin", "--out", tmp_path / name, "--calibrate", tmp_path / "real"),
            *("--model", "resnet8", "--batch", 64, "--epochs", 2, "--depth", "cost", "--quiet"),
            *more,
        )
        assert done.code == 0, done.stderr
        rates.append(read_result(tmp_path / name)["samples_per_s"])
    measured = read_result(tmp_path / "real")["samples_per_s"]
    assert 0.6 < rates[0] / measured < 1.6  # a machine shared with other tests
    assert rates[1] > rates[0]
    pool = read_result(tmp_path / "same")
    assert pool["virtual"]


@pytest.mark.parametrize(
    ("name", "samples", "epochs", "seconds"),
    [
        ("published-five", 50_000, 180, (27505, 23784, 24164, 25025, 26341)),
        ("published-five-densenet", 60_000, 40, (7170, 5608, 6133, 6268, 6783)),
    ],
)
def test_the_published_switches_are_predicted(
    name: str, samples: int, epochs: int, seconds: tuple[int, ...]
) -> None:
    """Fitted to the first two rows; the switches were held out."""
    pool = read_cluster(name)
    sizes = {"samples": samples, "batch": 128, "epochs": 4, "evaluated": {}}
    work = Workload(**{**vars(WORK), **sizes})
    work = with_measured_gradient_size(work, pool.hosts[0])
    rows = ["allreduce", "ps", *(f"switch(allreduce, ps, at={p}%)" for p in (25, 50, 75))]
    for row, known, most in zip(rows, seconds, (0.01, 0.01, 0.03, 0.03, 0.03), strict=True):
        played = play(row, pool, work).timeline.now * epochs / 4
        assert abs(played / known - 1) < most, row


# ---- the pieces -------------------------------------------------------------------------------


@given(
    begins=st.lists(st.floats(0, 10), min_size=1, max_size=5),
    seconds=st.lists(st.floats(0.01, 5), min_size=5, max_size=5),
    cores=st.integers(1, 4),
)
def test_shared_cores_lose_no_work(begins: list[float], seconds: list[float], cores: int) -> None:
    """Both forms of sharing agree; nobody is faster than alone, all never slower than in turn."""
    import numpy as np

    tasks = list(zip(begins, seconds, strict=False))
    ends = share_evenly(np.array([b for b, _ in tasks]), np.array([s for _, s in tasks]), cores)
    for (begin, second), end in zip(tasks, ends, strict=True):
        assert end >= begin + second - 1e-9
    assert max(ends) <= max(begins) + sum(s for _, s in tasks) + 1e-9
    timeline = Timeline()
    shared = SharedCores(timeline, cores, processes=99)
    told: dict[int, float] = {}
    for index, (begin, second) in enumerate(tasks):
        shared.run(begin, second, lambda now, i=index: told.__setitem__(i, now))  # type: ignore[misc]
    assert not timeline.run()  # until nothing is left
    assert [told[i] for i in range(len(tasks))] == pytest.approx(list(ends), abs=1e-6)


def test_a_lane_serves_one_after_another() -> None:
    lane = FifoResource()
    assert [lane.reserve(0.0, 2.0), lane.reserve(1.0, 2.0), lane.reserve(9.0, 1.0)] == [
        2.0,
        4.0,
        10.0,
    ]


@pytest.mark.parametrize("shape", ["lognormal", "uniform", "exponential"])
def test_jitter_has_its_mean_and_spread(shape: Any) -> None:
    import numpy as np

    draws = JitterSource([Jitter(shape=shape, cv=0.3)] * 2, seed=7)
    drawn = np.array([draws.each(np.arange(2)) for _ in range(20_000)])
    assert drawn.mean() == pytest.approx(1.0, abs=0.01)
    assert drawn.std() == pytest.approx(0.3, abs=0.01)
    assert drawn.min() >= 0
    again = JitterSource([Jitter(shape=shape, cv=0.3)] * 2, seed=7)
    assert [again.one(1) for _ in range(600)] == drawn[:600, 1].tolist()


def test_collectives_cost_what_the_formulas_say() -> None:
    pool = equal_machines(64)
    small, large = (allreduce_s(pool, pool.slots, n, "auto") for n in (1e3, 1e9))
    ring = pool.model_copy(update={"collective": "ring"})
    fly = pool.model_copy(update={"collective": "butterfly"})
    assert small == allreduce_s(fly, pool.slots, 1e3) < allreduce_s(ring, pool.slots, 1e3)
    assert large == allreduce_s(ring, pool.slots, 1e9) < allreduce_s(fly, pool.slots, 1e9)
    assert (
        exposed_without_layers_s(1.0, 10.0, 0.5e6, 25e6) == 1.0
    )  # one bucket: nothing to hide behind
    assert exposed_without_layers_s(1.0, 10.0, 60e6, 25e6) == pytest.approx(0.25)


def test_an_exchange_hides_behind_what_is_left_of_backward() -> None:
    """The first bucket is ready at half of 10 s; the second, at the end, waits for it."""
    assert exposed_s(10.0, [(0.5, 4.0), (1.0, 1.0)]) == pytest.approx(1.0)
    assert exposed_s(10.0, [(0.5, 7.0), (1.0, 1.0)]) == pytest.approx(3.0)
    assert exposed_s(10.0, [(1.0, 2.5)]) == pytest.approx(2.5)


def test_buckets_of_the_cost_model_are_those_of_a_run() -> None:
    for name in ("mlp-300-100", "cnn-small", "resnet20", "mlp-wide"):
        job = Job(
            model=name,
            data=lambda: (((torch.zeros(4, 3, 32, 32), torch.zeros(4).long())), None, None),
        )
        work = workload_of_job(job)
        model = models.build(name, input_shape=(3, 32, 32), classes=1)
        named = list(model.named_parameters())
        assert work.shapes == tuple(tuple(p.shape) for _, p in named)
        for size in (1 << 16, 25 << 20):
            counts = {n: p.numel() for n, p in named}
            layout = [sum(counts[n] for n in names) for names in plan_layout(named, size)]
            buckets = fill_buckets(work, size)
            assert [b.share for b in buckets] == pytest.approx(
                [count / sum(counts.values()) for count in layout]
            )
            ready = [b.ready for b in buckets]
            assert ready == sorted(ready)
            # The first layer's gradient is the last operation, the last layer's is done early.
            assert ready[-1] == pytest.approx(1.0)
            assert ready[0] > 1 / 3 or len(ready) == 1


@pytest.mark.parametrize(
    ("codec", "ratio"),
    [
        ("fp16", 0.5),
        ("bf16", 0.5),
        ("int8", 0.25),
        ("onebit", 1 / 32),
        ("topk(0.01)", 0.02),
        ("powersgd(4)", 4 * 2000 / 1e6),
    ],
)
def test_encoded_bytes_are_about_what_coders_send(codec: str, ratio: float) -> None:
    work = Workload(**{**vars(WORK), "shapes": ((1000, 1000),)})
    spec = parse_codec(codec)
    assert encoded_bytes(spec, work) / work.bytes == pytest.approx(ratio, rel=0.1)


def test_measured_steps_take_the_place_of_operations() -> None:
    from paceline.plan.cost_model import step_time_on

    pool = equal_machines(1)
    guessed = step_time_on(pool.hosts[0], WORK, pool)
    assert guessed.per_sample_s == pytest.approx(1e6 / 1e10)
    known = Host(host="a", speed=2, measured={"made-up": StepCost(fixed_s=0.2, per_sample_s=0.01)})
    assert step_time_on(known, WORK, pool).step_s(10) == pytest.approx((0.2 + 0.1) / 2)


def test_ten_thousand_workers_are_played() -> None:
    work = Workload(**{**vars(WORK), "samples": 40_000, "batch": 20_000, "epochs": 1})
    world = play("ps(sync=ssp(3))", equal_machines(10_000), work)
    assert world.coordinator.history.samples == 40_000


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["allreduce", "ps", "local_sgd(h=2)", "grouped(size=100)"])
def test_other_strategies_play_ten_thousand_workers(strategy: str) -> None:
    work = Workload(**{**vars(WORK), "samples": 40_000, "batch": 20_000, "epochs": 1})
    world = play(strategy, equal_machines(10_000), work)
    assert world.coordinator.history.samples == 40_000


def test_a_failed_virtual_run_says_so(tmp_path: Path) -> None:
    pool = Pool(hosts=(Host(host="a"), Host(host="b", fails_at_s=0.001)))
    with pytest.raises(RunFailed, match=r"worker 1 \(b\) died"):
        run_twin(
            Job(epochs=500, checkpoint_every="never"),
            parse_strategy("ps"),
            TwinOptions(out=tmp_path / "run", pool=pool, depth="cost"),
        )
    assert read_result(tmp_path / "run")["status"] == "failed"


# ---- corners: divergence, distance, evaluation, death, mistakes ---------------------------------


def test_divergence_ends_a_virtual_run_as_it_ends_a_real_one(tmp_path: Path) -> None:
    with pytest.raises(Diverged, match=r"more than 1000 times the first loss|not a finite"):
        run_twin(
            Job(epochs=2, lr=1000.0, checkpoint_every="never"),
            parse_strategy("ps"),
            TwinOptions(out=tmp_path / "run", pool=equal_machines(2), threads=1),
        )
    assert read_result(tmp_path / "run")["status"] == "diverged"


def test_auto_undoes_a_virtual_switch_that_diverges(tmp_path: Path) -> None:
    slow = SlowPeriod(factor=30)
    hosts = [Host(host=f"m{i}", cores=4, gflops=0.05) for i in range(3)]
    hosts[0] = hosts[0].model_copy(update={"slow": (slow,)})
    result = run_twin(
        Job(epochs=14, batch=64, checkpoint_every="never"),
        parse_strategy("switch(allreduce, ps(lr_scale=400), when=auto)"),
        TwinOptions(out=tmp_path / "run", pool=Pool(hosts=tuple(hosts)), threads=1),
    )
    assert [s["cause"] for s in result["switches"]][:2] in (
        ["gain", "diverged"],
        ["gain", "regressed"],
    )
    assert result["test_acc"] > 0.85


def test_staleness_falls_where_messages_take_longer() -> None:
    """Updates that come while a pull is on its way are in the weights that it brings."""
    heavy = Workload(**{**vars(WORK), "flops_per_sample": 1e7, "samples": 6000})
    means = []
    for latency_ms in (0.01, 5.0):
        pool = equal_machines(8).model_copy(update={"link": Link(latency_ms=latency_ms)})
        counts = play("ps", pool, heavy).coordinator.history.staleness
        means.append(sum(s * n for s, n in counts.items()) / sum(counts.values()))
    assert means[0] == pytest.approx(7, abs=0.4)
    assert means[1] < 5.6


def test_a_machine_far_away_does_not_hold_up_the_others() -> None:
    near = equal_machines(7)
    far = near.model_copy(
        update={"hosts": (*near.hosts, Host(host="far", link=Link(latency_ms=100)))}
    )
    work = Workload(**{**vars(WORK), "samples": 6000, "batch": 64, "epochs": 1})
    alone, with_far = (
        w.coordinator.history.samples / w.coordinator.history.train_seconds
        for w in (play("ps", near, work), play("ps", far, work))
    )
    assert with_far > 0.4 * alone  # the end of the epoch waits for its last batch


@pytest.mark.parametrize("strategy", ["ps", "allreduce", "grouped(size=2)", "ps(sync=ssp(2))"])
def test_evaluation_is_not_counted_as_waiting(strategy: str) -> None:
    work = Workload(**{**vars(WORK), "evaluated": {"val": 60_000}})
    world = play(strategy, equal_machines(4), work)
    for totals in world.coordinator.totals.values():
        phases = totals["phases"]
        assert sum(phases.values()) == pytest.approx(world.timeline.now, rel=0.02)
        assert phases["eval"] > 0.4 * world.timeline.now
        assert phases["wait"] < 0.3 * world.timeline.now


@pytest.mark.parametrize("strategy", ["ps(sync=kasync(2))", "ps(sync=gba)", "grouped(size=2)"])
def test_clipping_works_on_aggregated_gradients(strategy: str, tmp_path: Path) -> None:
    result = run_twin(
        Job(epochs=10, lr=0.05, clip=1.0, checkpoint_every="never"),
        parse_strategy(strategy),
        TwinOptions(out=tmp_path / "run", pool=unequal(), threads=1),
    )
    assert result["test_acc"] > 0.8


def test_a_dead_machine_says_nothing_more() -> None:
    hosts = (Host(host="good"), Host(host="bad", fails_at_s=0.001))
    world = play("ps", Pool(hosts=hosts), Workload(**{**vars(WORK), "epochs": 1}))
    assert world.end is not None
    assert world.end.status == "failed"
    assert world.coordinator.history.samples < 600


def test_single_beside_others_ignores_troubles_of_other_workers(
    run_cli: RunCli, tmp_path: Path
) -> None:
    done = run_cli(
        *("twin", "--cluster", 3, "--strategy", "single; ps", "--slow", "worker=2,factor=3"),
        *("--epochs", 1, "--depth", "cost", "--quiet", "--out", tmp_path / "out"),
    )
    assert done.code == 0, done.stderr


def test_a_late_mistake_leaves_no_folder(run_cli: RunCli, tmp_path: Path) -> None:
    for arguments, complaint in [
        (("--strategy", "switch(allreduce, ps, at=epoch(5))", "--epochs", 1), "beyond the end"),
        (("--threads", 0), "--threads must be at least 1, got 0"),
    ]:
        done = run_cli(*("twin", "--cluster", 2, "--quiet", "--out", tmp_path / "out", *arguments))
        assert done.code == 2
        assert complaint in done.stderr
        assert not (tmp_path / "out").exists()


def test_a_virtual_run_can_be_evaluated(run_cli: RunCli, tmp_path: Path) -> None:
    run_cli("twin", "--cluster", 2, "--quiet", "--epochs", 1, "--out", tmp_path / "out")
    done = run_cli("evaluate", tmp_path / "out")
    assert done.code == 0, done.stderr


def test_without_counts_places() -> None:
    pool = Pool(hosts=(Host(host="localhost", workers=2), Host(host="localhost")))
    assert [h.workers for h in apply_what_if(pool, without=(0, 0)).hosts] == [1, 1]
    assert [h.workers for h in apply_what_if(pool, without=(2,)).hosts] == [2]


def test_tune_keeps_probes_of_different_clusters_apart(run_cli: RunCli, tmp_path: Path) -> None:
    common = ("tune", "--epochs", 2, "--out", tmp_path / "out")
    assert run_cli(*common, "--twin", 2).code == 0
    other = run_cli(*common, "--twin", 3)
    assert other.code == 2
    assert "another job" in other.stderr
    assert run_cli(*common, "--twin", 2, "--workers", 5).code == 2


# ---- unequal machines -------------------------------------------------------------------------


def unequal_speed(speeds: tuple[float, ...], cv: float, *, drift_s: float = 0.0) -> float:
    """Fraction of the machines' combined speed that balance=auto reaches, on batches of 512.

    With `drift_s`, each machine in turn is half as fast for half of this time.
    """
    count, per_sample_s, seconds = len(speeds), 1e-3, 60
    hosts = []
    for i, speed in enumerate(speeds):
        begins = [drift_s * (count * k + i) for k in range(30)] if drift_s else []
        slow = tuple(SlowPeriod(from_s=at, to_s=at + drift_s / 2, factor=2) for at in begins)
        cost = {"any": StepCost(per_sample_s=per_sample_s)}
        hosts.append(Host(host=f"m{i}", speed=speed, slow=slow, measured=cost))
    samples = int(sum(speeds) / per_sample_s * seconds)
    work = Workload(
        **{**vars(WORK), "samples": samples, "batch": 512, "epochs": 1, "evaluated": {}}
    )
    world = play("allreduce(balance=auto)", Pool(hosts=tuple(hosts), jitter=Jitter(cv=cv)), work)
    end = world.timeline.now
    available = 0.0
    for host in hosts:
        slow_s = sum(min(p.to_s, end) - min(p.from_s, end) for p in host.slow)
        available += (end - slow_s / 2) * host.speed / per_sample_s
    return samples / available


@pytest.mark.parametrize("speeds", [(1, 1, 1, 3), (1, 3, 9)])
@pytest.mark.parametrize("cv", [0.0, 0.05, 0.1])
def test_balanced_shares_reach_the_combined_speed(speeds: tuple[float, ...], cv: float) -> None:
    fractions = [speed / sum(speeds) for speed in speeds]
    entropy = -sum(f * math.log(f) for f in fractions)
    reachable = 1 / (1 + GUMBEL_SCALE * cv * entropy)
    assert unequal_speed(speeds, cv) == pytest.approx(reachable, abs=0.02)


@pytest.mark.parametrize("speeds", [(1, 1, 1, 3), (1, 3, 9)])
def test_balanced_shares_follow_machines_that_drift(speeds: tuple[float, ...]) -> None:
    assert unequal_speed(speeds, 0.05, drift_s=20) > 0.9


def test_a_worker_without_samples_is_tried_again() -> None:
    balance = SpeedBalancer(2)
    balance.update(0, StepStats(64, 64, None, None, busy_s=0.1, steps=1))
    balance.update(1, StepStats(1, 1, None, None, busy_s=1.0, steps=1))
    assert split_batch(64, 2, balance.weights()) == [0, 64, 64]
    for _ in range(60):
        balance.update(1, StepStats(0, 0, None, None))
    assert split_batch(64, 2, balance.weights())[1] < 64


@pytest.mark.parametrize("cv", [0.05, 0.1, 0.2, 0.4])
def test_shares_minimize_the_expected_maximum(cv: float) -> None:
    speeds = torch.tensor([1.0, 3.0, 9.0], dtype=torch.float64)
    generator = torch.Generator().manual_seed(0)
    sigma = math.sqrt(math.log1p(cv * cv))
    noise = torch.randn(200_000, 3, generator=generator, dtype=torch.float64)
    factors = (sigma * noise - sigma**2 / 2).exp()

    def expected_s(power: float) -> float:
        shares = speeds**power
        return float((factors * shares / shares.sum() / speeds).amax(1).mean())

    best = min(expected_s(1 + 0.05 * step) for step in range(30))
    assert expected_s(balance_exponent(cv)) < 1.005 * best
    assert expected_s(balance_exponent(cv)) < expected_s(1.0)


# ---- where servers run ---------------------------------------------------------------------


def write_cluster(path: Path, first: float = 10_000.0, **of_servers: Any) -> Path:
    """Six machines for workers, the first with a link of `first` Mbit/s, and two for servers."""
    hosts = [
        {"host": f"s{i}", "cores": 4, "link": {"mbit_s": first if i == 1 else 10_000.0}}
        for i in range(1, 9)
    ]
    path.write_text(yaml.safe_dump({"hosts": hosts[:6] + [h | of_servers for h in hosts[6:]]}))
    return path


DEDICATED = ("--select", "s1,s2,s3,s4,s5,s6", "--servers-on", "s7,s8")
SERVED = (
    *("twin", "--model", "mlp-300-100", "--data", "digits", "--epochs", 1, "--depth", "cost"),
    *("--strategy", "ps(servers=2)", "--quiet"),
)


def test_dedicated_servers_have_machines_of_their_own(run_cli: RunCli, tmp_path: Path) -> None:
    """One chief, six workers, two servers: the servers' links and cores decide."""
    seconds = []
    slow = {"link": {"mbit_s": 100.0}}
    for number, options in enumerate(({}, {"first": 100.0}, slow)):
        cluster = write_cluster(tmp_path / "cluster.yaml", **options)
        out = tmp_path / f"run{number}"
        done = run_cli(*SERVED, "--cluster", cluster, *DEDICATED, "--out", out)
        assert done.code == 0, done.stderr
        result = read_result(out)
        assert (result["workers"], result["servers"]) == (6, 2)
        seconds.append(result["stages"]["train"])
    # A slow link of one worker delays that worker, slow links of the servers delay all.
    assert seconds[0] < seconds[1] < seconds[2] / 3


def test_lost_server_machine_ends_the_run(run_cli: RunCli, tmp_path: Path) -> None:
    cluster = write_cluster(tmp_path / "cluster.yaml", fails_at_s=0.01)
    done = run_cli(*SERVED, "--cluster", cluster, *DEDICATED, "--out", tmp_path / "run")
    assert done.code == 1
    assert "server 0 (s7) died" in done.last_line


def test_servers_on_one_machine_share_its_link(run_cli: RunCli, tmp_path: Path) -> None:
    cluster = write_cluster(tmp_path / "cluster.yaml", link={"mbit_s": 100.0})
    seconds = []
    for number, where in enumerate(("s7", "s7,s8")):
        out = tmp_path / f"run{number}"
        layout = ("--select", "s1,s2,s3,s4,s5,s6", "--servers-on", where)
        done = run_cli(*SERVED, "--cluster", cluster, *layout, "--out", out)
        assert done.code == 0, done.stderr
        seconds.append(read_result(out)["stages"]["train"])
    assert seconds[0] == pytest.approx(2 * seconds[1], rel=0.1)
