"""Cost of the parameter server."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from paceline.plan.cost_model import encoded_bytes
from paceline.plan.facet import CostFacet, RecordedStep, StepEstimate
from paceline.plan.pool_arrays import Ints, PoolArrays
from paceline.plan.push_pull import PushPullCost, push_pull_step
from paceline.strategies.ps.spec import ParameterServer


class ParameterServerCost(CostFacet[ParameterServer]):
    def step(self, arrays: PoolArrays, hosts: Ints, spec: ParameterServer) -> StepEstimate:
        count = len(hosts)
        staleness = spec.sync.expected_staleness(count)
        return push_pull_step(
            arrays,
            hosts,
            PushPullCost(
                push_bytes=encoded_bytes(spec.codec, arrays.work),
                pull_bytes=float(arrays.work.bytes),
                servers=spec.servers_for(count),
                in_rounds=staleness == 0,
                staleness=staleness,
            ),
        )

    def calibrate(
        self, spec: ParameterServer, steps: Sequence[Sequence[RecordedStep]], nbytes: float
    ) -> dict[str, float]:
        exchange_s = statistics.median(s.comm_s for worker in steps for s in worker)
        return {"transfer_gb_s": 2 * nbytes / max(1e-9, exchange_s) / 1e9}


COST = ParameterServerCost()
