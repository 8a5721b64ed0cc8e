"""Cost of auto: that of its best candidate."""

from paceline.plan.facet import CostFacet, StepEstimate
from paceline.plan.pool_arrays import Ints, PoolArrays
from paceline.strategies.auto.spec import Auto
from paceline.strategies.registry import cost


class AutoCost(CostFacet[Auto]):
    def step(self, arrays: PoolArrays, hosts: Ints, spec: Auto) -> StepEstimate:
        estimates: list[StepEstimate] = [
            cost(part).step(arrays, hosts, part) for part in spec.usable(len(hosts)).values()
        ]
        return min(estimates, key=lambda e: e.step_s / e.efficiency)

    def fits(self, arrays: PoolArrays, hosts: Ints, spec: Auto) -> bool:
        return all(cost(part).fits(arrays, hosts, part) for part in spec.phases)
