"""Step time of strategies in which workers push gradients to servers and pull weights."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from paceline.plan.facet import StepEstimate
from paceline.plan.lockstep import all_reduce_s, slowest_s
from paceline.plan.pool_arrays import Ints, PoolArrays
from paceline.specs.strategy import WorkerGroups


@dataclass(frozen=True, kw_only=True)
class PushPullCost:
    """Exchanges of a push/pull strategy, and whether its workers wait for each other."""

    push_bytes: float
    pull_bytes: float
    servers: int
    groups: WorkerGroups = ()
    """Workers that sum their gradients before one of them pushes; empty if each pushes its own."""
    in_rounds: bool = False
    """All workers wait for the slowest one before the next pull."""
    staleness: float
    efficiency: float = 1.0


def push_pull_step(arrays: PoolArrays, hosts: Ints, cost: PushPullCost) -> StepEstimate:
    """Each worker advances at its own pace, unless servers, links or coordinator are saturated."""
    pool, work, count = arrays.pool, arrays.work, len(hosts)
    push, pull, size = cost.push_bytes, cost.pull_bytes, count / (len(cost.groups) or count)
    share = work.batch / count
    servers = min(cost.servers, count)
    best = np.sort(arrays.bandwidth[hosts])[::-1][:servers]
    lane = float(best.min()) * servers
    compute = arrays.fixed[hosts] + share * arrays.per_sample[hosts]
    endpoint = (push + pull) / (pool.transfer_gb_s * 1e9)
    wire = (push + pull) / np.minimum(arrays.bandwidth[hosts], lane)
    apply_s = float(arrays.update[hosts].min()) / servers + push / servers / (
        pool.transfer_gb_s * 1e9
    )
    trips = 4 * arrays.latency[hosts] + pool.control_ms / 1e3
    cycle = compute + endpoint + wire + apply_s + trips
    for group in map(list, cost.groups):
        members = hosts[group]
        # The members wait for each other only; the sum and the weights are passed on.
        cycle[group] = slowest_s(cycle[group], arrays.cv[members])
        cycle[group] += all_reduce_s(arrays, members, work.bytes) * 1.5
    rate = float((share / cycle).sum())
    if cost.in_rounds:
        # All pulls of a round arrive at the servers at the same time.
        slowest = slowest_s(cycle, arrays.cv[hosts]) + (count - 1) * max(push, pull) / lane
        rate = work.batch / slowest
    stations = [push / lane, pull / lane, apply_s, pool.control_ms / 1e3 * size]
    mean_cycle = count / float((1 / cycle).sum())
    pushes = queued_rate(mean_cycle, stations, max(1, round(count / size)))
    rate = min(rate, pushes * share * size)
    step_s = work.batch / rate
    busy = (
        compute * (step_s / cycle) * np.minimum(1.0, rate / max(rate, float((share / cycle).sum())))
    )
    return StepEstimate(step_s, busy, cost.staleness, efficiency=cost.efficiency)


def queued_rate(cycle_s: float, stations: Sequence[float], customers: int) -> float:
    """Returns pushes per second of workers that queue for servers, links and coordinator.

    Mean value analysis of a closed queueing network (Reiser and Lavenberg, 1980) with constant
    service times: who arrives finds what is queued with one worker less, and of the one in service
    half is left. `cycle_s` is the cycle of a worker that never queues.
    """
    think_s = max(0.0, cycle_s - sum(stations))
    queues, busy = [0.0] * len(stations), [0.0] * len(stations)
    rate = 0.0
    for number in range(1, customers + 1):
        stays = [
            s * (1 + queue - used / 2)
            for s, queue, used in zip(stations, queues, busy, strict=True)
        ]
        rate = number / (think_s + sum(stays))
        rate = min(rate, 1 / max(max(stations), 1e-12))
        queues = [rate * stay for stay in stays]
        busy = [rate * s for s in stations]
    return rate
