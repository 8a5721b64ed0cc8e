"""What a supervisor needs of whatever starts its processes: the contract of all engines.

`local.py` keeps it with child processes, `distant.py` with processes on other machines, reached
over SSH or through an engine that runs there already. Run folder, errors and exit codes are the
supervisor's and so the same with each.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from paceline.worker.assignment import Assignment

OnLine = Callable[[str, str], None]
"""Gets who printed, and a line of what it printed."""


class LaunchedProcess(Protocol):
    """A worker with the servers beside it, or a server of its own, wherever it runs."""

    process_name: str
    location: str
    """For people: its pid here, its machine elsewhere."""

    async def wait(self) -> str | None:
        """Until it ends: None if in order, else how it ended, in words."""
        ...

    def request_stacks(self) -> None: ...

    def kill(self) -> None:
        """End it and all that it started; `wait` tells when that is done."""
        ...


class Launcher(Protocol):
    """Starts the processes of one run. `open` comes first, `close` last, also after a failure."""

    engine: str
    """One word for run.json: local, ssh, ray, spark."""
    host: str
    """Where the supervisor listens: an address that all processes reach. Known after `open`."""
    supports_live_objects: bool
    """Whether objects of this process can be handed to those that are started."""

    def bundle(self, job_file: Path | None, out: Path) -> None:
        """What must go along with the job; called before anything starts, raises UsageError."""
        ...

    async def open(self, on_line: OnLine) -> None:
        """Make everything ready to start processes; raises HostError or UsageError if it cannot.

        `on_line` gets what preparing prints, for the run's logs.
        """
        ...

    def place_servers(self, servers: int, workers: int) -> list[int | None]:
        """For each server the worker that it is a child of; None for a process of its own."""
        ...

    async def start(
        self, assignment: Assignment, live: bytes | None, on_line: OnLine
    ) -> LaunchedProcess: ...

    async def close(self) -> None: ...


def round_robin_parents(servers: int, workers: int) -> list[int | None]:
    """Servers go round the workers."""
    return [server % workers for server in range(servers)]
