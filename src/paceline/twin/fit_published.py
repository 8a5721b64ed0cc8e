"""Fits a cluster to two published values: seconds with all-reduce and with asynchronous servers.

Two unknowns are fitted: the time per sample and the variation of steps. All-reduce waits for the
slowest machine and is affected by the variation; asynchronous servers are not. Everything else
comes from the pool.
"""

from __future__ import annotations

from paceline.cluster.pool import Host, Jitter, Pool, StepCost
from paceline.plan.cost_model import Workload
from paceline.protocol.run_spec import RunSpec
from paceline.strategies.registry import parse_strategy
from paceline.twin.backend import TimeOnlyBackend
from paceline.twin.machines import SimulatedMachines
from paceline.twin.simulator import Simulator
from paceline.twin.timeline import Timeline

ROUNDS = 12
TOLERANCE = 2e-4


def simulated_seconds(pool: Pool, work: Workload, strategy: str, *, seed: int = 0) -> float:
    """Returns the virtual seconds of a run, simulating time only."""
    spec = parse_strategy(strategy)
    workers = len(pool.slots)
    timeline = Timeline()
    fleet = SimulatedMachines(
        pool, workers, work, timeline, seed=seed, servers=spec.servers_for(workers)
    )
    Simulator(
        RunSpec(strategy=spec, workers=workers), fleet, work, TimeOnlyBackend(), timeline
    ).run()
    return timeline.now


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
