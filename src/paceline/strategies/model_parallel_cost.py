"""Cost of model-parallel strategies: replicas of the model, each over several hosts."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from paceline.plan.facet import StepEstimate
from paceline.plan.lockstep import all_reduce_s, update_s
from paceline.plan.pool_arrays import BASE_MEMORY_BYTES, Ints, PoolArrays


@dataclass(frozen=True)
class StageHost:
    """The host of one part of a model."""

    fixed_s: float
    per_sample_s: float
    memory_bytes: float
    """Available for weights, gradients and optimizer state; infinite if unknown."""
    bytes_per_s: float
    latency_s: float


@dataclass(frozen=True)
class ReplicaStep:
    """Step time of one replica, and how long each of its hosts computes."""

    step_s: float
    busy: Sequence[float]


def stage_hosts(arrays: PoolArrays, hosts: Ints) -> list[StageHost]:
    return [
        StageHost(
            fixed_s=float(arrays.fixed[i]),
            per_sample_s=float(arrays.per_sample[i]),
            memory_bytes=float(arrays.memory_bytes[i]) - BASE_MEMORY_BYTES,
            bytes_per_s=float(arrays.bandwidth[i]),
            latency_s=float(arrays.latency[i]) + arrays.pool.hop_ms / 1e3,
        )
        for i in hosts
    ]


def model_parallel_step(
    arrays: PoolArrays,
    hosts: Ints,
    parts: int,
    replica_step: Callable[[Sequence[StageHost], float], ReplicaStep],
) -> StepEstimate:
    """The slowest replica, then an all-reduce between equal parts of different replicas.

    `replica_step` estimates one replica from its hosts and its number of samples.
    """
    replicas = len(hosts) // parts
    samples = arrays.work.batch / replicas
    steps, busy = [], np.zeros(len(hosts))
    for first in range(0, len(hosts), parts):
        replica = replica_step(stage_hosts(arrays, hosts[first : first + parts]), samples)
        steps.append(replica.step_s)
        busy[first : first + parts] = replica.busy
    update = update_s(arrays, hosts) / parts
    nbytes = arrays.work.bytes / parts
    exchange = all_reduce_s(arrays, hosts[::parts], nbytes) if replicas > 1 else 0.0
    return StepEstimate(max(steps) + update + exchange, busy)
