"""Cost of groups: an all-reduce inside each group, push and pull between groups."""

from paceline.plan.facet import CostFacet, StepEstimate
from paceline.plan.pool_arrays import Ints, PoolArrays
from paceline.plan.push_pull import PushPullCost, push_pull_step
from paceline.strategies.grouped.spec import Grouped


class GroupedCost(CostFacet[Grouped]):
    def step(self, arrays: PoolArrays, hosts: Ints, spec: Grouped) -> StepEstimate:
        count = len(hosts)
        groups = spec.worker_groups(count, tuple(1 / arrays.per_sample[hosts]))
        nbytes = float(arrays.work.bytes)
        return push_pull_step(
            arrays,
            hosts,
            PushPullCost(
                push_bytes=nbytes,
                pull_bytes=nbytes,
                servers=spec.servers_for(count),
                groups=groups,
                staleness=float(len(groups) - 1),
            ),
        )
