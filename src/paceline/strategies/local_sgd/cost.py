"""Cost of strategies whose workers take several local steps between two averages."""

import math

from paceline.plan.facet import CostFacet, StepEstimate
from paceline.plan.lockstep import all_reduce_s, compute_s, even_shares, slowest_s, update_s
from paceline.plan.pool_arrays import Ints, PoolArrays
from paceline.specs.strategy import LocalSteps


class LocalStepsCost(CostFacet[LocalSteps]):
    """Slowest worker plus the exchange, whose cost is spread over the local steps.

    Variation between steps averages out over the steps between two synchronizations.
    """

    def step(self, arrays: PoolArrays, hosts: Ints, spec: LocalSteps) -> StepEstimate:
        compute = compute_s(arrays, hosts, even_shares(arrays, hosts))
        update = update_s(arrays, hosts)
        if len(hosts) == 1:
            return StepEstimate(float(compute[0]) + update, compute)
        steps = spec.steps_between_syncs
        slowest = slowest_s(compute, arrays.cv[hosts] / math.sqrt(steps))
        exchange = all_reduce_s(arrays, hosts, float(arrays.work.bytes))
        return StepEstimate(
            slowest + update + exchange / steps, compute, efficiency=spec.efficiency(len(hosts))
        )
