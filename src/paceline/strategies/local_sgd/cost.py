"""Cost of local SGD."""

from __future__ import annotations

from paceline.plan.facet import CostFacet, StepEstimate
from paceline.plan.pool_arrays import Ints, PoolArrays
from paceline.strategies.local_sgd.spec import LocalSgd
from paceline.strategies.local_steps_cost import local_steps_step


class LocalSgdCost(CostFacet[LocalSgd]):
    def step(self, arrays: PoolArrays, hosts: Ints, spec: LocalSgd) -> StepEstimate:
        return local_steps_step(arrays, hosts, spec.steps_between_syncs)


COST = LocalSgdCost()
