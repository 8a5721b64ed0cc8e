"""Fits the published five-machine cluster to two rows of its tables and predicts the others.

    python bench/published_clusters.py            print the table
    python bench/published_clusters.py --write    and write the cluster files

The numbers are those of a published study of TensorFlow's MultiWorkerMirrored and ParameterServer
strategies and of a switch between them, on five CPU machines.

Two unknowns are fitted: the time per sample and the variation of steps. All-reduce waits for the
slowest machine and is affected by the variation; asynchronous servers are not. Everything else
comes from the pool.
"""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

from paceline.cluster.pool import Host, Jitter, Pool, StepCost
from paceline.plan.cost_model import Workload
from paceline.protocol.run_spec import RunSpec
from paceline.strategies.registry import parse_strategy
from paceline.twin.simulator import Simulator
from paceline.twin.updates import WeightsBackend

CLUSTERS = Path(__file__).parents[1] / "src" / "paceline" / "cluster" / "examples"
ROUNDS = 12
TOLERANCE = 2e-4
EPOCHS = 8
"""Played; the published runs are as many times longer as they have more epochs."""

ROWS = {
    "allreduce": "allreduce",
    "ps": "ps",
    "switch 25%": "switch(allreduce, ps, at=25%)",
    "switch 50%": "switch(allreduce, ps, at=50%)",
    "switch 75%": "switch(allreduce, ps, at=75%)",
}


@dataclasses.dataclass(frozen=True)
class Published:
    file: str
    title: str
    samples: int
    parameters: int
    epochs: int
    seconds: dict[str, int]


STUDIES = (
    Published(
        "published-five",
        "ResNet, CIFAR-10",
        50_000,
        850_000,
        180,
        dict(zip(ROWS, (27505, 23784, 24164, 25025, 26341), strict=True)),
    ),
    Published(
        "published-five-densenet",
        "DenseNet, Fashion-MNIST",
        60_000,
        176_000,
        40,
        dict(zip(ROWS, (7170, 5608, 6133, 6268, 6783), strict=True)),
    ),
)


def simulated_seconds(pool: Pool, work: Workload, strategy: str) -> float:
    """Returns the virtual seconds of a run, simulating time only."""
    plan = RunSpec(strategy=parse_strategy(strategy), workers=len(pool.slots))
    simulator = Simulator(plan, pool, work, WeightsBackend())
    simulator.run()
    return simulator.timeline.now


def fit_pool(pool: Pool, work: Workload, *, allreduce_s: float, servers_s: float) -> Pool:
    """Returns the pool fitted so that both strategies take the given seconds."""
    steps = work.epochs * work.samples / work.batch
    per_sample = allreduce_s / steps / (work.batch / len(pool.slots))
    cv = 0.1
    for _ in range(ROUNDS):
        tried = with_step_time(pool, per_sample, cv)
        sync, free = (simulated_seconds(tried, work, s) for s in ("allreduce", "ps"))
        if abs(sync / allreduce_s - 1) < TOLERANCE and abs(free / servers_s - 1) < TOLERANCE:
            return tried
        # Servers are hardly affected by the variation and give the mean; the rest is waiting.
        per_sample *= servers_s / free
        cv = min(1.0, max(0.0, cv + (allreduce_s / sync - servers_s / free)))
    return with_step_time(pool, per_sample, cv)


def with_step_time(pool: Pool, per_sample_s: float, cv: float) -> Pool:
    hosts = []
    for host in pool.hosts:
        known = host.measured["any"]
        cost = StepCost(**{**known.model_dump(), "per_sample_s": per_sample_s})
        hosts.append(host.model_copy(update={"measured": {"any": cost}}))
    jitter = Jitter(shape=pool.jitter.shape, cv=cv)
    return pool.model_copy(update={"hosts": tuple(hosts), "jitter": jitter})


def published_cluster(name: str, gradient_mb: float) -> Pool:
    """Returns the published cluster as described: five machines with eight cores."""
    cost = StepCost(per_sample_s=1.0, gradient_mb=gradient_mb)
    hosts = tuple(
        Host(host=letter, cores=8, memory_gb=16, measured={"any": cost}) for letter in "abcde"
    )
    return Pool(name=name, hosts=hosts)


def main() -> None:
    print("| workload | strategy | published s | twin s | difference | |")
    print("|---|---|---:|---:|---:|---|")
    for study in STUDIES:
        work = Workload(
            model="published",
            data="published",
            shapes=((study.parameters,),),
            item_bytes=4,
            flops_per_sample=1.0,
            samples=study.samples,
            batch=128,
            epochs=EPOCHS,
            evaluated={},
            slots=1,
        )
        share = EPOCHS / study.epochs
        pool = fit_pool(
            published_cluster(study.file, study.parameters * 4 / 1e6),
            work,
            allreduce_s=study.seconds["allreduce"] * share,
            servers_s=study.seconds["ps"] * share,
        )
        for row, strategy in ROWS.items():
            played = simulated_seconds(pool, work, strategy) / share
            known = study.seconds[row]
            role = "fitted" if row in ("allreduce", "ps") else "predicted"
            print(
                f"| {study.title} | {row} | {known:,} | {played:,.0f} "
                f"| {100 * (played / known - 1):+.1f}% | {role} |"
            )
        if "--write" in sys.argv[1:]:
            note = f"Fitted to a published {study.title} run of {study.epochs} epochs"
            text = pool.model_copy(update={"note": note}).to_yaml()
            (CLUSTERS / f"{study.file}.yaml").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
