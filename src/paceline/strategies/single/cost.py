"""Cost of training on one worker: compute and update, no communication."""

import numpy as np

from paceline.plan.facet import CostFacet, StepEstimate
from paceline.plan.lockstep import compute_s, update_s
from paceline.plan.pool_arrays import Ints, PoolArrays
from paceline.strategies.single.spec import Single


class SingleCost(CostFacet[Single]):
    """The first host computes the whole batch; any others stay idle."""

    def step(self, arrays: PoolArrays, hosts: Ints, spec: Single) -> StepEstimate:
        shares = np.zeros(len(hosts))
        shares[0] = arrays.work.batch
        busy = compute_s(arrays, hosts, shares)
        return StepEstimate(float(busy[0]) + update_s(arrays, hosts[:1]), busy)
