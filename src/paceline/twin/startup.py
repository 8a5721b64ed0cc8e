"""Reports of simulated workers that are ready, with what real ones measure before training."""

from __future__ import annotations

from paceline.cluster.pool import Pool
from paceline.plan.cost_model import Workload, allreduce_s
from paceline.protocol.exchange_probe import ExchangeProbe
from paceline.protocol.messages import WorkerReady
from paceline.protocol.run_spec import RunSpec
from paceline.twin.machines import SimulatedMachines
from paceline.worker.probes import MAX_PROBE_NUMEL, PROBE_PASSES, ROUNDS, probed_samples


def first_reports(
    plan: RunSpec, pool: Pool, work: Workload, fleet: SimulatedMachines
) -> list[tuple[float, WorkerReady]]:
    """Returns each worker's report at the start of a run, and how long its probes take."""
    exchange, exchange_s = _probe_exchange(plan, pool, work, fleet)
    strategy, factors = plan.strategy, None
    share = max(1, work.batch // plan.workers)
    if strategy.needs_exchange_probe and strategy.needs_worker_speeds:
        factors = fleet.draw_factors(PROBE_PASSES - 1)
    reports = []
    for worker, cost in enumerate(fleet.compute):
        cv, probe_s = 0.0, exchange_s
        if factors is not None:
            # The first pass warms up, as the first step of any other run does.
            mine = factors[:, worker]
            cv = float(mine.std(ddof=1) / mine.mean())
            probe_s += float(mine.sum()) * cost.step_s(probed_samples(share))
        speed = share / max(cost.step_s(share), 1e-12)
        reports.append((probe_s, describe_worker(work, worker, speed, cv, exchange)))
    return reports


def describe_worker(
    work: Workload,
    worker: int,
    speed: float,
    cv: float = 0.0,
    exchange: ExchangeProbe | None = None,
) -> WorkerReady:
    """Returns the report of a worker that is ready to train."""
    facts = (worker, work.samples, work.batch, work.epochs, tuple(work.evaluated), speed)
    return WorkerReady(*facts, exchange=exchange, cv=cv)


def _probe_exchange(
    plan: RunSpec, pool: Pool, work: Workload, fleet: SimulatedMachines
) -> tuple[ExchangeProbe | None, float]:
    """Returns what workers measure together before training, and how long that takes."""
    if not plan.strategy.needs_exchange_probe or plan.workers == 1:
        return None, 0.0
    hosts, nbytes = fleet.hosts, work.bytes
    latencies = [pool.link_of(host).latency_s for host in hosts]
    message_s = sum(latencies) / len(latencies)
    small_s = allreduce_s(pool, hosts, 1.0)
    probed = min(nbytes, MAX_PROBE_NUMEL * work.item_bytes)
    probed_s = allreduce_s(pool, hosts, probed)
    gradient_s = small_s + (probed_s - small_s) * nbytes / probed
    spent_s = ROUNDS * (small_s + probed_s + 2 * message_s)
    return ExchangeProbe(message_s, small_s, gradient_s, nbytes), spent_s
