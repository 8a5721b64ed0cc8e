"""Cost of auto: its best candidate, after a first window with a synchronous one."""

import numpy as np

from paceline.plan.facet import CostFacet, StepEstimate
from paceline.plan.pool_arrays import Ints, PoolArrays
from paceline.specs.measurement_window import WINDOW_BATCHES, WINDOW_S
from paceline.strategies.auto.spec import Auto
from paceline.strategies.registry import cost


class AutoCost(CostFacet[Auto]):
    def step(self, arrays: PoolArrays, hosts: Ints, spec: Auto) -> StepEstimate:
        work, count = arrays.work, len(hosts)
        found: list[tuple[StepEstimate, bool]] = [
            (cost(part).step(arrays, hosts, part), part.lag_bound(count) == 0.0)
            for part in spec.usable(count).values()
        ]
        best = min((e for e, _ in found), key=_seconds)
        first = min((e for e, waits in found if waits), key=_seconds, default=best)
        steps = max(1.0, work.samples * work.epochs / work.batch)
        window = max(float(WINDOW_BATCHES), WINDOW_S / first.step_s)
        before = min(1.0, window / steps) if first is not best else 0.0
        return StepEstimate(
            step_s=before * first.step_s + (1 - before) * best.step_s,
            busy=np.average([first.busy, best.busy], axis=0, weights=[before, 1 - before]),
            staleness=(1 - before) * best.staleness,
            doubt=max(first.doubt, best.doubt),
            efficiency=before * first.efficiency + (1 - before) * best.efficiency,
        )

    def fits(self, arrays: PoolArrays, hosts: Ints, spec: Auto) -> bool:
        return all(cost(part).fits(arrays, hosts, part) for part in spec.phases)


def _seconds(estimate: StepEstimate) -> float:
    """Seconds per global batch of synchronous progress."""
    return estimate.step_s / estimate.efficiency
