"""Launcher for processes on this machine."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path
from typing import Protocol

from paceline.launch.engines.fork_client import (
    IS_SUPPORTED,
    MAX_LINE,
    ForkServerError,
    get_fork_server,
)
from paceline.launch.launcher import OnLine, round_robin_parents
from paceline.worker.assignment import Assignment, pack_assignment
from paceline.worker.fork_server import ChildSetup
from paceline.worker.main import COMMAND

CLOSE_TIMEOUT_S = 2.0
"""Time that the output of a process that has ended may take to be read."""


class InputStream(Protocol):
    """Standard input of a process, as asyncio's streams and transports provide it."""

    def write(self, data: bytes) -> None: ...

    def is_closing(self) -> bool: ...

    def close(self) -> None: ...


class SpawnedProcess:
    """A process started with `python -m paceline.worker`."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        self.pid = process.pid
        self.stdin = process.stdin
        self.stdout = process.stdout
        self._process = process

    async def wait(self) -> int | None:
        return await self._process.wait()


class StartedProcess(Protocol):
    """A process of this machine, however it was started."""

    pid: int

    @property
    def stdin(self) -> InputStream: ...

    @property
    def stdout(self) -> asyncio.StreamReader: ...

    async def wait(self) -> int | None:
        """Returns the exit code (negative: the signal), or None if it cannot be known."""
        ...


class LocalProcess:
    """A worker, with the servers that are its children."""

    def __init__(self, who: str, process: StartedProcess, on_line: OnLine) -> None:
        self.process_name = who
        self.pid = process.pid
        self.location = f"pid {process.pid}"
        self._process = process
        # Kept, because the event loop itself keeps only weak references to tasks.
        self._reading = asyncio.create_task(_read_lines(process.stdout, who, on_line))
        self._ending = asyncio.create_task(process.wait())

    async def wait(self) -> str | None:
        code = await asyncio.shield(self._ending)
        if code == 0:
            return None
        if code is None:
            return "killed together with the fork server"
        if code < 0:
            return f"killed by {signal.Signals(-code).name}"
        return f"exit status {code}"

    def request_stacks(self) -> None:
        if not self._process.stdin.is_closing():
            self._process.stdin.write(b"stacks\n")

    async def close(self) -> None:
        """Closes the pipes, once the process has ended: a pipe must not outlive the event loop."""
        self._process.stdin.close()
        await asyncio.wait([self._reading, self._ending], timeout=CLOSE_TIMEOUT_S)

    def kill(self) -> None:
        # The whole session: a worker's servers are its children and share it.
        try:
            os.killpg(self.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass


class LocalLauncher:
    """Starts processes in sessions of their own, on loopback.

    Processes are forked from the fork server. If it fails, they are spawned, and the supervisor's
    log contains the reason.
    """

    engine = "local"
    host = "127.0.0.1"
    supports_live_objects = True

    def __init__(self, *, fork: bool = True) -> None:
        """`fork=False` starts every process with a new Python interpreter."""
        self._fork = fork and IS_SUPPORTED
        self._started: list[LocalProcess] = []

    def bundle(self, job_file: Path | None, out: Path) -> None:
        pass

    async def open(self, on_line: OnLine) -> None:
        pass

    def place_servers(self, servers: int, workers: int) -> list[int | None]:
        return round_robin_parents(servers, workers)

    async def close(self) -> None:
        while self._started:
            await self._started.pop().close()

    async def start(
        self, assignment: Assignment, live: bytes | None, on_line: OnLine
    ) -> LocalProcess:
        local_rank = (assignment.index, assignment.workers)
        assignment = assignment.model_copy(update={"local_rank": local_rank})
        process: StartedProcess | None = None
        if self._fork:
            try:
                process = await get_fork_server().fork(child_setup(assignment))
            except (ForkServerError, OSError) as error:
                self._fork = False
                on_line("supervisor", f"fork server: {error}; spawning processes instead")
        if process is None:
            process = await spawn(assignment.threads)
        process.stdin.write(pack_assignment(assignment, live))
        self._started.append(LocalProcess(assignment.process_name, process, on_line))
        return self._started[-1]


async def spawn(threads: int) -> SpawnedProcess:
    """Starts a process with a new Python interpreter, which imports torch itself."""
    return SpawnedProcess(
        await asyncio.create_subprocess_exec(
            *COMMAND,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            start_new_session=True,
            limit=MAX_LINE,
            env=child_environment(threads),
        )
    )


def child_setup(assignment: Assignment) -> ChildSetup:
    """Returns what a forked process takes over from this one."""
    umask = os.umask(0o077)
    os.umask(umask)
    return ChildSetup(
        environment=child_environment(assignment.threads),
        directory=os.getcwd(),
        umask=umask,
        cores=sorted(os.sched_getaffinity(0)),
        threads=assignment.threads,
        title=assignment.process_name,
    )


def child_environment(threads: int) -> dict[str, str]:
    """Returns this process's environment, with thread pools limited to the worker's threads."""
    return {
        **os.environ,
        "OMP_NUM_THREADS": str(threads),
        "MKL_NUM_THREADS": str(threads),
        "PYTHONUNBUFFERED": "1",
    }


async def _read_lines(output: asyncio.StreamReader, who: str, on_line: OnLine) -> None:
    while True:
        try:
            line = await output.readline()
        except ValueError:
            continue  # A line longer than the limit: its rest follows.
        if not line:
            return
        on_line(who, line.decode(errors="replace").rstrip("\n"))
