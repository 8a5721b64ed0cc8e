"""Cost of strategies whose workers take several local steps between two averages."""

from __future__ import annotations

import math

from paceline.plan.facet import StepEstimate
from paceline.plan.lockstep import all_reduce_s, compute_s, even_shares, slowest_s, update_s
from paceline.plan.pool_arrays import Ints, PoolArrays


def local_steps_step(arrays: PoolArrays, hosts: Ints, steps_between_syncs: int) -> StepEstimate:
    """Slowest worker plus the exchange, whose cost is spread over the local steps.

    Variation between steps averages out over `steps_between_syncs` of them.
    """
    compute = compute_s(arrays, hosts, even_shares(arrays, hosts))
    update = update_s(arrays, hosts)
    if len(hosts) == 1:
        return StepEstimate(float(compute[0]) + update, compute)
    slowest = slowest_s(compute, arrays.cv[hosts] / math.sqrt(steps_between_syncs))
    exchange = all_reduce_s(arrays, hosts, float(arrays.work.bytes))
    return StepEstimate(slowest + update + exchange / steps_between_syncs, compute)
