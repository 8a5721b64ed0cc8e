"""A pool as arrays, one entry per host, computed once per job."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from paceline.cluster.gpu_rates import estimate_gpu
from paceline.cluster.pool import Host, Pool
from paceline.plan.cost_model import (
    Workload,
    find_measured,
    step_time_on,
    with_measured_gradient_size,
)
from paceline.plan.learning_curve import AccuracyGoal

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

BASE_MEMORY_BYTES = 400e6
"""Python, torch and their libraries, before any model is loaded."""
DEFAULT_WATTS = (60.0, 120.0)
"""Idle and busy power of a host whose pool entry has no `watts`, without its GPUs."""
EFFICIENT_FRACTION = 0.5
"""Power of a host marked `energy_efficient` without `watts`, relative to `DEFAULT_WATTS`."""
GPU_IDLE_FRACTION = 0.1
"""Idle power of a GPU relative to its board power."""
STARTUP_S = 4.0
"""Startup where none was measured: the median of runs here whose processes were started afresh,
which took 2.7 to 10 s."""
MEASURED_DOUBT = 0.10
"""Relative error of a prediction from measured step times: machines drift between probes."""
UNMEASURED_DOUBT = 0.35
"""The same where step times come from measured floating-point rates."""
GUESSED_DOUBT = 0.7
"""The same where the rates themselves are guesses: the default, or a GPU's data sheet."""


@dataclass(frozen=True)
class Correction:
    """Correction of predictions for one kind of run by past measurements."""

    factor: float
    """Measured time divided by predicted time."""
    relative_error: float | None
    """Spread of the measurements around `factor`; None if there were too few runs."""


class PoolArrays:
    """Costs, links, power, prices and memory of every host of a pool for one workload."""

    def __init__(self, pool: Pool, work: Workload) -> None:
        work = with_measured_gradient_size(work, pool.hosts[0])
        self.corrections: Mapping[tuple[str, frozenset[str] | None], Correction] = {}
        """By kind of run (`correction_key`) and hosts, and by kind; by `calibrate_from_log`."""
        self.pool, self.work = pool, work
        self.hosts: list[Host] = list(pool.hosts)
        costs = [step_time_on(h, work, pool) for h in self.hosts]
        self.fixed = np.array([c.fixed_s for c in costs])
        self.per_sample = np.array([c.per_sample_s for c in costs])
        self.update = np.array([c.update_s for c in costs])
        self.bandwidth = np.array([pool.link_of(h).bytes_per_s for h in self.hosts])
        self.latency = np.array([pool.link_of(h).latency_s for h in self.hosts])
        self.cv = np.array([pool.jitter_of(h).cv for h in self.hosts])
        self.idle_w, self.busy_w = np.array([_watts(h) for h in self.hosts]).T
        self.startup = np.array(
            [STARTUP_S if h.startup_s is None else h.startup_s for h in self.hosts]
        )
        self.startup_s: float | None = None
        """Startup of earlier runs on this pool, which takes precedence."""
        self.guesses_startup = np.array([h.startup_s is None for h in self.hosts])
        links_given = "link" in pool.model_fields_set
        self.guesses_link = np.array([not links_given and h.link is None for h in self.hosts])
        self.guesses_watts = np.array([h.watts is None for h in self.hosts])
        self.goal: AccuracyGoal | None = None
        self.doubt = np.array([_doubt(h, work) for h in self.hosts])
        """Relative error of each host's step time."""
        self.price = np.array([h.price_per_hour or 0.0 for h in self.hosts])
        self.memory_bytes = np.array([1e9 * _memory_gb(h, work) for h in self.hosts])
        needed = work.bytes * (2 + work.slots) + BASE_MEMORY_BYTES
        self.needed_gb = needed / 1e9
        self.fits = self.memory_bytes >= needed
        """True for each host that can hold the model with its gradients and optimizer state."""

    @property
    def speed(self) -> Floats:
        """Samples per second of each host alone, at an even share of the batch."""
        share = max(1.0, self.work.batch / max(1, len(self.hosts)))
        speeds: Floats = share / (self.fixed + share * self.per_sample)
        return speeds

    def correction(self, kind: str, hosts: Ints) -> Correction | None:
        """Returns the correction from runs on the same hosts, or else from all of this kind."""
        if not self.corrections:
            return None
        names = frozenset(self.hosts[int(i)].host for i in hosts)
        return self.corrections.get((kind, names)) or self.corrections.get((kind, None))


def _watts(host: Host) -> tuple[float, float]:
    """Returns idle and busy power."""
    if host.watts is not None:
        return host.watts.idle, host.watts.busy
    part = EFFICIENT_FRACTION if host.energy_efficient else 1.0
    gpus = sum(g.count * estimate_gpu(g.model).watts for g in host.gpus)
    return part * DEFAULT_WATTS[0] + GPU_IDLE_FRACTION * gpus, part * DEFAULT_WATTS[1] + gpus


def _doubt(host: Host, work: Workload) -> float:
    if find_measured(host, work.model) is not None:
        return MEASURED_DOUBT
    if host.gpus and work.uses_gpus:
        return UNMEASURED_DOUBT if all(g.gflops for g in host.gpus) else GUESSED_DOUBT
    return UNMEASURED_DOUBT if "gflops" in host.model_fields_set else GUESSED_DOUBT


def _memory_gb(host: Host, work: Workload) -> float:
    """Returns the memory for one copy of the model: the GPU's, where that is smaller."""
    sizes = [host.memory_gb]
    if work.uses_gpus:
        sizes += [gpu.memory_gb for gpu in host.gpus]
    return min((size for size in sizes if size is not None), default=math.inf)
