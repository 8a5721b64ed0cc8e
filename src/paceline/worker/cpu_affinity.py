"""Pins each worker of a machine to separate cores, so that the kernel does not migrate it."""

from __future__ import annotations

import os

from paceline.errors import UsageError


def pin(place: int, workers: int) -> None:
    """Pins this process to its share of the available cores; `place` counts from 0."""
    if not hasattr(os, "sched_setaffinity"):
        raise UsageError("--pin requires Linux; remove it")
    cores = sorted(os.sched_getaffinity(0))
    each = len(cores) // workers
    if each == 0:
        raise UsageError(f"--pin: {workers} workers cannot share {len(cores)} cores; remove it")
    os.sched_setaffinity(0, cores[place * each : (place + 1) * each])
