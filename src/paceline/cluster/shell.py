"""A way to run Python programs on a machine: over SSH, or right here for `localhost`.

Everything that Paceline runs on another machine is a small Python program of its own
(`cluster/remote/`), sent over standard input in front of what the program is to read. So nothing
needs to be installed there, and no argument ever passes through a shell.
"""

from __future__ import annotations

import asyncio
import json
import os
import shlex
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Protocol, TypeVar

from paceline.cluster.pool import Host
from paceline.errors import HostError

BOOT = (
    "import sys;n=int(sys.stdin.buffer.readline());s=sys.stdin.buffer.read(n);"
    "exec(compile(s,'paceline','exec'))"
)
"""Reads a program of a stated length from standard input and becomes it."""
CHUNK = 1 << 16
MAX_LINE = 1 << 16
"""A script's longer lines are shown in pieces."""
ERRORS_KEPT = 4000


class ProgramStreams(Protocol):
    """What a shell knows of one running program; bytes in, bytes out."""

    async def write(self, data: bytes) -> None: ...

    async def read(self) -> bytes:
        """The next piece of standard output; nothing at its end."""
        ...

    async def read_errors(self) -> bytes: ...

    async def wait(self) -> int | None:
        """The exit status, 128 + n for signal n; None if the connection was lost before."""
        ...

    def close_input(self) -> None: ...

    def kill(self) -> None:
        """Kill it here, or let go of it there."""
        ...


class Shell(Protocol):
    """A machine that is ready to run programs."""

    host: Host
    address: str | None
    """Where this machine was reached; None for the one that we sit at."""
    why_lost: str
    """What is known of why it went away, if it did and anything is."""

    async def open(self, python: str | None) -> ProgramStreams: ...

    async def close(self) -> None: ...


class RemoteProgram:
    """One program on a machine, spoken to in lines of JSON."""

    def __init__(self, shell: Shell, streams: ProgramStreams, what: str) -> None:
        self.host = shell.host
        self.what = what
        self._streams = streams
        self._buffer = bytearray()
        self._errors = bytearray()
        self._reading = asyncio.create_task(self._keep_errors())

    async def tell(self, message: dict[str, Any]) -> None:
        await self.write(json.dumps(message).encode() + b"\n")

    async def write(self, data: bytes) -> None:
        try:
            await self._streams.write(data)
        except (OSError, EOFError):
            pass  # It is gone: what it said last, and its status, tell more.

    async def ask(self, message: dict[str, Any], timeout_s: float) -> dict[str, Any]:
        """Send a message, wait for its answer; raises HostError at the deadline or at its end."""
        await self.tell(message)
        return await self.answer(timeout_s, str(message.get("do", self.what)))

    async def answer(self, timeout_s: float, doing: str = "") -> dict[str, Any]:
        doing = doing or self.what
        try:
            async with asyncio.timeout(timeout_s):
                line = await self._line()
        except TimeoutError:
            raise HostError(
                self.host.host, "deadline", f"no answer to {doing} within {timeout_s:g} s"
            ) from None
        if not line.endswith(b"\n"):
            raise await self._explain_end(doing)
        try:
            answer = json.loads(line)
        except ValueError:
            answer = None
        if not isinstance(answer, dict):
            # A shell's start-up file that prints something, usually.
            text = line.decode(errors="replace").strip()[:80]
            raise HostError(
                self.host.host,
                "noise",
                f"its shell prints {text!r} where an answer belongs: "
                "let its start-up files print nothing when not interactive",
            )
        if "error" in answer:
            raise HostError(self.host.host, "program", str(answer["error"]))
        return answer

    async def lines(self) -> AsyncIterator[str]:
        """What it prints, line by line; a carriage return ends a line too (progress bars)."""
        pending = bytes(self._buffer)
        self._buffer.clear()
        while piece := await self._streams.read():
            pending += piece
            *whole, pending = pending.replace(b"\r\n", b"\n").replace(b"\r", b"\n").split(b"\n")
            for line in whole:
                yield line.decode(errors="replace")
            while len(pending) > MAX_LINE:
                yield pending[:MAX_LINE].decode(errors="replace")
                pending = pending[MAX_LINE:]
        if pending:
            yield pending.decode(errors="replace")

    async def wait(self) -> int | None:
        status = await self._streams.wait()
        await asyncio.wait([self._reading], timeout=1.0)
        return status

    @property
    def errors(self) -> str:
        """The last of what came on standard error."""
        return self._errors.decode(errors="replace").strip()

    async def end(self, grace_s: float = 2.0) -> None:
        """Let it see the end of its input, which all of ours take as the word to leave."""
        self._streams.close_input()
        left = asyncio.ensure_future(self._streams.wait())
        await asyncio.wait([left], timeout=grace_s)
        if not left.done():
            self._streams.kill()
            await asyncio.wait([left], timeout=1.0)
        left.cancel()
        self._reading.cancel()

    async def _line(self) -> bytes:
        while (at := self._buffer.find(b"\n")) < 0:
            piece = await self._streams.read()
            if not piece:
                at = len(self._buffer) - 1
                break
            self._buffer += piece
        line = bytes(self._buffer[: at + 1])
        del self._buffer[: at + 1]
        return line

    async def _keep_errors(self) -> None:
        while piece := await self._streams.read_errors():
            self._errors += piece
            del self._errors[:-ERRORS_KEPT]

    async def _explain_end(self, doing: str) -> HostError:
        name = self.host.host
        try:
            async with asyncio.timeout(5.0):
                status = await self.wait()
        except TimeoutError:
            status = None
        if status is None:
            return HostError(name, "lost", f"the connection was lost during {doing}")
        if status in (126, 127):
            python = self.host.python or "python3"
            return HostError(
                name,
                "python",
                f"there is no {python} to run",
                format_ssh_command(self.host, "sudo apt-get install -y python3 python3-venv"),
            )
        last = self.errors.splitlines()[-1:] or [f"exit status {status}"]
        return HostError(name, "program", f"{doing} failed there: {last[0][:200]}")


@asynccontextmanager
async def run_program(
    shell: Shell, name: str, *, python: str | None = None, grace_s: float = 2.0
) -> AsyncIterator[RemoteProgram]:
    """Start a program of `cluster/remote/`; it is ended with the block, however that is left."""
    streams = await shell.open(python or shell.host.python)
    program = RemoteProgram(shell, streams, name)
    try:
        source = read_remote(name).encode()
        await program.write(b"%d\n" % len(source) + source)
        yield program
    finally:
        await program.end(grace_s)


def read_remote(name: str) -> str:
    """The source of one of the programs in `cluster/remote/`."""
    return (Path(__file__).parent / "remote" / f"{name}.py").read_text(encoding="utf-8")


def format_ssh_command(host: Host, command: str) -> str:
    """A command on a machine, as people would type it here."""
    if host.is_local:
        return command
    port = [] if host.port == 22 else ["-p", str(host.port)]
    target = host.host if host.user is None else f"{host.user}@{host.host}"
    return shlex.join(["ssh", *port, target]) + " " + shlex.quote(command)


def python_command(python: str | None) -> str:
    """The shell's part in starting a program there; a leading ~ is the home folder."""
    python = python or "python3"
    if python.startswith("~/"):
        word = '"$HOME"/' + shlex.quote(python[2:])
    else:
        word = shlex.quote(python)
    return f"exec {word} -c {shlex.quote(BOOT)}"


class LocalShell:
    """The machine that we sit at: the same programs, without SSH."""

    def __init__(self, host: Host) -> None:
        self.host = host
        self.address: str | None = None
        self.why_lost = ""

    async def open(self, python: str | None) -> ProgramStreams:
        chosen = os.path.expanduser(python) if python else sys.executable
        try:
            process = await asyncio.create_subprocess_exec(
                chosen,
                "-c",
                BOOT,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
                start_new_session=True,
            )
        except OSError as error:
            raise HostError(
                self.host.host, "python", f"{chosen} cannot be run ({error.strerror})"
            ) from None
        return _LocalStreams(process)

    async def close(self) -> None:
        pass


class _LocalStreams:
    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    async def write(self, data: bytes) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(data)
        await self._process.stdin.drain()

    async def read(self) -> bytes:
        assert self._process.stdout is not None
        return await self._process.stdout.read(CHUNK)

    async def read_errors(self) -> bytes:
        assert self._process.stderr is not None
        return await self._process.stderr.read(CHUNK)

    async def wait(self) -> int | None:
        status = await self._process.wait()
        return status if status >= 0 else 128 - status

    def close_input(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()

    def kill(self) -> None:
        if self._process.returncode is None:
            try:
                os.killpg(self._process.pid, signal.SIGKILL)
            except ProcessLookupError:
                pass


Item = TypeVar("Item")
Found = TypeVar("Found")


async def run_on_all(
    items: list[Item], do: Callable[[Item], Awaitable[Found]]
) -> list[Found | HostError]:
    """One coroutine a machine, all at once: what each found, or what was wrong with it."""

    async def one(item: Item) -> Found | HostError:
        try:
            return await do(item)
        except HostError as error:
            return error

    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(one(item)) for item in items]
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None  # the user's mistake, or our own
    return [task.result() for task in tasks]
