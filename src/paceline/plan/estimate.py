"""What one choice of machines and strategy would cost: the cost model added up, in arrays.

Times are means: of the variation between steps only what waiting for the slowest makes of it is in
them. The twin plays the same model event by event.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

from paceline.cluster.pool import Host, Pool
from paceline.plan.cost_model import (
    FORWARD_FRACTION,
    Workload,
    coded_bytes,
    endpoint_s,
    exchanged_bytes,
    exposed_s,
    exposed_without_layers_s,
    fill_buckets,
    network_s,
    step_time_on,
    with_measured_gradient_size,
)
from paceline.plan.split import StageHost, estimate_pipeline, tensor_step_s
from paceline.specs.model_parallel import ModelParallel
from paceline.specs.strategy import Strategy
from paceline.strategies.allreduce.spec import AllReduce
from paceline.strategies.diloco.spec import DiLoCo
from paceline.strategies.grouped.spec import Grouped
from paceline.strategies.local_sgd.spec import LocalSgd
from paceline.strategies.pipeline.spec import PipelineParallel
from paceline.strategies.ps.spec import ParameterServer

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

BASE_MEMORY = 400e6
"""Python, torch and their libraries, before any model."""
UNKNOWN_WATTS = (60.0, 120.0)
"""Idle and busy, of a machine that does not say."""


@dataclass(frozen=True)
class Correction:
    """What past runs say of predictions for one kind of strategy."""

    factor: float
    """Actual over predicted."""
    relative_error: float | None
    """How far they lay around it; None while they are too few."""


class PoolArrays:
    """A pool as arrays, one place a machine; worked out once for a job."""

    def __init__(self, pool: Pool, work: Workload) -> None:
        work = with_measured_gradient_size(work, pool.hosts[0])
        self.corrections: Mapping[str, Correction] = {}
        """By kind of run, as `kind_of` has it."""
        self.pool, self.work = pool, work
        self.hosts: list[Host] = list(pool.hosts)
        costs = [step_time_on(h, work, pool) for h in self.hosts]
        self.fixed = np.array([c.fixed_s for c in costs])
        self.per_sample = np.array([c.per_sample_s for c in costs])
        self.update = np.array([c.update_s for c in costs])
        self.bandwidth = np.array([pool.link_of(h).bytes_per_s for h in self.hosts])
        self.latency = np.array([pool.link_of(h).latency_s for h in self.hosts])
        self.cv = np.array([pool.jitter_of(h).cv for h in self.hosts])
        self.idle_w = np.array([h.watts.idle if h.watts else UNKNOWN_WATTS[0] for h in self.hosts])
        self.busy_w = np.array([h.watts.busy if h.watts else UNKNOWN_WATTS[1] for h in self.hosts])
        self.price = np.array([h.price_per_hour or 0.0 for h in self.hosts])
        self.memory_bytes = np.array(
            [math.inf if h.memory_gb is None else h.memory_gb * 1e9 for h in self.hosts]
        )
        needed = work.bytes * (2 + work.slots) + BASE_MEMORY
        self.needed_gb = needed / 1e9
        self.fits = self.memory_bytes >= needed

    @property
    def speed(self) -> Floats:
        """Samples a second of each alone, at an even share of the batch."""
        share = max(1.0, self.work.batch / max(1, len(self.hosts)))
        speeds: Floats = share / (self.fixed + share * self.per_sample)
        return speeds


@dataclass(frozen=True)
class Estimate:
    """A choice and what it would cost."""

    strategy: str
    machines: tuple[int, ...]
    """Places in the pool."""
    step_s: float
    """One global batch, or as many samples."""
    samples_per_s: float
    seconds: float
    joules: float
    price: float
    staleness: float
    interval: tuple[float, float]
    """Where the seconds are expected to lie, nine times in ten."""

    def value(self, objective: str) -> float:
        return {"time": self.seconds, "energy": self.joules, "cost": self.price}[objective]


def correction_key(strategy: Strategy, machines: int) -> str:
    """Runs that go wrong alike: by the strategy's word; all are the same on one machine."""
    return strategy.name if machines > 1 else "single"


def estimate(machines: PoolArrays, chosen: Ints, strategy: Strategy) -> Estimate:
    """What training on these machines, one worker on each, would take."""
    work = machines.work
    if isinstance(strategy, ParameterServer | Grouped):
        step_s, busy, staleness = _served(machines, chosen, strategy)
    elif isinstance(strategy, ModelParallel):
        step_s, busy, staleness = _split(machines, chosen, strategy)
    else:
        step_s, busy, staleness = _planned(machines, chosen, strategy)
    correction = machines.corrections.get(correction_key(strategy, len(chosen)))
    if correction is not None:
        step_s *= correction.factor
    rate = work.batch / step_s
    evaluated = work.evaluated.get("val", 0) * work.epochs + work.evaluated.get("test", 0)
    slowest = float(machines.per_sample[chosen].max())
    evaluation_s = FORWARD_FRACTION * evaluated / len(chosen) * slowest
    seconds = work.samples * work.epochs / rate + evaluation_s
    busy_share = np.clip(busy / step_s, 0.0, 1.0)
    watts = machines.idle_w[chosen] + busy_share * (
        machines.busy_w[chosen] - machines.idle_w[chosen]
    )
    # Machines drift from probe to probe; what is not measured is known worse.
    known = all("any" in h.measured or work.model in h.measured for h in _pick(machines, chosen))
    doubt = 0.10 if known else 0.35
    if correction is not None and correction.relative_error is not None:
        doubt = correction.relative_error
    return Estimate(
        strategy=str(strategy),
        machines=tuple(int(i) for i in chosen),
        step_s=step_s,
        samples_per_s=rate,
        seconds=seconds,
        joules=float(watts.sum()) * seconds,
        price=float(machines.price[chosen].sum()) * seconds / 3600,
        staleness=staleness,
        interval=(seconds * (1 - doubt), seconds * (1 + doubt)),
    )


def _pick(machines: PoolArrays, chosen: Ints) -> list[Host]:
    return [machines.hosts[int(i)] for i in chosen]


def _planned(machines: PoolArrays, chosen: Ints, strategy: Strategy) -> tuple[float, Floats, float]:
    """A global batch in lock-step, or with meetings every few steps."""
    work, count = machines.work, len(chosen)
    shares = _shares(machines, chosen, strategy)
    compute = machines.fixed[chosen] + shares * machines.per_sample[chosen]
    compute[shares == 0] = 0.0
    update = float(machines.update[chosen].max())
    if count == 1:
        return float(compute[0]) + update, compute, 0.0
    nbytes = exchanged_bytes(strategy, work)
    exchange = _allreduce(machines, chosen, nbytes)
    if isinstance(strategy, LocalSgd | DiLoCo):
        between = strategy.steps_between_syncs
        slowest = _slowest(compute, machines.cv[chosen] / math.sqrt(between))
        return slowest + update + exchange / between, compute, 0.0
    slowest = _slowest(compute, machines.cv[chosen])
    bucket = strategy.bucket_mb * (1 << 20) if isinstance(strategy, AllReduce) else 25 << 20
    buckets = fill_buckets(machines.work, bucket)
    if buckets:
        each = [(b.ready, _allreduce(machines, chosen, b.share * nbytes)) for b in buckets]
        exposed = exposed_s(slowest, each)
    else:
        exposed = exposed_without_layers_s(exchange, slowest, nbytes, bucket)
    return slowest + exposed + update, compute, 0.0


def stage_hosts(machines: PoolArrays, chosen: Ints) -> list[StageHost]:
    """The chosen machines as places for stages."""
    return [
        StageHost(
            fixed_s=float(machines.fixed[i]),
            per_sample_s=float(machines.per_sample[i]),
            memory_bytes=float(machines.memory_bytes[i]) - BASE_MEMORY,
            bytes_per_s=float(machines.bandwidth[i]),
            latency_s=float(machines.latency[i]) + machines.pool.hop_ms / 1e3,
        )
        for i in chosen
    ]


def fits_in_memory(machines: PoolArrays, chosen: Ints, strategy: PipelineParallel) -> bool:
    """Some cut leaves every stage with no more than its machine has room for."""
    places = stage_hosts(machines, chosen)
    return estimate_pipeline(machines.work, strategy, places, machines.work.batch) is not None


def _split(
    machines: PoolArrays, chosen: Ints, strategy: ModelParallel
) -> tuple[float, Floats, float]:
    """Replicas of the model, each over as many machines as it has parts."""
    work, parts = machines.work, strategy.model_parts
    replicas = len(chosen) // parts
    rows = work.batch / replicas
    steps, busy = [], np.zeros(len(chosen))
    for first in range(0, len(chosen), parts):
        places = stage_hosts(machines, chosen[first : first + parts])
        if isinstance(strategy, PipelineParallel):
            stages = estimate_pipeline(work, strategy, places, rows)
            assert stages is not None, "ask has_room first"
            steps.append(stages.step_s)
            busy[first : first + parts] = stages.computing
        else:
            steps.append(tensor_step_s(work, strategy, places, rows))
            busy[first : first + parts] = [
                m.fixed_s + rows * m.per_sample_s / parts for m in places
            ]
    update = float(machines.update[chosen].max()) / parts
    exchange = _allreduce(machines, chosen[::parts], work.bytes / parts) if replicas > 1 else 0.0
    return max(steps) + update + exchange, busy, 0.0


def _shares(machines: PoolArrays, chosen: Ints, strategy: Strategy) -> Floats:
    batch = machines.work.batch
    if not (isinstance(strategy, AllReduce) and strategy.balance == "auto"):
        return np.full(len(chosen), batch / len(chosen))
    # As much for each as it computes in the time that all of them need together.
    fixed, slope = machines.fixed[chosen], machines.per_sample[chosen]
    low, high = float(fixed.min()), float((fixed + batch * slope).max())
    for _ in range(60):
        middle = (low + high) / 2
        done = float((np.maximum(0.0, middle - fixed) / slope).sum())
        low, high = (low, middle) if done >= batch else (middle, high)
    shares: Floats = np.maximum(0.0, high - fixed) / slope
    shares *= batch / shares.sum()
    return shares


def _slowest(compute: Floats, cv: Floats) -> float:
    """The mean of the largest, where those within a tenth of the longest compete for it."""
    longest = float(compute.max())
    rivals = compute >= 0.9 * longest
    return longest * (1 + float(cv[rivals].mean()) * _expected_largest(int(rivals.sum())))


def _expected_largest(count: int) -> float:
    """Of so many draws from a standard normal distribution (Blom's approximation)."""
    if count < 2:
        return 0.0
    return NormalDist().inv_cdf((count - 0.375) / (count + 0.25))


def _allreduce(machines: PoolArrays, chosen: Ints, nbytes: float) -> float:
    pool, count = machines.pool, len(chosen)
    latency, bandwidth = (
        float(machines.latency[chosen].max()) + pool.hop_ms / 1e3,
        float(machines.bandwidth[chosen].min()),
    )
    return network_s(pool, count, nbytes, latency, bandwidth) + endpoint_s(pool, count, nbytes)


def _served(
    machines: PoolArrays, chosen: Ints, strategy: ParameterServer | Grouped
) -> tuple[float, Floats, float]:
    """Everybody at its own pace, unless servers, their links or the coordinator are full."""
    pool, work, count = machines.pool, machines.work, len(chosen)
    size = min(strategy.size, count) if isinstance(strategy, Grouped) else 1
    codec = strategy.codec if isinstance(strategy, ParameterServer) else None
    share = work.batch / count
    push, pull = coded_bytes(codec, work), float(work.bytes)
    servers = min(strategy.servers_for(count), count)
    best = np.sort(machines.bandwidth[chosen])[::-1][:servers]
    lane = float(best.min()) * servers
    compute = machines.fixed[chosen] + share * machines.per_sample[chosen]
    own = (push + pull) / (pool.transfer_gb_s * 1e9)
    wire = (push + pull) / np.minimum(machines.bandwidth[chosen], lane)
    apply_s = float(machines.update[chosen].min()) / servers + push / servers / (
        pool.transfer_gb_s * 1e9
    )
    trips = 4 * machines.latency[chosen] + pool.control_ms / 1e3
    cycle = compute + own + wire + apply_s + trips
    if size > 1:
        cycle = cycle + _allreduce(machines, chosen[:size], work.bytes) * 1.5
        cycle = np.full(count, _slowest(cycle, machines.cv[chosen]))
    sync = strategy.sync if isinstance(strategy, ParameterServer) else None
    units = -(-count // size)
    rate = float((share / cycle).sum())
    if sync is not None and sync.expected_staleness(count) == 0:
        # In rounds everybody waits for the slowest, and all pulls come at once.
        slowest = _slowest(cycle, machines.cv[chosen]) + (count - 1) * max(push, pull) / lane
        rate = work.batch / slowest
    most = min(lane / max(push, pull, 1.0), 1 / max(apply_s, 1e-12))
    if pool.control_ms:
        most = min(most, 1e3 / pool.control_ms / size)
    rate = min(rate, most * share * size)
    step_s = work.batch / rate
    busy = (
        compute * (step_s / cycle) * np.minimum(1.0, rate / max(rate, float((share / cycle).sum())))
    )
    return step_s, busy, float(units - 1) if sync is None else sync.expected_staleness(count)
