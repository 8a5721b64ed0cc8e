"""Cores and memory of a worker process: pinning, glibc malloc, and whether a model fits.

Every step allocates and frees gradients and activations. By default, glibc returns large blocks to
the system immediately, and the system must map and clear all their pages again in the next step:
half the time of a backward pass of a wide layer. The settings of `tune_malloc` keep and reuse the
blocks.
"""

from __future__ import annotations

import ctypes
import os
import re
import sys
from typing import TYPE_CHECKING

from paceline.errors import SpecError, UsageError
from paceline.specs.optimizer import count_slots
from paceline.specs.strategy import Strategy
from paceline.strategies.registry import parse_strategy, records
from paceline.telemetry.proc_stats import available_memory_bytes

if TYPE_CHECKING:
    import torch

_TRIM_THRESHOLD, _TOP_PAD, _MMAP_THRESHOLD = -1, -2, -3
_LARGE = (1 << 31) - 1
SCARCE = 4 << 30
"""With less available memory than this, free blocks are returned to the system."""
SMALL = 64 << 20
"""Bytes of weights below which `check_memory` is skipped."""


def pin(place: int, workers: int) -> None:
    """Pins this process to share `place` of the cores, so that the kernel does not migrate it."""
    if not hasattr(os, "sched_setaffinity"):
        raise UsageError("--pin requires Linux; remove it")
    cores = sorted(os.sched_getaffinity(0))
    each = len(cores) // workers
    if each == 0:
        raise UsageError(f"--pin: {workers} workers cannot share {len(cores)} cores; remove it")
    os.sched_setaffinity(0, cores[place * each : (place + 1) * each])


def tune_malloc() -> bool:
    """Returns whether the settings apply: glibc on Linux, enough memory, no MALLOC_... variable."""
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


def check_memory(
    strategy: Strategy, model: torch.nn.Module, optimizer: torch.optim.Optimizer, workers: int
) -> None:
    """Raises UsageError if weights, gradients and optimizer state do not fit in memory.

    The whole model exists already: a strategy frees what it does not need before it allocates.
    """
    weights = sum(p.nbytes for p in model.parameters())
    if weights < SMALL:
        return
    slots = count_slots(type(optimizer).__name__, optimizer.defaults)
    room = available_memory_bytes() + weights
    needed = weights * max(
        p.state_fraction(workers).floats_per_weight(slots) for p in strategy.phases
    )
    if needed <= room:
        return
    raise UsageError(
        f"{strategy} needs about {needed / 1e9:.2f} GB per worker (weights, gradients, optimizer "
        f"state), but only {room / 1e9:.2f} GB are available; "
        + suggest_memory_saving_strategies(weights, slots, workers, room)
    )


def suggest_memory_saving_strategies(weights: float, slots: int, workers: int, room: float) -> str:
    """Returns the strategies that fit with this many workers, and their memory."""
    found = []
    for template in (text for record in records().values() for text in record.memory_saving):
        text = template.format(workers=workers)
        spec = parse_strategy(text)
        needed = weights * spec.state_fraction(workers).floats_per_weight(slots)
        try:
            spec.check_workers(workers)
        except SpecError:
            continue
        if workers > 1 and needed <= room:
            found.append(f"{text} needs {needed / 1e9:.2f} GB")
    if found:
        return ", ".join(found)
    least = weights * (2 + slots) / max(room, 1.0)
    return f"split it over {max(2, int(least) + 1)} workers or more, as pipeline(stages=...) does"


def explain_out_of_memory(error: BaseException) -> str | None:
    """Returns the remedy for an out-of-memory error; None for other errors."""
    found = re.search(r"tried to allocate (\d+) bytes", str(error))
    if not isinstance(error, MemoryError) and found is None:
        return None
    wanted = f"{int(found[1]) / 1e9:.2f} GB" if found else "memory"
    return (
        f"out of memory: tried to allocate {wanted} with {available_memory_bytes() / 1e9:.2f} GB "
        "available; use a smaller batch, --recompute, or a strategy that splits the model, such as "
        "pipeline(recompute=true) or allreduce(shard=full)"
    )
