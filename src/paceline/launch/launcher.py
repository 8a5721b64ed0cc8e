"""The interface between the supervisor and all launchers.

`engines/local.py` implements it with child processes, `remote_launcher.py` with processes on other
machines, reached over SSH or through an engine that runs there already. Run folder, errors and exit
codes are the supervisor's and so the same with each.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from paceline.launch.project import ProjectBundle, bundle_project
from paceline.launch.run_loop import LoopThread, Main, run_async
from paceline.worker.assignment import Assignment

if TYPE_CHECKING:
    from paceline.launch.hosts import RemoteHost

T = TypeVar("T")
OnLine = Callable[[str, str], None]
"""Receives the name of a process and a line of its output."""


class LaunchedProcess(Protocol):
    """A worker with its child servers, or a separate server, on any machine."""

    process_name: str
    location: str
    """Location for messages: the pid on this machine, or the other machine."""
    pid: int | None
    """Process id, if it runs on this machine; it leads a session."""

    async def wait(self) -> str | None:
        """Waits for the end; returns None for a normal exit, else a description."""
        ...

    def send_command(self, line: str) -> None:
        """Sends a line to the process: `stacks`, or a fault to inject."""
        ...

    def kill(self) -> None:
        """Ends it and all its descendants; `wait` returns when that is done."""
        ...


class Launcher(ABC):
    """Starts the processes of a run. `open` comes first, `close` last, also after a failure.

    Runs of a launcher may follow each other, but not overlap.
    """

    engine: str
    """One word for run.json: local, ssh, ray, spark."""
    host = "127.0.0.1"
    """Address of the supervisor that all processes can reach. Known after `open`."""
    supports_live_objects = False
    """True if objects of this process can be passed to the processes it starts."""
    loop: LoopThread | None = None
    """Event loop of connections that outlive a run; None: each run has its own loop."""

    def run(self, main: Main[T]) -> T:
        """Runs the main coroutine of a run; an interrupt cancels it."""
        return run_async(main) if self.loop is None else self.loop.run(main)

    def warm_up(self) -> None:  # noqa: B027
        """Prepares what is kept from run to run. Raises RunFailed or HostError on failure."""

    processes_survive = False
    """True if processes can outlive the supervisor, and wait for another one."""

    def bundle(self, job_file: Path | None, out: Path) -> None:  # noqa: B027
        """Collects the files that the job needs before any process starts; raises UsageError."""

    def bundle_for_guests(self, template: Mapping[str, Any], out: Path) -> ProjectBundle:
        """Returns the files that a machine needs to join; raises UsageError."""
        job = template.get("job")
        files = [each.file for each in (job, *template.get("plugins", ())) if each is not None]
        return bundle_project(next((f for f in files if f is not None), None), out=out)

    async def find_new_hosts(self) -> list[RemoteHost]:
        """Returns connected machines that were added since the last call."""
        return []

    def check_capacity(self, workers: int, servers: int) -> None:  # noqa: B027
        """Raises UsageError if the machines certainly cannot run this many processes."""

    async def open(self, on_line: OnLine) -> None:  # noqa: B027
        """Prepares the start of processes. Raises HostError or UsageError on failure.

        `on_line` gets what preparing prints, for the run's logs.
        """

    def place_servers(self, servers: int, workers: int) -> list[int | None]:
        """Returns the parent worker of each server; None for a separate process."""
        return [server % workers for server in range(servers)]

    def separate_servers(self, parents: list[int | None], shards: int) -> list[int | None]:
        """Returns new parents for a run that survives losses: servers outlive workers.

        Server `s` holds shard `s % shards`; its copies are on different machines if possible.
        """
        return [None] * len(parents)

    @abstractmethod
    async def start(
        self, assignment: Assignment, live: bytes | None, on_line: OnLine
    ) -> LaunchedProcess: ...

    @abstractmethod
    async def close(self) -> None: ...
