"""glibc malloc settings for worker processes.

A step's gradients and activations are asked for and let go again, every time. Large blocks the C
library takes from the system and gives back at once, so that the system has to find and clear all
their pages anew in the next step: half the time of a backward pass, for a wide layer. So they are
kept, and used again.
"""

from __future__ import annotations

import ctypes
import os
import sys

from paceline.telemetry.memory_limit import available_memory_bytes

_TRIM_THRESHOLD, _TOP_PAD, _MMAP_THRESHOLD = -1, -2, -3
_LARGE = (1 << 31) - 1


SCARCE = 4 << 30
"""With less room than this every block that is free should go back."""


def tune_malloc() -> bool:
    """With glibc on Linux, where there is plenty; whoever has set MALLOC_... knows better. Says
    whether it was done."""
    if sys.platform != "linux" or any(name.startswith("MALLOC_") for name in os.environ):
        return False
    if available_memory_bytes() < SCARCE:
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return False
    # Before glibc 2.35 no more than 32 MB are taken for an answer. Without one, the others would do
    # harm: they end its own way of finding a threshold.
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
