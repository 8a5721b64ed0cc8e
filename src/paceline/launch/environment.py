"""Facts about this machine and the installed packages, for `run.json`."""

from __future__ import annotations

import os
import platform
from importlib import metadata

import psutil


def usable_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for name in ("paceline", "torch", "numpy", "safetensors"):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = "unknown"
    return found


def machine_info() -> dict[str, object]:
    return {
        "system": platform.platform(),
        "cores": usable_cores(),
        "memory_bytes": psutil.virtual_memory().total,
    }
