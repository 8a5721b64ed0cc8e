"""A pool as arrays, one entry per host, computed once per job."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from paceline.cluster.pool import Host, Pool
from paceline.plan.cost_model import Workload, step_time_on, with_measured_gradient_size

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

BASE_MEMORY_BYTES = 400e6
"""Python, torch and their libraries, before any model is loaded."""
DEFAULT_WATTS = (60.0, 120.0)
"""Idle and busy power of a host whose pool entry has no `watts`."""


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
        self.corrections: Mapping[str, Correction] = {}
        """By kind of run (`correction_key`); set by `calibrate_from_log`."""
        self.pool, self.work = pool, work
        self.hosts: list[Host] = list(pool.hosts)
        costs = [step_time_on(h, work, pool) for h in self.hosts]
        self.fixed = np.array([c.fixed_s for c in costs])
        self.per_sample = np.array([c.per_sample_s for c in costs])
        self.update = np.array([c.update_s for c in costs])
        self.bandwidth = np.array([pool.link_of(h).bytes_per_s for h in self.hosts])
        self.latency = np.array([pool.link_of(h).latency_s for h in self.hosts])
        self.cv = np.array([pool.jitter_of(h).cv for h in self.hosts])
        self.idle_w = np.array([h.watts.idle if h.watts else DEFAULT_WATTS[0] for h in self.hosts])
        self.busy_w = np.array([h.watts.busy if h.watts else DEFAULT_WATTS[1] for h in self.hosts])
        self.price = np.array([h.price_per_hour or 0.0 for h in self.hosts])
        self.memory_bytes = np.array(
            [math.inf if h.memory_gb is None else h.memory_gb * 1e9 for h in self.hosts]
        )
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
