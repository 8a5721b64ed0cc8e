"""Settings of a worker process: CPU cores and glibc malloc.

Every step allocates and frees gradients and activations. By default, glibc returns large blocks to
the system immediately, and the system must map and clear all their pages again in the next step:
half the time of a backward pass of a wide layer. These settings keep and reuse the blocks.
"""

import ctypes
import os
import sys

from paceline.errors import UsageError
from paceline.telemetry.proc_stats import available_memory_bytes

_TRIM_THRESHOLD, _TOP_PAD, _MMAP_THRESHOLD = -1, -2, -3
_LARGE = (1 << 31) - 1
SCARCE = 4 << 30
"""With less available memory than this, free blocks are returned to the system."""


def pin(place: int, workers: int) -> None:
    """Pins this process to its share of the available cores; `place` counts from 0.

    Workers on separate cores are not migrated by the kernel.
    """
    if not hasattr(os, "sched_setaffinity"):
        raise UsageError("--pin requires Linux; remove it")
    cores = sorted(os.sched_getaffinity(0))
    each = len(cores) // workers
    if each == 0:
        raise UsageError(f"--pin: {workers} workers cannot share {len(cores)} cores; remove it")
    os.sched_setaffinity(0, cores[place * each : (place + 1) * each])


def tune_malloc() -> bool:
    """Applies the settings if memory is plentiful and no MALLOC_... variable is set.

    Requires glibc on Linux. Returns whether they were applied.
    """
    if sys.platform != "linux" or any(name.startswith("MALLOC_") for name in os.environ):
        return False
    if available_memory_bytes() < SCARCE:
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return False
    # glibc before 2.35 rejects thresholds above 32 MB. Then the other settings would be harmful,
    # because they disable its dynamic threshold.
    if not (mallopt(_MMAP_THRESHOLD, 1 << 30) or mallopt(_MMAP_THRESHOLD, 32 << 20)):
        return False
    return bool(mallopt(_TRIM_THRESHOLD, _LARGE) and mallopt(_TOP_PAD, 64 << 20))


def trim_malloc() -> None:
    """Returns free memory to the system that steps will not use again, such as weights as read."""
    try:
        trim = ctypes.CDLL(None).malloc_trim
    except (OSError, AttributeError, TypeError):
        return  # another C library
    trim(0)
