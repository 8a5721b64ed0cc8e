"""Time, energy and price of training on given hosts with one strategy."""

from dataclasses import dataclass

import numpy as np

from paceline.plan.cost_model import FORWARD_FRACTION
from paceline.plan.facet import StepEstimate
from paceline.plan.pool_arrays import Ints, PoolArrays
from paceline.specs.strategy import Strategy
from paceline.strategies.registry import BASELINE, cost

MEASURED_DOUBT = 0.10
"""Relative error of a prediction from measured step times: machines drift between probes."""
UNMEASURED_DOUBT = 0.35
"""The same where step times come from floating-point rates."""


@dataclass(frozen=True)
class Estimate:
    """Predicted cost of a strategy on a set of hosts."""

    strategy: str
    machines: tuple[int, ...]
    """Indices into the pool."""
    step_s: float
    """Seconds per global batch, or the same number of samples."""
    samples_per_s: float
    seconds: float
    seconds_interval: tuple[float, float]
    """90% interval of `seconds`."""
    joules: float
    price: float
    staleness: float

    def value(self, objective: str) -> float:
        return {"time": self.seconds, "energy": self.joules, "cost": self.price}[objective]


def correction_key(strategy: Strategy, machines: int) -> str:
    """Returns the key of runs that share a correction: their strategy, or one key on one host."""
    return strategy.name if machines > 1 else BASELINE


def estimate(arrays: PoolArrays, hosts: Ints, strategy: Strategy) -> Estimate:
    """Estimates a run with one worker per host.

    Raises UsageError if the strategy, or a phase of it, has no cost facet.
    """
    work = arrays.work
    step: StepEstimate = cost(strategy).step(arrays, hosts, strategy)
    step_s = step.step_s
    correction = arrays.corrections.get(correction_key(strategy, len(hosts)))
    if correction is not None:
        step_s *= correction.factor
    rate = work.batch / step_s
    evaluated = work.evaluated.get("val", 0) * work.epochs + work.evaluated.get("test", 0)
    slowest = float(arrays.per_sample[hosts].max())
    evaluation_s = FORWARD_FRACTION * evaluated / len(hosts) * slowest
    seconds = work.samples * work.epochs / rate + evaluation_s
    busy_fraction = np.clip(step.busy / step_s, 0.0, 1.0)
    watts = arrays.idle_w[hosts] + busy_fraction * (arrays.busy_w[hosts] - arrays.idle_w[hosts])
    chosen = [arrays.hosts[int(i)] for i in hosts]
    measured = all("any" in h.measured or work.model in h.measured for h in chosen)
    doubt = MEASURED_DOUBT if measured else UNMEASURED_DOUBT
    if correction is not None and correction.relative_error is not None:
        doubt = correction.relative_error
    doubt = min(1.0, doubt + step.doubt)
    return Estimate(
        strategy=str(strategy),
        machines=tuple(int(i) for i in hosts),
        step_s=step_s,
        samples_per_s=rate,
        seconds=seconds,
        seconds_interval=(seconds * (1 - doubt), seconds * (1 + doubt)),
        joules=float(watts.sum()) * seconds,
        price=float(arrays.price[hosts].sum()) * seconds / 3600,
        staleness=step.staleness,
    )
