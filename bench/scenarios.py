"""Scenarios for comparing synchronization strategies in the simulator: a job and a cluster each.

Data: `digits`, which is part of the package, or the first images of MNIST and Fashion-MNIST with
their complete test sets, or a part of Tiny Shakespeare.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from paceline import data as datasets
from paceline.cluster.pool import Host, Jitter, Link, Pool, SlowPeriod, StepCost
from paceline.job import Job
from paceline.twin.clusters import read_cluster


@dataclass(frozen=True)
class Scenario:
    """One job on one simulated cluster."""

    name: str
    description: str
    pool: Pool
    data: str = "digits"
    job: dict[str, Any] = field(default_factory=dict)
    near_limit: bool = False
    """The learning rate is near the limit of stability of synchronous training."""
    held_out: bool = False
    """Defined after the rules of auto were fixed."""


class Rows:
    """Some rows of a dataset, as images of half their size if `small`."""

    def __init__(self, table: Any, rows: np.ndarray, small: bool) -> None:
        self._table, self._rows, self._small = table, rows, small

    def __len__(self) -> int:
        return len(self._rows)

    def batch(
        self, indices: np.ndarray, *, epoch: int | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        inputs, targets = self._table.batch(self._rows[indices], epoch=epoch)
        if self._small:
            inputs = torch.nn.functional.avg_pool2d(inputs, 2)
        return inputs, targets


@cache
def load_splits(name: str, data_dir: Path | None) -> Any:
    """Loads `digits`, or `mnist:6000`: 6,000 rows to train, 2,000 to validate and all to test.

    `mnist/2:6000` has images of half their width and height.
    """
    name, _, count = name.partition(":")
    name, _, small = name.partition("/")
    whole = datasets.load(name, data_dir=data_dir, dtype="float32", augment=False, seed=0)
    if not count:
        return whole
    kept = int(count)
    return dataclasses.replace(
        whole,
        train=Rows(whole.train, np.arange(kept), bool(small)),
        val=Rows(whole.val, np.arange(min(len(whole.val), 2000)), bool(small)),
        test=Rows(whole.test, np.arange(len(whole.test)), bool(small)),
    )


def machines(
    count: int,
    *,
    cv: float = 0.2,
    slow: dict[int, float] | None = None,
    periods: dict[int, tuple[float, float, float]] | None = None,
    mbit_s: float = 1000.0,
    latency_ms: float = 0.1,
    slow_link: tuple[SlowPeriod, ...] = (),
    per_sample_s: float = 0.01,
    shape: str = "lognormal",
) -> Pool:
    """Machines of equal speed, except for constant slowdown factors and slow periods."""
    hosts = []
    for index in range(count):
        factor = (slow or {}).get(index, 1.0)
        period = (periods or {}).get(index)
        hosts.append(
            Host(
                host=f"m{index}",
                cores=4,
                measured={"any": StepCost(fixed_s=0.002, per_sample_s=per_sample_s * factor)},
                slow=()
                if period is None
                else (SlowPeriod(from_s=period[0], to_s=period[1], factor=period[2]),),
            )
        )
    return Pool(
        name=f"{count} machines",
        hosts=tuple(hosts),
        link=Link(mbit_s=mbit_s, latency_ms=latency_ms, slow=slow_link),
        jitter=Jitter(shape=shape, cv=cv),  # type: ignore[arg-type]
    )


def scenarios() -> list[Scenario]:
    eight = read_cluster("published-eight")
    # The rate decays in most of them: at a constant rate the last validations vary by more than
    # strategies differ.
    decay = {"schedule": "cosine"}
    cnn: dict[str, Any] = {"model": "cnn-small", "epochs": 8, "batch": 64, **decay}
    small: dict[str, Any] = {"model": "cnn-small", "epochs": 6, "batch": 64, **decay}
    mlp: dict[str, Any] = {"model": "mlp-300-100", "epochs": 6, "batch": 128, **decay}
    fashion: dict[str, Any] = {"model": "mlp-128", "epochs": 6, "batch": 128, **decay}
    return [
        Scenario("eight", "the eight published machines", eight, "mnist:1500", cnn),
        Scenario("calm-2", "two equal machines", machines(2, cv=0.05), "mnist:6000", mlp),
        Scenario(
            "calm-4", "four equal machines", machines(4, cv=0.05), "fashion-mnist:3000", small
        ),
        Scenario(
            "slow-3x",
            "four machines, one 3 times slower",
            machines(4, slow={0: 3}),
            "mnist:6000",
            mlp,
        ),
        Scenario(
            "1-3-9",
            "three machines of speeds 1, 3 and 9",
            machines(3, cv=0.1, slow={0: 9, 1: 3}),
            "mnist:6000",
            mlp,
        ),
        Scenario(
            "slow-10x",
            "eight machines, one 10 times slower",
            machines(8, slow={3: 10}),
            "mnist:3000",
            small,
        ),
        Scenario(
            "straggler",
            "eight machines, one 4 times slower for a third of the run",
            machines(8, periods={2: (16.0, 37.0, 4.0)}),
            "fashion-mnist:6000",
            fashion,
        ),
        Scenario(
            "100-mbit",
            "four machines, 100 Mbit/s",
            machines(4, cv=0.1, mbit_s=100, per_sample_s=0.002),
            "mnist:6000",
            mlp,
        ),
        Scenario(
            "20-ms",
            "four machines, 100 Mbit/s and 20 ms",
            machines(4, cv=0.1, mbit_s=100, latency_ms=20, per_sample_s=0.002),
            "mnist:6000",
            mlp,
        ),
        Scenario(
            "halved-link",
            "four machines, 400 Mbit/s, half of it after a third of the run",
            machines(
                4,
                cv=0.1,
                mbit_s=400,
                per_sample_s=0.002,
                slow_link=(SlowPeriod(from_s=10.0, factor=2.0),),
            ),
            "mnist:6000",
            mlp,
        ),
        Scenario("workers-16", "16 machines", machines(16), "mnist:6000", mlp),
        Scenario("workers-32", "32 machines", machines(32, cv=0.3), "mnist:6000", fashion),
        Scenario("small-data", "eight machines, 1,000 images", machines(8), "mnist:1000", mlp),
        Scenario(
            "large-batch",
            "eight machines, batch 512",
            machines(8),
            "mnist:6000",
            {**mlp, "batch": 512, "epochs": 8},
        ),
        Scenario(
            "nesterov",
            "eight machines, Nesterov momentum",
            machines(8),
            "mnist:3000",
            {**small, "optimizer": "sgd(momentum=0.9, nesterov=true)"},
        ),
        Scenario(
            "momentum-95",
            "eight machines, momentum 0.95",
            machines(8),
            "mnist:3000",
            {**small, "optimizer": "sgd(momentum=0.95)"},
        ),
        Scenario(
            "momentum-0",
            "eight machines, no momentum, rate 0.2",
            machines(8),
            "mnist:6000",
            {**mlp, "optimizer": "sgd", "lr": 0.2},
        ),
        Scenario(
            "adam-16",
            "16 machines, Adam at rate 0.002",
            machines(16),
            "mnist:3000",
            {**small, "optimizer": "adam", "lr": 0.002},
        ),
        Scenario(
            "adamw-8",
            "eight machines, AdamW at rate 0.004",
            machines(8),
            "fashion-mnist:6000",
            {**fashion, "optimizer": "adamw", "lr": 0.004},
        ),
        Scenario(
            "transformer",
            "four machines, character transformer, AdamW",
            machines(4, cv=0.2),
            "tinyshakespeare:600",
            {"model": "char-transformer", "epochs": 3, "batch": 24, "optimizer": "adamw", **decay},
        ),
        Scenario(
            "resnet",
            "six machines, BatchNorm",
            machines(6, cv=0.3),
            "mnist/2:1500",
            {"model": "resnet8", "epochs": 6, "batch": 96, "lr": 0.15, **decay},
        ),
        Scenario(
            "late-drop",
            "eight machines, the rate drops after 60% of the run",
            machines(8, cv=0.3),
            "fashion-mnist:6000",
            {**fashion, "epochs": 5, "schedule": "milestones(3)"},
        ),
        Scenario(
            "cosine",
            "eight machines, cosine schedule with warm-up, weight decay",
            machines(8),
            "fashion-mnist:3000",
            {
                **small,
                "optimizer": "sgd(momentum=0.9, weight_decay=0.0005)",
                "schedule": "cosine(warmup=10%)",
            },
        ),
        Scenario(
            "limit-cnn",
            "eight machines, rate 0.2 near the limit of stability",
            eight,
            "mnist:1500",
            {**cnn, "lr": 0.2, "schedule": "constant"},
            near_limit=True,
        ),
        Scenario(
            "limit-mlp",
            "eight machines, rate 0.2 near the limit of stability",
            eight,
            "mnist:2000",
            {"model": "mlp-128", "epochs": 8, "batch": 64, "lr": 0.2, "schedule": "constant"},
            near_limit=True,
        ),
        Scenario(
            "limit-fashion",
            "eight machines, rate 0.2 near the limit of stability",
            machines(8, cv=0.3),
            "fashion-mnist:6000",
            {**fashion, "epochs": 4, "lr": 0.2, "schedule": "constant"},
            near_limit=True,
        ),
        Scenario(
            "held-jitter-12",
            "12 machines, exponential jitter, Nesterov momentum",
            machines(12, cv=0.3, shape="exponential"),
            "mnist:6000",
            {**mlp, "optimizer": "sgd(momentum=0.9, nesterov=true)"},
            held_out=True,
        ),
        Scenario(
            "held-half-6",
            "six machines, one of half the speed, AdamW",
            machines(6, cv=0.15, slow={0: 2}),
            "fashion-mnist:6000",
            {**fashion, "optimizer": "adamw", "lr": 0.002},
            held_out=True,
        ),
        Scenario(
            "held-200-mbit",
            "five machines, 200 Mbit/s and 5 ms",
            machines(5, cv=0.1, mbit_s=200, latency_ms=5, per_sample_s=0.003),
            "kmnist:6000",
            {**mlp, "batch": 100},
            held_out=True,
        ),
        Scenario(
            "held-late-straggler",
            "six machines, one 5 times slower after half of the run",
            machines(6, periods={4: (32.0, 1000.0, 5.0)}),
            "fashion-mnist:6000",
            fashion,
            held_out=True,
        ),
        Scenario(
            "held-batch-256",
            "six machines, batch 256",
            machines(6, cv=0.25, slow={5: 1.5}),
            "kmnist:3000",
            {**small, "batch": 256, "epochs": 8},
            held_out=True,
        ),
        Scenario(
            "held-50-mbit",
            "three machines, 50 Mbit/s and 10 ms, Adam",
            machines(3, cv=0.15, mbit_s=50, latency_ms=10, per_sample_s=0.004),
            "fashion-mnist:6000",
            {**fashion, "optimizer": "adam", "lr": 0.002},
            held_out=True,
        ),
        Scenario(
            "held-two-slow",
            "ten machines, two 2.5 times slower, Nesterov momentum",
            machines(10, cv=0.2, slow={1: 2.5, 6: 2.5}),
            "kmnist:6000",
            {**fashion, "optimizer": "sgd(momentum=0.9, nesterov=true)", "lr": 0.08},
            held_out=True,
        ),
        Scenario(
            "held-rmsprop",
            "five machines of speeds 1, 1, 2, 2 and 2, RMSprop",
            machines(5, cv=0.1, slow={0: 2, 1: 2}),
            "mnist:6000",
            {**mlp, "optimizer": "rmsprop", "lr": 0.001},
            held_out=True,
        ),
        Scenario(
            "held-recovers",
            "four machines, one 6 times slower in the first half, a link that slows down later",
            machines(
                4,
                cv=0.1,
                mbit_s=400,
                per_sample_s=0.004,
                periods={0: (0.0, 30.0, 6.0)},
                slow_link=(SlowPeriod(from_s=40.0, factor=3.0),),
            ),
            "mnist:6000",
            {**mlp, "epochs": 8},
            held_out=True,
        ),
    ]


@dataclass(frozen=True)
class RealScenario:
    """A job on local processes, which sleep to compute as slowly as machines of other speeds.

    With two cores, the processes of a scenario may use two cores together: each gets a fraction.
    """

    name: str
    description: str
    factors: tuple[float, ...]
    """Slowdown of each worker."""
    periods: dict[int, tuple[float, float, float]] = field(default_factory=dict)
    """Further slowdowns of single workers: first and last epoch (fractions allowed), factor."""
    data: str = "fashion-mnist:9000"
    job: dict[str, Any] = field(
        default_factory=lambda: {
            "model": "cnn-small",
            "epochs": 3,
            "batch": 128,
            "lr": 0.05,
            "schedule": "cosine",
        }
    )


def real_scenarios() -> list[RealScenario]:
    return [
        RealScenario("real-calm", "two equal workers", (1.0, 1.0)),
        RealScenario("real-slow-3x", "four workers, one 3 times slower", (9.0, 3.0, 3.0, 3.0)),
        RealScenario("real-1-3-9", "three workers of speeds 1, 3 and 9", (18.0, 6.0, 2.0)),
        RealScenario(
            "real-straggler",
            "four workers, one 3 times slower in the second of three epochs",
            (3.0, 3.0, 3.0, 3.0),
            {0: (1.0, 2.0, 3.0)},
        ),
    ]


def make_job(scenario: Scenario | RealScenario, seed: int, data_dir: Path | None) -> Job:
    # Not a lambda: worker processes import it.
    splits = partial(load_splits, scenario.data, data_dir)
    return Job(**{"checkpoint_every": "never", **scenario.job}, data=splits, seed=seed)
