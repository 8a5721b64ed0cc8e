"""Cost of a switch: its phases, weighted by the samples trained under each."""

from itertools import pairwise

import numpy as np

from paceline.plan.facet import CostFacet, StepEstimate
from paceline.plan.pool_arrays import Ints, PoolArrays
from paceline.strategies.registry import cost
from paceline.strategies.switch.spec import Switch


def phase_fractions(spec: Switch, samples_per_epoch: int, epochs: int) -> tuple[float, ...] | None:
    """Fraction of the samples trained in each phase; None if a trigger decides during the run."""
    if spec.when is not None:
        return None
    total = samples_per_epoch * epochs
    points = [min(p.resolve(samples_per_epoch, epochs), total) for p in spec.at]
    return tuple((stop - start) / total for start, stop in pairwise([0, *points, total]))


class SwitchCost(CostFacet[Switch]):
    """With a trigger the switch point is unknown: phases count equally, and `doubt` says so."""

    def step(self, arrays: PoolArrays, hosts: Ints, spec: Switch) -> StepEstimate:
        work = arrays.work
        phases = [cost(phase).step(arrays, hosts, phase) for phase in spec.phases]
        fractions = phase_fractions(spec, work.samples, work.epochs)
        doubt = max(phase.doubt for phase in phases)
        if fractions is None:
            fractions = (1 / len(phases),) * len(phases)
            steps = [phase.step_s for phase in phases]
            doubt = max(doubt, (max(steps) - min(steps)) / sum(steps))
        weighted = list(zip(fractions, phases, strict=True))
        return StepEstimate(
            step_s=sum(f * p.step_s for f, p in weighted),
            busy=np.sum([f * p.busy for f, p in weighted], axis=0),
            staleness=sum(f * p.staleness for f, p in weighted),
            doubt=doubt,
            efficiency=sum(f * p.efficiency for f, p in weighted),
        )

    def fits(self, arrays: PoolArrays, hosts: Ints, spec: Switch) -> bool:
        return all(cost(phase).fits(arrays, hosts, phase) for phase in spec.phases)
