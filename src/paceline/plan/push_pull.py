"""Step time of strategies in which workers push gradients to servers and pull weights."""

from dataclasses import dataclass

import numpy as np

from paceline.plan.facet import StepEstimate
from paceline.plan.lockstep import all_reduce_s, slowest_s
from paceline.plan.pool_arrays import Ints, PoolArrays


@dataclass(frozen=True, kw_only=True)
class PushPullCost:
    """Exchanges of a push/pull strategy, and whether its workers wait for each other."""

    push_bytes: float
    pull_bytes: float
    servers: int
    group_size: int = 1
    """Workers that sum their gradients before one of them pushes."""
    in_rounds: bool = False
    """All workers wait for the slowest one before the next pull."""
    staleness: float
    efficiency: float = 1.0


def push_pull_step(arrays: PoolArrays, hosts: Ints, cost: PushPullCost) -> StepEstimate:
    """Each worker advances at its own pace, unless servers, links or coordinator are saturated."""
    pool, work, count = arrays.pool, arrays.work, len(hosts)
    push, pull, size = cost.push_bytes, cost.pull_bytes, cost.group_size
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
    if size > 1:
        cycle = cycle + all_reduce_s(arrays, hosts[:size], work.bytes) * 1.5
        cycle = np.full(count, slowest_s(cycle, arrays.cv[hosts]))
    rate = float((share / cycle).sum())
    if cost.in_rounds:
        # All pulls of a round arrive at the servers at the same time.
        slowest = slowest_s(cycle, arrays.cv[hosts]) + (count - 1) * max(push, pull) / lane
        rate = work.batch / slowest
    max_pushes_per_s = min(lane / max(push, pull, 1.0), 1 / max(apply_s, 1e-12))
    if pool.control_ms:
        max_pushes_per_s = min(max_pushes_per_s, 1e3 / pool.control_ms / size)
    rate = min(rate, max_pushes_per_s * share * size)
    step_s = work.batch / rate
    busy = (
        compute * (step_s / cycle) * np.minimum(1.0, rate / max(rate, float((share / cycle).sum())))
    )
    return StepEstimate(step_s, busy, cost.staleness, efficiency=cost.efficiency)
