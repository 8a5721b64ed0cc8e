"""Processes on this machine."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

from paceline.launch.launcher import OnLine, round_robin_parents
from paceline.worker.assignment import Assignment, pack_assignment
from paceline.worker.spawn import COMMAND

MAX_LINE = 1 << 20


class LocalProcess:
    def __init__(
        self,
        who: str,
        process: asyncio.subprocess.Process,
        on_line: OnLine,
    ) -> None:
        self.process_name = who
        self.pid = process.pid
        self.location = f"pid {process.pid}"
        self._process = process
        # Kept, because the event loop itself keeps only weak references to tasks.
        self._reading = asyncio.create_task(_read_lines(process, who, on_line))

    async def wait(self) -> str | None:
        code = await self._process.wait()
        if code == 0:
            return None
        if code < 0:
            return f"killed by {signal.Signals(-code).name}"
        return f"exit status {code}"

    def request_stacks(self) -> None:
        if self._process.stdin is not None and not self._process.stdin.is_closing():
            self._process.stdin.write(b"stacks\n")

    def kill(self) -> None:
        # The whole session: a worker's servers are its children and share it.
        try:
            os.killpg(self.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass


class LocalLauncher:
    """Spawns `python -m paceline.worker` in sessions of their own, on loopback."""

    engine = "local"
    host = "127.0.0.1"
    supports_live_objects = True

    def bundle(self, job_file: Path | None, out: Path) -> None:
        pass

    async def open(self, on_line: OnLine) -> None:
        pass

    def place_servers(self, servers: int, workers: int) -> list[int | None]:
        return round_robin_parents(servers, workers)

    async def close(self) -> None:
        pass

    async def start(
        self, assignment: Assignment, live: bytes | None, on_line: OnLine
    ) -> LocalProcess:
        process = await asyncio.create_subprocess_exec(
            *COMMAND,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            start_new_session=True,
            limit=MAX_LINE,
            env=child_environment(assignment.threads),
        )
        assert process.stdin is not None
        told = assignment.model_copy(update={"beside": (assignment.index, assignment.workers)})
        process.stdin.write(pack_assignment(told, live))
        return LocalProcess(assignment.process_name, process, on_line)


def child_environment(threads: int) -> dict[str, str]:
    """The parent's environment, with thread pools kept to the worker's share of the cores."""
    return {
        **os.environ,
        "OMP_NUM_THREADS": str(threads),
        "MKL_NUM_THREADS": str(threads),
        "PYTHONUNBUFFERED": "1",
    }


async def _read_lines(process: asyncio.subprocess.Process, who: str, on_line: OnLine) -> None:
    assert process.stdout is not None
    while True:
        try:
            line = await process.stdout.readline()
        except ValueError:
            continue  # A line longer than the limit: its rest follows.
        if not line:
            return
        on_line(who, line.decode(errors="replace").rstrip("\n"))
