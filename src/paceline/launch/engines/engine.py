"""Engine slots as machines: a host agent in each slot (`worker/outpost.py`) runs programs.

`Engine` is the interface that an engine implements; `EngineLauncher` launches runs on it.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable
from contextlib import AsyncExitStack, suppress
from typing import Any, Protocol

from paceline.cluster.pool import Host
from paceline.cluster.shell import BOOT, CHUNK, ProgramStreams, Shell, shell_status
from paceline.comm.wire import (
    HANDSHAKE_TIMEOUT_S,
    HEADER,
    begin_handshake,
    pack_head,
    unpack_head,
    unpack_header,
)
from paceline.errors import HostError, RunFailed, WireError
from paceline.launch.hosts import RemoteHost
from paceline.launch.project import ProjectBundle
from paceline.launch.remote_launcher import RemoteLauncher
from paceline.worker.outpost import BEAT_S, MAX_PART, SILENT_S, make_agent_ticket

STARTUP_TIMEOUT_S = 120.0
"""Default time for an engine to start its host agents."""
CLOSE_S = 12.0
"""Time for the programs in a slot to exit before the slot is released."""

Head = dict[str, Any]
"""The head of a frame on the connection to a host agent."""
OnAgentLost = Callable[[int, str], None]
"""Reports that a slot is lost, by its index; the text names its machine and the cause, if known."""


class Engine(Protocol):
    """Runs a Python function in several slots concurrently."""

    name: str
    """One word for run.json and messages: ray, spark."""

    def find_address(self) -> str:
        """Returns an address of this machine that the engine can reach. Called first; may block."""
        ...

    def begin(self, tickets: list[str], on_lost: OnAgentLost) -> None:
        """Runs `paceline.worker.outpost.run_host_agent(ticket)` for all tickets concurrently.

        Returns at once or blocks until all are placed; raises UsageError or RunFailed if they
        cannot be. `on_lost` may be called from any thread when a slot is lost.
        """
        ...

    def end(self) -> None:
        """Releases everything that `begin` allocated; may block.

        Called in every case, also if `begin` was not. `find_address` and `begin` may follow, for
        the next run or after a slot was lost.
        """
        ...


class EngineLauncher(RemoteLauncher):
    """Uses one slot per worker, and further slots if servers do not share those of workers."""

    def __init__(
        self,
        engine: Engine,
        workers: int,
        luggage: ProjectBundle | None = None,
        *,
        own_servers: int = 0,
        threads: int = 0,
        arrive_s: float = STARTUP_TIMEOUT_S,
    ) -> None:
        super().__init__(luggage or ProjectBundle())
        self.rivals: list[RemoteLauncher] = []
        """Launchers of the same cluster, which give up the slots that they keep to this one."""
        self.engine = engine.name
        self._engine = engine
        self.workers = workers
        self.threads = threads
        self._own_servers = own_servers
        self._arrive_s = arrive_s

    def place_servers(self, servers: int, workers: int) -> list[int | None]:
        if self._own_servers:
            return [None] * servers
        return super().place_servers(servers, workers)

    def host_index_of(self, kind: str, index: int) -> int:
        return self.workers + index % self._own_servers if kind == "server" else index

    async def connect(self, stack: AsyncExitStack) -> list[RemoteHost]:
        for rival in self.rivals:
            if rival is not self:
                await rival.disconnect()
        address = await asyncio.to_thread(self._engine.find_address)
        places = self.workers + self._own_servers
        agents = HostAgentListener(self.engine, places)
        stack.push_async_callback(asyncio.to_thread, self._engine.end)
        stack.push_async_callback(agents.close)
        port = await agents.listen(address)
        tickets = [make_agent_ticket(address, port, agents.token, i) for i in range(places)]
        loop = asyncio.get_running_loop()

        def on_lost(index: int, why: str) -> None:
            loop.call_soon_threadsafe(agents.mark_lost, index, why)

        await asyncio.to_thread(self._engine.begin, tickets, on_lost)
        shells = await agents.wait_for_all(self._arrive_s)
        return [
            RemoteHost(s.host, s, python=s.python, node=s.node, agent_index=s.index) for s in shells
        ]


class HostAgentListener:
    """Accepts the connections of host agents and keeps them."""

    def __init__(self, engine: str, count: int) -> None:
        self.token = secrets.token_hex(32)
        self._engine = engine
        self._shells: list[HostAgentShell | None] = [None] * count
        self._lost: dict[int, str] = {}
        self._changed = asyncio.Event()
        self._server: asyncio.Server | None = None
        self._serving: set[asyncio.Task[None]] = set()

    async def listen(self, address: str) -> int:
        self._server = await asyncio.start_server(self._accept, address, 0)
        port: int = self._server.sockets[0].getsockname()[1]
        return port

    async def wait_for_all(self, timeout_s: float) -> list[HostAgentShell]:
        """Returns all slots once all have connected. Raises RunFailed if one cannot."""
        try:
            async with asyncio.timeout(timeout_s):
                while None in self._shells:
                    if self._lost:
                        index, why = min(self._lost.items())
                        raise RunFailed(f"{self._engine}: slot {index} did not start: {why}")
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            late = [str(i) for i, shell in enumerate(self._shells) if shell is None]
            raise RunFailed(
                f"{self._engine}: {len(late)} of {len(self._shells)} slots did not connect within "
                f"{timeout_s:g} s (slot {', '.join(late)}); free more cores, or allow connections "
                "from the cluster's machines to this one"
            ) from None
        return [shell for shell in self._shells if shell is not None]

    def mark_lost(self, index: int, why: str) -> None:
        self._lost.setdefault(index, why)
        shell = self._shells[index]
        if shell is not None:
            shell.lose(why)
        self._changed.set()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._serving.add(task)
        try:
            async with asyncio.timeout(HANDSHAKE_TIMEOUT_S):
                handshake = begin_handshake("server", self.token)
                writer.write(handshake.start())
                while not handshake.done:
                    writer.write(handshake.feed(await reader.readexactly(handshake.bytes_needed)))
                hello = await read_frame(reader)
            await self.serve(hello, reader, writer)
        except (WireError, OSError, EOFError, TimeoutError, KeyError, TypeError, ValueError):
            pass  # An unknown peer, or a slot whose machine was lost, which `lose` reports.
        finally:
            writer.close()
            self._serving.discard(task)

    async def serve(
        self, hello: Head, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        """Serves an authenticated peer until it disconnects."""
        index = int(hello["index"])
        if not 0 <= index < len(self._shells) or self._shells[index] is not None:
            raise WireError(f"slot {index} connected twice")
        shell = HostAgentShell(hello, writer)
        self._shells[index] = shell
        self._changed.set()
        await shell.listen(reader)

    async def close(self) -> None:
        for shell in self._shells:
            if shell is not None:
                await shell.close()
        if self._serving:
            # They end when the host agent disconnects, after it has stopped its programs.
            await asyncio.wait(list(self._serving), timeout=CLOSE_S)
            for task in list(self._serving):
                task.cancel()
        if self._server is not None:
            self._server.close()


async def read_frame(reader: asyncio.StreamReader) -> Head:
    header = await reader.readexactly(HEADER.size)
    head_bytes, _ = unpack_header(header, max_body=0)
    head = unpack_head(await reader.readexactly(head_bytes))
    if not isinstance(head, dict):
        raise WireError("invalid message from a slot: not a mapping")
    return head


class HostAgentShell(Shell):
    """A slot of an engine, as a machine that runs programs."""

    def __init__(self, hello: Head, writer: asyncio.StreamWriter) -> None:
        self.host = Host(host=str(hello["address"]))
        self.address = self.host.host
        self.python = str(hello["python"])
        self.node = str(hello["node"])
        self.index = int(hello["index"])
        self._writer = writer
        self._programs: dict[int, HostAgentStreams] = {}
        self._next = 0
        self._gone = False
        self.on_leave: Callable[[], None] = lambda: None
        """Called when the machine asks to leave the run."""
        self._beating = asyncio.create_task(self._beat())

    @property
    def is_lost(self) -> bool:
        return self._gone

    async def open(self, python: str | None) -> ProgramStreams:
        if self._gone:
            raise HostError(self.host.host, "lost", self.why_lost or "its connection was lost")
        number = self._next = self._next + 1
        streams = HostAgentStreams(self, number)
        self._programs[number] = streams
        await self.send({"do": "open", "id": number, "argv": [python or self.python, "-c", BOOT]})
        return streams

    async def send(self, head: Head) -> None:
        if self._gone:
            raise EOFError
        self._writer.write(pack_head(head))
        await self._writer.drain()

    async def listen(self, reader: asyncio.StreamReader) -> None:
        """Reads frames until the host agent disconnects or is silent for too long."""
        try:
            while True:
                async with asyncio.timeout(SILENT_S):
                    head = await read_frame(reader)
                if head.get("leave"):
                    self.on_leave()
                program = self._programs.get(head.get("id", 0))
                if program is not None:
                    program.take(head)
                    if "end" in head:
                        del self._programs[program.number]
        finally:
            self.lose("")

    async def _beat(self) -> None:
        with suppress(OSError, EOFError):
            while True:
                await asyncio.sleep(BEAT_S)
                await self.send({"do": "beat"})

    def lose(self, why: str) -> None:
        self.why_lost = self.why_lost or why
        self._gone = True
        self._beating.cancel()
        for program in self._programs.values():
            program.take({"end": None, "why": self.why_lost})
        self._programs.clear()

    async def show(self, text: str) -> None:
        """Shows a line to the user of the machine."""
        with suppress(OSError, EOFError):
            await self.send({"do": "show", "text": text})

    async def close(self, reason: str = "", *, refused: bool = False) -> None:
        with suppress(OSError, EOFError):
            await self.send({"do": "leave", "why": reason, "refused": refused})


class HostAgentStreams:
    """A program that runs in a slot."""

    def __init__(self, shell: HostAgentShell, number: int) -> None:
        self.number = number
        self._shell = shell
        self._out, self._err = asyncio.StreamReader(), asyncio.StreamReader()
        self._ended: asyncio.Future[int | None] = asyncio.get_running_loop().create_future()

    def take(self, head: Head) -> None:
        if "out" in head:
            self._out.feed_data(head["out"])
        elif "err" in head:
            self._err.feed_data(head["err"])
        elif "end" in head and not self._ended.done():
            self._err.feed_data(str(head["why"] or "").encode())
            self._out.feed_eof()
            self._err.feed_eof()
            self._ended.set_result(shell_status(head["end"]))

    async def write(self, data: bytes) -> None:
        for at in range(0, len(data), MAX_PART):
            piece = data[at : at + MAX_PART]
            await self._shell.send({"do": "in", "id": self.number, "data": piece})

    async def read(self) -> bytes:
        return await self._out.read(CHUNK)

    async def read_errors(self) -> bytes:
        return await self._err.read(CHUNK)

    async def wait(self) -> int | None:
        return await asyncio.shield(self._ended)

    def close_input(self) -> None:
        self._say("eof")

    def kill(self) -> None:
        self._say("kill")

    def _say(self, word: str) -> None:
        async def say() -> None:
            with suppress(OSError, EOFError):
                await self._shell.send({"do": word, "id": self.number})

        self._sending = asyncio.create_task(say())
