"""Launcher for processes on this machine."""

import asyncio
import contextlib
import os
import signal

from paceline.launch.capacity import check_capacity
from paceline.launch.engines.fork_client import (
    IS_SUPPORTED,
    MAX_LINE,
    PROCESS_OUTPUT,
    ForkedProcess,
    ForkServerError,
    get_fork_server,
    warm_up,
)
from paceline.launch.launcher import Launcher, OnLine
from paceline.worker.assignment import Assignment, pack_assignment
from paceline.worker.fork_server import ChildSetup
from paceline.worker.main import COMMAND

CLOSE_TIMEOUT_S = 2.0
"""Time that the output of a process that has ended may take to be read."""

StartedProcess = asyncio.subprocess.Process | ForkedProcess


class LocalProcess:
    """A worker, with the servers that are its children."""

    def __init__(self, who: str, process: StartedProcess, input: bytes, on_line: OnLine) -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        self.process_name = who
        self.pid: int | None = process.pid
        self._session = process.pid
        self.location = f"pid {process.pid}"
        self._stdin = process.stdin
        self._stdin.write(input)
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

    def send_command(self, line: str) -> None:
        if not self._stdin.is_closing():
            self._stdin.write(f"{line}\n".encode())

    async def close(self) -> None:
        """Closes the pipes, once the process has ended: a pipe must not outlive the event loop."""
        self._stdin.close()
        await asyncio.wait([self._reading, self._ending], timeout=CLOSE_TIMEOUT_S)

    def kill(self) -> None:
        # The whole session: a worker's servers are its children and share it.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._session, signal.SIGKILL)


class LocalLauncher(Launcher):
    """Starts processes in sessions of their own, on loopback.

    Processes are forked from the fork server. If it fails, they are spawned, and the supervisor's
    log contains the reason.
    """

    engine = "local"
    supports_live_objects = True
    processes_survive = True

    def __init__(self, *, fork: bool = True) -> None:
        """`fork=False` starts every process with a new Python interpreter."""
        self._fork = fork and IS_SUPPORTED
        self._started: list[LocalProcess] = []

    def check_capacity(self, workers: int, servers: int) -> None:
        check_capacity(workers, servers)

    def warm_up(self) -> None:
        if self._fork:
            warm_up()

    async def close(self) -> None:
        while self._started:
            await self._started.pop().close()

    async def start(
        self, assignment: Assignment, live: bytes | None, on_line: OnLine
    ) -> LocalProcess:
        local_rank = (assignment.index, assignment.workers)
        assignment = assignment.model_copy(update={"local_rank": local_rank})
        return await self.start_placed(assignment, live, on_line, {})

    async def start_placed(
        self,
        assignment: Assignment,
        live: bytes | None,
        on_line: OnLine,
        defaults: dict[str, str],
    ) -> LocalProcess:
        """Starts a process whose rank on this machine is known; `defaults` are variables."""
        environment = {**defaults, **child_environment(assignment.threads)}
        process: StartedProcess | None = None
        if self._fork:
            try:
                process = await get_fork_server().fork(
                    child_setup(assignment, environment), keep=assignment.may_outlive
                )
            except (ForkServerError, OSError) as error:
                self._fork = False
                on_line("supervisor", f"fork server: {error}; spawning processes instead")
        if process is None:
            process = await spawn(environment)
        started = LocalProcess(
            assignment.process_name, process, pack_assignment(assignment, live), on_line
        )
        self._started.append(started)
        return started


async def spawn(environment: dict[str, str]) -> asyncio.subprocess.Process:
    """Starts a process with a new Python interpreter, which imports torch itself."""
    return await asyncio.create_subprocess_exec(
        *COMMAND,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        start_new_session=True,
        limit=MAX_LINE,
        env=environment,
    )


def child_setup(assignment: Assignment, environment: dict[str, str]) -> ChildSetup:
    """Returns what a forked process takes over from this one."""
    umask = os.umask(0o077)
    os.umask(umask)
    return ChildSetup(
        environment=environment,
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
        "PYTHONIOENCODING": PROCESS_OUTPUT,
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
