"""Cost of auto: its best candidate, after a while with the best one that is safe from the start."""

import numpy as np

from paceline.plan.facet import CostFacet, StepEstimate
from paceline.plan.pool_arrays import Ints, PoolArrays
from paceline.specs.measurement_window import WINDOW_BATCHES, WINDOW_S
from paceline.specs.patience import is_safe_start, wait_samples
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
        total = work.samples * work.epochs
        safe = [e for e, waits in found if is_safe_start(e.efficiency, waits, work.batch, total)]
        first = min(safe, key=_seconds, default=best)
        steps = max(1.0, work.samples * work.epochs / work.batch)
        window = max(float(WINDOW_BATCHES), WINDOW_S / first.step_s)
        before = 0.0
        if first is not best:
            lead = first.step_s / best.step_s - 1
            waits = wait_samples(lead, work.batch, total) / work.batch
            before = min(1.0, max(window, waits) / steps)
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
