"""Machines that join a run in progress: by `paceline join`, or as new hosts of its pool.

Each runs one worker. `paceline join` starts a host agent (`worker/outpost.py`) that calls the run;
a new host of a pool is reached over SSH. From there on both are machines that give a `Shell`.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
from collections.abc import Coroutine, Mapping
from pathlib import Path
from typing import Any

from paceline.comm.wire import pack_head
from paceline.errors import HostError, PacelineError, UsageError
from paceline.launch.attendance import Attendance
from paceline.launch.engines.engine import Head, HostAgentListener, HostAgentShell
from paceline.launch.hosts import RemoteHost, prepare_hosts
from paceline.launch.launcher import LaunchedProcess, Launcher, OnLine
from paceline.launch.project import ProjectBundle
from paceline.launch.remote_launcher import check_packages, move_assignment, start_watched
from paceline.telemetry.run_folder import ListenNotice, OnEvent
from paceline.worker.assignment import Assignment

JOIN_FILE = "join.json"
"""Address and token with which machines join a run, readable by its owner only."""
EXIT_S = 10.0
"""Time for a worker that has left the run to exit."""
POLL_S = 2.0
"""Interval at which the launcher looks for new machines."""


class Guests:
    """The machines that have joined, and the workers on them."""

    def __init__(
        self,
        run: Attendance,
        launcher: Launcher,
        template: Mapping[str, Any],
        out: Path,
    ) -> None:
        """`launcher` finds machines that were added; `template` names the job's files, and `out` is
        the run folder."""
        self._run, self._launcher, self._template, self._out = run, launcher, template, out
        self._log = run.log
        self._files: ProjectBundle | None = None
        self._sites: dict[int, RemoteHost] = {}
        """Machines by worker."""
        self._turn = asyncio.Lock()
        self._tasks: set[asyncio.Task[None]] = set()
        self._gone: dict[int, asyncio.Event] = {}
        """Set when a worker that was asked to leave has left."""
        self._file: Path | None = None
        self._listener: JoinListener | None = None

    def __contains__(self, worker: int) -> bool:
        return worker in self._sites

    async def open(self, listen: str | None, show: OnEvent) -> None:
        """Listens for machines, and saves how to reach the run; shows it if `listen` is given."""
        address, file = listen or self._launcher.host, self._out / JOIN_FILE
        self._listener = listener = JoinListener(self)
        port = await listener.listen(address)
        where = f"[{address}]:{port}" if ":" in address else f"{address}:{port}"
        with open(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as out:
            os.fchmod(out.fileno(), 0o600)  # Also if the file existed.
            json.dump({"address": where, "token": listener.token}, out)
        self._file = file
        self._begin(self._search())
        if listen is not None:
            show(ListenNotice(address=where, token_file=file))

    async def close(self, reason: str) -> None:
        """Ends everything on the machines; `reason` is shown there."""
        for task in list(self._tasks):
            task.cancel()
        if self._file is not None:
            self._file.unlink(missing_ok=True)
        for site in self._sites.values():
            await _dismiss(site, reason)
        if self._listener is not None:
            await self._listener.close()

    # ---- joining ------------------------------------------------------------------------------

    async def admit(self, site: RemoteHost, threads: int = 0) -> list[int]:
        """Prepares a machine and starts its workers; returns their numbers.

        Raises UsageError, RunFailed or HostError if it cannot join.
        """
        async with self._turn:  # Each can change whether another one can join.
            if (why := self._run.why_not_join(site.host.workers)) is not None:
                raise UsageError(why)
            if self._files is None:
                self._files = self._launcher.bundle_for_guests(self._template, self._out)
            await prepare_hosts([site], (), self._files, lambda who, line: self._log(line))
            await check_packages([site])
            site.address = site.shell.address or site.address
            site.facts["threads"] = threads

            def take_place(worker: int) -> None:
                self._sites[worker] = site

            return [await self._run.start_guest(take_place) for _ in range(site.host.workers)]

    async def start(self, assignment: Assignment, on_line: OnLine) -> LaunchedProcess:
        """Starts the worker of a machine, for the first time or again."""
        site, files = self._sites[assignment.index], self._files
        if site.shell.is_lost:
            raise HostError(site.host.host, "lost", site.shell.why_lost or "it was lost")
        assert files is not None
        local = [worker for worker, at in self._sites.items() if at is site]
        is_here = site.facts["hostname"] == socket.gethostname()
        default = assignment.threads if is_here else 0
        changes = {
            "threads": site.facts["threads"] or default or int(site.facts["cores"]) // len(local),
            "local_rank": (local.index(assignment.index), len(local)),
            "pin": False,
        }
        placed = move_assignment(assignment, files).model_copy(update=changes)
        return start_watched(site, placed, {}, on_line)

    async def _search(self) -> None:
        """Admits machines that the launcher finds, until the run ends."""
        while True:
            await asyncio.sleep(POLL_S)
            for site in await self._launcher.find_new_hosts():
                try:
                    numbers = await self.admit(site)
                except PacelineError as error:
                    self._log(f"{site.title} cannot join: {error}")
                    await site.shell.close()
                else:
                    self._log(f"{site.title} joins as worker {', '.join(map(str, numbers))}")

    # ---- leaving ------------------------------------------------------------------------------

    def ask_to_leave(self, worker: int) -> str | None:
        """Lets a worker leave; returns why it cannot."""
        return self._run.retire(worker)

    async def wait_until_left(self, worker: int) -> None:
        """Waits until a worker that leaves has exited."""
        await self._gone.setdefault(worker, asyncio.Event()).wait()

    def release(self, worker: int, process: LaunchedProcess) -> None:
        """Waits until a worker that has left the run exits, then releases its machine."""

        async def wait() -> None:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(process.wait(), EXIT_S)
            process.kill()
            self._gone.setdefault(worker, asyncio.Event()).set()
            await self._free(worker, f"worker {worker} has left the run", refused=False)

        self._begin(wait())

    def refuse(self, worker: int, reason: str) -> None:
        """Sends a machine away whose worker cannot join."""
        self._begin(self._free(worker, reason, refused=True))

    async def _free(self, worker: int, reason: str, *, refused: bool) -> None:
        site = self._sites.pop(worker, None)
        if site is not None and not any(other is site for other in self._sites.values()):
            await _dismiss(site, reason, refused=refused)

    def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        # Kept, because the event loop itself keeps only weak references to tasks.
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


async def _dismiss(site: RemoteHost, reason: str, *, refused: bool = False) -> None:
    if isinstance(site.shell, HostAgentShell):
        await site.shell.close(reason, refused=refused)
    else:
        await site.shell.close()


class JoinListener(HostAgentListener):
    """Accepts `paceline join` and `paceline leave`."""

    def __init__(self, guests: Guests) -> None:
        super().__init__("join", 0)
        self._guests = guests

    async def serve(
        self, hello: Head, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        if "leave" in hello:
            await self._release(int(hello["leave"]), writer)
            return
        shell = HostAgentShell({**hello, "index": 0}, writer)
        self._shells.append(shell)
        admitting = asyncio.create_task(self._admit(shell, hello))
        try:
            await shell.listen(reader)
        finally:
            if not admitting.done():
                admitting.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await admitting

    async def _admit(self, shell: HostAgentShell, hello: Head) -> None:
        site = RemoteHost(shell.host, shell, python=shell.python, agent_index=int(hello["pid"]))
        try:
            (number,) = await self._guests.admit(site, int(hello["threads"]))
        except (PacelineError, OSError) as error:
            await shell.close(str(error), refused=True)
            return

        def leave() -> None:
            if (why := self._guests.ask_to_leave(number)) is not None:
                self._answering = asyncio.create_task(shell.show(why))

        shell.on_leave = leave
        await shell.show(f"worker {number} starts on this machine")

    async def _release(self, worker: int, writer: asyncio.StreamWriter) -> None:
        why = self._guests.ask_to_leave(worker)
        if why is None:
            await self._guests.wait_until_left(worker)
        writer.write(pack_head({"left": why is None, "why": why or ""}))
        await writer.drain()
