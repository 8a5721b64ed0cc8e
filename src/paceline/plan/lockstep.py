"""Step time of strategies in which all workers advance together."""

from statistics import NormalDist

import numpy as np

from paceline.plan.cost_model import endpoint_s, network_s
from paceline.plan.pool_arrays import Floats, Ints, PoolArrays

TIE_FRACTION = 0.9
"""Workers within a tenth of the slowest compete for being the slowest of a step."""


def even_shares(arrays: PoolArrays, hosts: Ints) -> Floats:
    """Samples per worker, the same for all."""
    return np.full(len(hosts), arrays.work.batch / len(hosts))


def balanced_shares(arrays: PoolArrays, hosts: Ints) -> Floats:
    """Samples per worker such that all finish at the same time (by bisection)."""
    batch = arrays.work.batch
    fixed, slope = arrays.fixed[hosts], arrays.per_sample[hosts]
    low, high = float(fixed.min()), float((fixed + batch * slope).max())
    for _ in range(60):
        middle = (low + high) / 2
        done = float((np.maximum(0.0, middle - fixed) / slope).sum())
        low, high = (low, middle) if done >= batch else (middle, high)
    shares: Floats = np.maximum(0.0, high - fixed) / slope
    shares *= batch / shares.sum()
    return shares


def compute_s(arrays: PoolArrays, hosts: Ints, shares: Floats) -> Floats:
    """Seconds per worker for forward and backward; a worker without samples takes none."""
    seconds: Floats = arrays.fixed[hosts] + shares * arrays.per_sample[hosts]
    seconds[shares == 0] = 0.0
    return seconds


def slowest_s(seconds: Floats, cv: Floats) -> float:
    """Expected maximum of all workers' times, given their coefficients of variation."""
    longest = float(seconds.max())
    rivals = seconds >= TIE_FRACTION * longest
    return longest * (1 + float(cv[rivals].mean()) * expected_maximum(int(rivals.sum())))


def expected_maximum(count: int) -> float:
    """Expected maximum of `count` standard normal draws (Blom's approximation)."""
    if count < 2:
        return 0.0
    return NormalDist().inv_cdf((count - 0.375) / (count + 0.25))


def all_reduce_s(
    arrays: PoolArrays, hosts: Ints, nbytes: float, algorithm: str | None = None
) -> float:
    """Seconds of one all-reduce of `nbytes` among these hosts; see `cost_model.allreduce_s`."""
    pool, count = arrays.pool, len(hosts)
    latency_s = float(arrays.latency[hosts].max()) + pool.hop_ms / 1e3
    bandwidth = float(arrays.bandwidth[hosts].min())
    network = network_s(pool, count, count, nbytes, latency_s, bandwidth, algorithm)
    return network + endpoint_s(pool, count, nbytes)


def update_s(arrays: PoolArrays, hosts: Ints) -> float:
    """Seconds of the slowest host's optimizer step."""
    return float(arrays.update[hosts].max())
