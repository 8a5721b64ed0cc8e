"""Goodput of candidates: samples per second times the progress that a sample makes.

The cost facets of the planner predict the throughput of every candidate on a cluster that is
described by live measurements: the speed of each worker, the part of a step that an exchange takes,
and the variation of step times. A candidate that has run is corrected by its measured throughput.
The progress per sample comes from the same facets (`StepEstimate.efficiency`), relative to
synchronous training.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from paceline.cluster.pool import Host, Link, Pool, StepCost
from paceline.plan.cost_model import FIRST_BUCKET_BYTES, Workload
from paceline.plan.facet import StepEstimate
from paceline.plan.pool_arrays import PoolArrays
from paceline.protocol.exchange_probe import ExchangeProbe
from paceline.protocol.throughput import ThroughputWindow
from paceline.specs.strategy import Strategy
from paceline.strategies.allreduce.spec import AllReduce
from paceline.strategies.registry import cost

MAX_CV = 2.0
DOUBLINGS = 20
MODEL_ERROR = 0.10
"""Nine of ten predicted step times are closer than this."""
BISECTIONS = 10
"""Enough for a thousandth of the range; a decision must not delay the coordinator."""
_INSTANT = 1e15
"""Bytes per second of what takes no time."""


class LiveCluster:
    """The workers of a run in the form of the planner, described by measurements."""

    def __init__(self, workers: int, batch: int, probe: ExchangeProbe | None = None) -> None:
        """`probe` describes the links until windows of the run do."""
        fast = _INSTANT / 1e9
        pool = Pool(
            hosts=tuple(
                Host(host=f"w{i}", measured={"any": StepCost(per_sample_s=1.0)})
                for i in range(workers)
            ),
            link=Link(latency_ms=0.0),
            collective="auto",
            collective_gb_s=fast,
            transfer_gb_s=fast,
            control_ms=0.0,
        )
        work = Workload(
            model="live",
            data="live",
            shapes=((_whole_buckets(probe.gradient_bytes if probe else 0) // 4,),),
            item_bytes=4,
            flops_per_sample=1.0,
            samples=batch,
            batch=batch,
            epochs=1,
            evaluated={},
            slots=0,
        )
        self.batch = batch
        self._arrays = PoolArrays(pool, work)
        self._hosts = np.arange(workers)
        self._probe = probe or ExchangeProbe(0.0, 0.0, 0.0, 0)
        self.set_speeds((1.0,) * workers)
        self.set_cv(0.0)
        self.set_exchange(self._probe.gradient_s - self._probe.small_s)
        self.set_latency(self._probe.message_s)

    @property
    def speeds(self) -> tuple[float, ...]:
        """Samples per second of compute time, per worker."""
        return tuple(float(1 / seconds) for seconds in self._arrays.per_sample)

    def set_speeds(self, speeds: Sequence[float]) -> None:
        self._arrays.per_sample[:] = [1 / speed for speed in speeds]

    def set_exchange(self, seconds: float) -> None:
        """Sets the seconds of one all-reduce of a gradient, without latency and waits."""
        count = len(self._hosts)
        self.exchange_s = seconds
        volume = 2 * (count - 1) / count * self._arrays.work.bytes
        self._arrays.bandwidth[:] = min(_INSTANT, volume / seconds) if seconds > 0 else _INSTANT

    def set_latency(self, seconds: float) -> None:
        """Sets the latency of a message.

        Hops of a collective cost more or less than a message, as they did in the probe.
        """
        self.latency_s = seconds
        self._arrays.latency[:] = seconds
        hop_s, count = 0.0, len(self._hosts)
        if self._probe.message_s > 0:
            hops = 2 * (count - 1)
            hop_s = (self._probe.small_s / hops / self._probe.message_s - 1) * seconds
        self._arrays.pool = self._arrays.pool.model_copy(update={"hop_ms": 1e3 * hop_s})

    def set_cv(self, cv: float) -> None:
        """Sets the standard deviation of step times, relative to their mean."""
        self.cv = cv
        self._arrays.cv[:] = cv

    def estimate(self, strategy: Strategy) -> StepEstimate:
        """Predicts one global batch under a strategy."""
        found: StepEstimate = cost(strategy).step(self._arrays, self._hosts, strategy)
        return found

    def measure(self, seen: Observation) -> bool:
        """Describes the workers by what was observed; returns False if some had no work.

        Latency and exchange are those of the probe as long as they explain the time of a step up
        to the error of the cost model: a strategy that hides or encodes its exchange says little
        about it. Otherwise they are what explains it, the exchange before the latency. If a step
        is shorter than expected, computation probably hides more of the exchange, because the
        probe counted the fastest of several: it is only as much shorter as the error requires.
        """
        if not self.set_machines(seen):
            return False
        target_s = self._explained_s(seen)

        def with_latency(latency_s: float) -> float:
            self.set_latency(latency_s)
            return self.estimate(seen.strategy).step_s

        def with_exchange(exchange_s: float) -> float:
            self.set_exchange(exchange_s)
            return self.estimate(seen.strategy).step_s

        self.set_latency(self._probe.message_s)
        expected_s = with_exchange(self._probe.gradient_s - self._probe.small_s)
        if self._probe.gradient_s:
            if abs(expected_s / target_s - 1) < MODEL_ERROR:
                return True
            if expected_s > target_s:
                target_s = min(expected_s, target_s * (1 + MODEL_ERROR))
        if with_exchange(0.0) > target_s:
            self.set_latency(_invert(with_latency, target_s))
        self.set_exchange(_invert(with_exchange, target_s))
        return True

    def set_machines(self, seen: Observation) -> bool:
        """Sets speeds and their variation; returns False if some worker had no work."""
        count, windows = len(self._hosts), seen.windows
        speeds = [sum(w.speeds[i] for w in windows) / len(windows) for i in range(count)]
        if not all(speed > 0 for speed in speeds):
            return False
        self.set_speeds(speeds)
        self.set_cv(min(MAX_CV, sum(w.cv for w in windows) / len(windows)))
        return True

    def _explained_s(self, seen: Observation) -> float:
        """Returns the seconds per global batch that exchanges explain, with these machines.

        At most computation plus the measured communication: other overhead is the same under
        every strategy. Where workers wait for each other, the one that waits least counts.
        """
        self.set_exchange(0.0)
        self.set_latency(0.0)
        alone, windows = self.estimate(seen.strategy), seen.windows
        waits = seen.strategy.lag_bound(len(self._hosts)) == 0.0
        share = sum(w.comm_share if waits else w.mean_comm_share for w in windows) / len(windows)
        busy_s = float(np.max(alone.busy))
        return min(self.batch / mean_rate(windows), alone.step_s + share * busy_s)


def _whole_buckets(nbytes: int) -> int:
    """Returns the size of a gradient without its last, partial bucket.

    Only the number of buckets matters, because the duration of an exchange is known. The partial
    one is not counted: it may hold almost nothing, so that it hides almost nothing.
    """
    each = int(AllReduce().bucket_bytes)
    return FIRST_BUCKET_BYTES + max(0, nbytes - FIRST_BUCKET_BYTES) // each * each


class Observation(NamedTuple):
    """Windows of one strategy."""

    strategy: Strategy
    windows: Sequence[ThroughputWindow]


def _invert(increasing: Callable[[float], float], target: float) -> float:
    """Returns where an increasing function reaches `target`; 0 if it is above it from the start."""
    if increasing(0.0) >= target:
        return 0.0
    high = target
    for _ in range(DOUBLINGS):
        if increasing(high) >= target:
            break
        high *= 2
    return _bisect(increasing, target, 0.0, high)


def _bisect(increasing: Callable[[float], float], target: float, low: float, high: float) -> float:
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        low, high = (middle, high) if increasing(middle) < target else (low, middle)
    return (low + high) / 2


def mean_rate(windows: Sequence[ThroughputWindow]) -> float:
    """Samples per second over these windows."""
    seconds = [w.ended - w.began for w in windows]
    return sum(w.rate * s for w, s in zip(windows, seconds, strict=True)) / sum(seconds)


@dataclass(frozen=True)
class Goodput:
    """Expected throughput of a candidate, and its progress per sample."""

    samples_per_s: float
    efficiency: float

    @property
    def value(self) -> float:
        """Samples of synchronous training that are worth as much, per second."""
        return self.samples_per_s * self.efficiency


def predict_goodput(
    cluster: LiveCluster, candidates: Mapping[int, Strategy], corrections: Mapping[int, float]
) -> dict[int, Goodput]:
    """Predicts the goodput of every candidate, by phase.

    `corrections` are ratios of measured to predicted throughput of candidates that have run.
    """
    found = {}
    for phase, spec in candidates.items():
        estimate = cluster.estimate(spec)
        rate = cluster.batch / estimate.step_s * corrections.get(phase, 1.0)
        if math.isfinite(rate) and rate > 0:
            found[phase] = Goodput(rate, estimate.efficiency)
    return found
