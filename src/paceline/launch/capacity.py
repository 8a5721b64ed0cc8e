"""Checks that this machine can start a number of processes, before the first is started."""

import os
import resource
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from paceline.errors import UsageError
from paceline.telemetry.proc_stats import available_memory_bytes, free_cgroup_tasks

PROCESS_BYTES = 24_000_000
"""Private memory of a forked worker or server with a model of a few kilobytes, as measured."""
PROCESS_THREADS = 8
"""Threads of a worker: its own, the sampler's, Gloo's and autograd's, as measured."""
WORKER_FILES = 24
"""Open files of a worker besides its connections to the other workers, as measured."""
SUPERVISOR_FILES = 5
"""Open files of the supervisor per process: three pipes and two connections."""


@dataclass(frozen=True)
class Limit:
    """A resource: what the processes need, what is available, and at most how many can run."""

    needed: str
    available: str
    fits: int
    remedy: str


def check_capacity(workers: int, servers: int = 0) -> None:
    """Raises UsageError if this machine cannot start this many processes."""
    processes = workers + servers
    exceeded = [limit for limit in find_limits(workers, processes) if limit.fits < processes]
    if not exceeded:
        return
    limit = min(exceeded, key=lambda each: each.fits)
    most = max(1, limit.fits - servers)
    raise UsageError(
        f"--workers {workers}: {processes} processes need {limit.needed}, but {limit.available}; "
        f"use at most {most} workers{limit.remedy}, or simulate them with `paceline twin`"
    )


def find_limits(workers: int, processes: int) -> Iterator[Limit]:
    memory = available_memory_bytes()
    yield Limit(
        f"about {processes * PROCESS_BYTES / 1e9:.1f} GB of memory without their models",
        f"{memory / 1e9:.1f} GB are available",
        int(memory // PROCESS_BYTES),
        "",
    )
    threads = free_threads()
    yield Limit(
        f"about {processes * PROCESS_THREADS} threads",
        f"this system allows {threads} more",
        threads // PROCESS_THREADS,
        "",
    )
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if files != resource.RLIM_INFINITY:
        opened = len(os.listdir("/proc/self/fd")) if Path("/proc/self/fd").exists() else 16
        # A worker has a connection to each other worker.
        most = max(SUPERVISOR_FILES * processes + opened, workers + WORKER_FILES)
        yield Limit(
            f"about {most} open files in one process",
            f"its limit is {files}",
            min((files - opened) // SUPERVISOR_FILES, files - WORKER_FILES),
            ", raise the limit (ulimit -n)",
        )


def free_threads() -> int:
    """Returns how many more threads the kernel, the control group and the user's limit allow."""
    limits: list[int] = []
    for name in ("pid_max", "threads-max"):
        if (value := _read_number(Path("/proc/sys/kernel") / name)) is not None:
            limits.append(value - _count_threads())
    limits += free_cgroup_tasks()
    soft, _ = resource.getrlimit(resource.RLIMIT_NPROC)
    if soft != resource.RLIM_INFINITY and os.geteuid() != 0:  # Not enforced for root.
        limits.append(soft - _count_threads(os.getuid()))
    return max(0, min(limits, default=1 << 30))


def _count_threads(user: int | None = None) -> int:
    """Counts the threads of all processes, or of those of a user."""
    count = 0
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if user is None or process.stat().st_uid == user:
                count += len(os.listdir(process / "task"))
        except OSError:
            continue  # It has ended.
    return count


def _read_number(path: Path) -> int | None:
    """Returns the number in a file; None without one ("max")."""
    try:
        return int(path.read_text(encoding="ascii"))
    except (OSError, ValueError):
        return None
