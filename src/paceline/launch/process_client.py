"""Starts processes on a machine through a process server that outlives the runs."""

import asyncio
import base64
import contextlib
import itertools
import json
from typing import Any

from paceline.cluster.shell import RemoteProgram
from paceline.errors import HostError
from paceline.launch.engines.process_server import MODULE
from paceline.launch.hosts import RemoteHost, run_guarded, watchdog_command
from paceline.launch.launcher import OnLine
from paceline.worker.assignment import Assignment, pack_assignment

READY_S = 300.0
"""Time for a machine to import torch."""


class ProcessClient:
    """The process server of a machine, seen from the supervisor."""

    def __init__(self, site: RemoteHost) -> None:
        self._site = site
        self._keeper: RemoteProgram | None = None
        self._serving: asyncio.Task[str] | None = None
        self._ready = asyncio.Event()
        self._numbers = itertools.count(1)
        self._processes: dict[int, HostedProcess] = {}
        self._noise: list[str] = []

    @property
    def is_serving(self) -> bool:
        return self._serving is not None and not self._serving.done()

    async def open(self) -> None:
        """Starts the server, unless it is running. Raises HostError if it does not get ready."""
        if self.is_serving:
            return
        self._ready.clear()
        self._serving = asyncio.create_task(self._serve())
        ready = asyncio.create_task(self._ready.wait())
        try:
            await asyncio.wait(
                {self._serving, ready}, timeout=READY_S, return_when=asyncio.FIRST_COMPLETED
            )
        finally:
            ready.cancel()
        if self._ready.is_set():
            return
        problem = f"its process server was not ready within {READY_S:g} s"
        if self._serving.done():
            problem = f"its process server ended: {self._serving.result()}"
        await self.close()
        raise HostError(self._site.host.host, "start", problem)

    async def _serve(self) -> str:
        """Runs until the server ends; returns how it ended, which is how its processes end."""
        argv = [self._site.python, "-m", MODULE]
        environment = {"PYTHONUNBUFFERED": "1"}
        spec = watchdog_command(argv, environment, self._site.folder or "~", self._site.lock)
        spec["input"] = ""
        how = "ended by the supervisor"
        try:
            status, words = await run_guarded(self._site, spec, self._take, self._remember)
            why = self._site.shell.why_lost
            how = f"host {self._site.title} was lost" + (f" ({why})" if why else "")
            if status is not None:
                last = [line for line in (*words.splitlines(), *self._noise) if line.strip()][-1:]
                how = f"exit status {status}" + "".join(f": {line}" for line in last)
        except HostError as error:
            how = str(error)
        finally:
            for process in self._processes.values():
                process.end(how)
            self._processes.clear()
        return how

    def _remember(self, keeper: RemoteProgram) -> None:
        self._keeper = keeper

    def _take(self, line: str) -> None:
        try:
            frame = json.loads(line)
            process = self._processes.get(frame.get("id", 0))
        except (ValueError, AttributeError):
            self._noise = [*self._noise[-9:], line]
            return
        if "ready" in frame:
            self._ready.set()
        elif process is not None and "line" in frame:
            process.on_line(process.process_name, str(frame["line"]))
        elif process is not None and "end" in frame:
            del self._processes[frame["id"]]
            process.end(frame["end"])

    async def start(
        self, assignment: Assignment, defaults: dict[str, str], on_line: OnLine
    ) -> "HostedProcess":
        number = next(self._numbers)
        process = HostedProcess(assignment.process_name, number, self, on_line)
        process.location = f"on {self._site.title}"
        self._processes[number] = process
        await self.send(
            {
                "do": "start",
                "id": number,
                # The assignment has the token of the run: this channel is private.
                "assignment": base64.b64encode(pack_assignment(assignment)).decode(),
                "defaults": defaults,
            }
        )
        return process

    async def send(self, request: dict[str, Any]) -> None:
        if self._keeper is not None and self.is_serving:
            await self._keeper.write(b"say " + json.dumps(request).encode() + b"\n")

    async def close(self) -> None:
        if self._serving is not None:
            self._serving.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._serving


class HostedProcess:
    """A process that a process server started."""

    location = ""
    pid: int | None = None

    def __init__(self, name: str, number: int, client: ProcessClient, on_line: OnLine) -> None:
        self.process_name = name
        self.on_line = on_line
        self._number = number
        self._client = client
        self._ended: asyncio.Future[str | None] = asyncio.get_running_loop().create_future()

    def end(self, how: str | None) -> None:
        if not self._ended.done():
            self._ended.set_result(how)

    async def wait(self) -> str | None:
        return await asyncio.shield(self._ended)

    def send_command(self, line: str) -> None:
        self._request("command", line=line)

    def kill(self) -> None:
        self._request("kill")

    def _request(self, do: str, **values: str) -> None:
        if not self._ended.done():
            # Kept, because the event loop itself keeps only weak references to tasks.
            request = {"do": do, "id": self._number, **values}
            self._asking = asyncio.create_task(self._client.send(request))
