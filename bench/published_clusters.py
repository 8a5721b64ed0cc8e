"""Fits published clusters of five and nine machines to two rows of their tables, predicts the rest.

    python bench/published_clusters.py            print the tables
    python bench/published_clusters.py --write    and write the cluster files

The five machines compared TensorFlow's MultiWorkerMirrored and ParameterServer strategies and a
switch between them. Two unknowns are fitted: the time per sample and the variation of steps.
All-reduce waits for the slowest machine and is affected by the variation; asynchronous servers are
not. The baseline for the switch rows needs no simulation: a straight line between the two fitted
rows.

The nine machines trained perceptrons with all-reduce (nine workers) and with parameter servers (six
workers, two machines that only serve). A step's fixed time and its time per sample are fitted to
the all-reduce rows at two batches; the rows with servers are predictions. Everything else comes
from the pool.
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

SERVERS_ONLY = 2
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


@dataclasses.dataclass(frozen=True)
class PublishedPerceptron:
    """Seconds of 25 epochs by batch per worker: nine all-reduce workers, and six with servers."""

    model: str
    title: str
    parameters: int
    allreduce: dict[int, float]
    ps: dict[int, float]


PERCEPTRONS = (
    PublishedPerceptron(
        "mlp-300-100",
        "MNIST, 784-300-100-10",
        266_610,
        {128: 144.703, 256: 85.640},
        {128: 173.895, 256: 107.155},
    ),
    PublishedPerceptron(
        "mlp-128",
        "KMNIST, 784-128-10",
        101_770,
        {128: 145.943, 256: 75.110},
        {128: 125.570, 256: 82.683},
    ),
)


def nine_machines(costs: dict[str, StepCost]) -> Pool:
    """Returns the published cluster as described: `m0` is the chief, `m7` and `m8` the servers."""
    hosts = tuple(Host(host=f"m{n}", cores=4, memory_gb=4, measured=costs) for n in range(9))
    return Pool(name="published-nine", hosts=hosts)


def perceptron_seconds(study: PublishedPerceptron, cost: StepCost, strategy: str, b: int) -> float:
    """Returns the virtual seconds of 25 epochs with a batch of `b` per worker."""
    pool = nine_machines({study.model: cost})
    servers = pool.hosts[-SERVERS_ONLY:] if strategy != "allreduce" else ()
    workers = pool.hosts[1:7] if servers else pool.hosts
    pool = pool.model_copy(update={"hosts": workers})
    work = Workload(
        model=study.model,
        data="published",
        shapes=((study.parameters,),),
        item_bytes=4,
        flops_per_sample=1.0,
        samples=54_000,
        batch=b * len(workers),
        epochs=25,
        evaluated={},
        slots=1,
    )
    plan = RunSpec(strategy=parse_strategy(strategy), workers=len(workers))
    simulator = Simulator(plan, pool, work, WeightsBackend(), servers_on=servers)
    simulator.run()
    return simulator.timeline.now


def fit_perceptron(study: PublishedPerceptron) -> StepCost:
    """Returns the step cost with which all-reduce takes the published seconds at both batches."""
    (small, small_s), (large, large_s) = study.allreduce.items()
    steps = {b: s / (25 * 54_000 / (9 * b)) for b, s in study.allreduce.items()}
    for _ in range(ROUNDS):
        per_sample = max(1e-7, (steps[large] - steps[small]) / (large - small))
        fixed_s = max(0.0, steps[small] - per_sample * small)
        cost = StepCost(fixed_s=fixed_s, per_sample_s=per_sample)
        for b, seconds in ((small, small_s), (large, large_s)):
            steps[b] *= seconds / perceptron_seconds(study, cost, "allreduce", b)
    return cost


def main() -> None:
    five_machines()
    costs = {}
    print("\n| workload | strategy | batch | published s | twin s | difference | |")
    print("|---|---|---:|---:|---:|---:|---|")
    for study in PERCEPTRONS:
        cost = costs[study.model] = fit_perceptron(study)
        for strategy, rows in (("allreduce", study.allreduce), ("ps(servers=2)", study.ps)):
            for b, known in rows.items():
                played = perceptron_seconds(study, cost, strategy, b)
                role = "fitted" if strategy == "allreduce" else "predicted"
                print(
                    f"| {study.title} | {strategy} | {b} | {known:.1f} | {played:.1f} "
                    f"| {100 * (played / known - 1):+.1f}% | {role} |"
                )
    if "--write" in sys.argv[1:]:
        note = (
            "Nine published machines: m0 is the chief, m7 and m8 the servers; fitted to all-reduce "
            "of 25 epochs of MNIST (mlp-300-100) and KMNIST (mlp-128)"
        )
        text = nine_machines(costs).model_copy(update={"note": note}).to_yaml()
        (CLUSTERS / "published-nine.yaml").write_text(text, encoding="utf-8")


def five_machines() -> None:
    print("| workload | strategy | published s | twin s | difference | straight line | |")
    print("|---|---|---:|---:|---:|---:|---|")
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
            is_fitted = row in ("allreduce", "ps")
            line = "" if is_fitted else f"{100 * (straight_line(study, row) / known - 1):+.1f}%"
            print(
                f"| {study.title} | {row} | {known:,} | {played:,.0f} "
                f"| {100 * (played / known - 1):+.1f}% | {line} "
                f"| {'fitted' if is_fitted else 'predicted'} |"
            )
        if "--write" in sys.argv[1:]:
            note = f"Fitted to a published {study.title} run of {study.epochs} epochs"
            text = pool.model_copy(update={"note": note}).to_yaml()
            (CLUSTERS / f"{study.file}.yaml").write_text(text, encoding="utf-8")


def straight_line(study: Published, row: str) -> float:
    """Returns ps + share x (allreduce - ps), the seconds without any model of the machines."""
    share = float(row.split()[1].rstrip("%")) / 100
    ps_s = study.seconds["ps"]
    return ps_s + share * (study.seconds["allreduce"] - ps_s)


if __name__ == "__main__":
    main()
