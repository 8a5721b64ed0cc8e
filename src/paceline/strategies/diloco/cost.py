"""Cost of DiLoCo: local steps with an outer optimizer step at each average."""

from __future__ import annotations

from paceline.plan.facet import CostFacet, StepEstimate
from paceline.plan.pool_arrays import Ints, PoolArrays
from paceline.strategies.diloco.spec import DiLoCo
from paceline.strategies.local_steps_cost import local_steps_step


class DiLoCoCost(CostFacet[DiLoCo]):
    def step(self, arrays: PoolArrays, hosts: Ints, spec: DiLoCo) -> StepEstimate:
        return local_steps_step(arrays, hosts, spec.steps_between_syncs)


COST = DiLoCoCost()
