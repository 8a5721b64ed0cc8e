"""The adaptive global batch: the rule, simulated and real runs."""

from __future__ import annotations

import itertools
import json
import math
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from conftest import RunCli, read_result
from paceline.cluster.pool import Host, Jitter, Link, Pool, StepCost
from paceline.plan.cost_model import Workload
from paceline.protocol.adaptive_batch import BatchAdapter, BatchRule
from paceline.protocol.history import History
from paceline.protocol.messages import Lease
from paceline.protocol.run_spec import RunSpec
from paceline.strategies.registry import parse_strategy
from paceline.twin.simulator import Simulator
from paceline.twin.updates import StepOutcome, WeightsBackend, WeightUpdates

SAMPLES, EPOCHS, FIRST, WORKERS = 8000, 14, 32, 4


class KnownNoise(WeightsBackend, WeightUpdates):
    """Gradients with signal 1 and a known noise scale; counts the computed positions."""

    uses_leases = True

    def __init__(self, noise: float) -> None:
        self._noise = noise
        self._random = np.random.default_rng(0)
        self.seen: Counter[tuple[int, int]] = Counter()

    def enter(self, *args: Any, **settings: Any) -> WeightUpdates:
        return self

    def step(self, leases: Sequence[Lease]) -> list[StepOutcome]:
        dimension = 1000
        scale = math.sqrt(self._noise / dimension)
        sums = np.zeros(dimension)
        shares = []
        for lease in leases:
            self.seen.update((lease.epoch, p) for p in range(lease.lo, lease.hi))
            noise = self._random.normal(0, scale / math.sqrt(lease.samples), dimension)
            gradient = 1 / math.sqrt(dimension) + noise
            sums += lease.samples / lease.batch * gradient
            shares.append((lease, float(gradient @ gradient)))
        whole = float(sums @ sums)
        return [
            StepOutcome(lease.samples, 0.0, 0, norms=(lease.samples, square, lease.batch, whole))
            for lease, square in shares
        ]


def simulate(backend: KnownNoise, limit: int, fixed_s: float = 0.02) -> Simulator:
    cost = {"any": StepCost(fixed_s=fixed_s, per_sample_s=0.001 * WORKERS)}
    pool = Pool(
        hosts=tuple(Host(host=f"m{i}", measured=cost) for i in range(WORKERS)),
        jitter=Jitter(cv=0.02),
        link=Link(mbit_s=1e6, latency_ms=0.0),
    )
    work = Workload(
        model="made-up",
        data="none",
        shapes=((10,),),
        item_bytes=4,
        flops_per_sample=1.0,
        samples=SAMPLES,
        batch=FIRST,
        epochs=EPOCHS,
        evaluated={},
        slots=1,
    )
    plan = RunSpec(
        strategy=parse_strategy("allreduce"), workers=WORKERS, batch_rule=BatchRule(FIRST, limit)
    )
    world = Simulator(plan, pool, work, backend)
    assert world.run().status == "done"
    return world


@pytest.mark.parametrize("noise", [400.0, 2000.0, 8000.0])
def test_the_chosen_batch_is_near_the_optimum(noise: float) -> None:
    backend = KnownNoise(noise)
    history = simulate(backend, 4096).coordinator.history
    # A step of all workers takes 0.02 s and 0.001 s per sample of the global batch.
    best = math.sqrt(0.02 / 0.001 * noise)

    def goodput(batch: float) -> float:
        return batch / ((0.02 + 0.001 * batch) * (noise + batch))

    assert goodput(history.batch) > 0.93 * goodput(best)
    assert history.batch == FIRST or history.batch == pytest.approx(best, rel=0.5)
    # An epoch has every sample exactly once, whatever its batch.
    assert set(backend.seen.values()) == {1}
    assert len(backend.seen) == SAMPLES * EPOCHS
    gain = (noise / FIRST + 1) / (noise / history.batch + 1)
    assert history.lr_gain == pytest.approx(gain, rel=0.2)


def test_the_batch_keeps_its_bounds_and_doubles_at_most() -> None:
    history = simulate(KnownNoise(1e5), 200).coordinator.history
    batches = [FIRST] + [int(row.figures["batch"]) for row in history.decisions]  # type: ignore[call-overload]
    assert batches[-1] == 200
    assert all(b <= 2 * a for a, b in itertools.pairwise(batches))
    calm = simulate(KnownNoise(5.0), 4096).coordinator.history
    assert (calm.batch, calm.lr_gain) == (FIRST, 1.0)


def test_gain_of_sgd_and_of_adaptive_optimizers() -> None:
    rule = BatchRule(64, 1024)
    assert rule.lr_gain(64, 500) == 1
    assert rule.lr_gain(256, 1e9) == pytest.approx(4)  # only noise: linear scaling
    assert rule.lr_gain(256, 0) == 1  # no noise: a larger batch is worth nothing
    assert BatchRule(64, 1024, is_adaptive=True).lr_gain(256, 500) == 2


def test_batch_and_gain_survive_a_checkpoint() -> None:
    history = History(batch=96, lr_gain=1.7)
    again = History.from_plain(json.loads(json.dumps(history.to_plain())))
    assert (again.batch, again.lr_gain) == (96, 1.7)
    old = {k: v for k, v in history.to_plain().items() if k not in ("batch", "lr_gain")}
    assert (History.from_plain(old).batch, History.from_plain(old).lr_gain) == (0, 1.0)


def test_without_measurements_nothing_changes() -> None:
    history = History(batch=64)
    assert BatchAdapter(BatchRule(64, 512), history).adapt(history, 1.0, "allreduce") is None


JOB = ("--model", "mlp-128", "--data", "digits", "--lr", 0.05, "--strategy", "allreduce")


def test_accuracy_stays_on_digits(run_cli: RunCli, tmp_path: Path) -> None:
    pool = tmp_path / "pool.yaml"
    pool.write_text(
        "format: 1\nlink: {mbit_s: 100, latency_ms: 1}\n"
        "hosts: [{host: a, gflops: 0.5}, {host: b, gflops: 0.5}]\n"
    )
    results = {}
    for name, extra in (("constant", ()), ("adaptive", ("--adapt-batch", 256))):
        done = run_cli(
            *("twin", "--cluster", pool, *JOB, "--epochs", 12, "--batch", 16, *extra),
            *("--checkpoint-every", "never", "--out", tmp_path / name),
        )
        assert done.code == 0, done.stderr
        results[name] = read_result(tmp_path / name)
    adaptive, constant = results["adaptive"], results["constant"]
    assert adaptive["test_acc"] > constant["test_acc"] - 0.015
    assert adaptive["updates"] < 0.6 * constant["updates"]
    assert adaptive["seconds"] < 0.7 * constant["seconds"]
    assert adaptive["samples"] == constant["samples"]


def test_real_workers_adapt_the_batch_and_resume(run_cli: RunCli, tmp_path: Path) -> None:
    train = ("train", *JOB, "--workers", 2, "--batch", 8, "--adapt-batch", 64)
    first = run_cli(*train, "--epochs", 4, "--out", tmp_path / "run")
    assert first.code == 0, first.stderr
    result = read_result(tmp_path / "run")
    changes = [row for row in result["decisions"] if row["cause"] == "batch"]
    assert changes, result["decisions"]
    last = changes[-1]
    assert last["reason"] in first.stderr
    assert last["figures"]["batch"] > 8
    rows = [row for row in result["history"] if row["samples"] > last["samples"]]
    assert all(r["lr"] == pytest.approx(0.05 * last["figures"]["lr_gain"]) for r in rows)
    more = run_cli(*train, "--epochs", 5, "--out", tmp_path / "run", "--resume")
    assert more.code == 0, more.stderr
    assert read_result(tmp_path / "run")["history"][-1]["lr"] > 0.05


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--batch", 64, "--adapt-batch", 64), "must be larger than --batch 64"),
        (("--adapt-batch", 512, "--strategy", "ps"), "use allreduce and at least 2 workers"),
        (("--adapt-batch", 512, "--workers", 1), "use allreduce and at least 2 workers"),
    ],
)
def test_usage_errors(
    run_cli: RunCli, tmp_path: Path, options: tuple[object, ...], message: str
) -> None:
    done = run_cli("train", *JOB, "--workers", 2, "--out", tmp_path / "run", *options)
    assert done.code == 2
    assert message in done.stderr
