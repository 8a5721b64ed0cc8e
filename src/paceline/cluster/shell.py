"""Runs Python programs on a machine: over SSH, or locally for `localhost`.

Everything that Paceline runs on another machine is a small Python program (`cluster/remote/`), sent
over stdin ahead of the program's own input. So nothing needs to be installed on the machine, and no
argument ever passes through a shell.
"""

import asyncio
import json
import os
import shlex
import signal
import sys
from abc import ABC, abstractmethod
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
"""Reads the length and source of a program from stdin and executes it."""
CHUNK = 1 << 16
MAX_LINE = 1 << 16
"""Longer lines of a script are split."""
MAX_ERROR_CHARS = 4000

Frame = dict[str, Any]
"""A JSON message to or from the program on a host."""


class ProgramStreams(Protocol):
    """Byte streams and exit status of a running program."""

    async def write(self, data: bytes) -> None: ...

    async def read(self) -> bytes:
        """Returns the next chunk of stdout; empty at its end."""
        ...

    async def read_errors(self) -> bytes: ...

    async def wait(self) -> int | None:
        """Returns the exit status, 128 + n for signal n; None if the connection was lost."""
        ...

    def close_input(self) -> None: ...

    def kill(self) -> None:
        """Kills a local program; closes the channel of a remote one."""
        ...


class Shell(ABC):
    """A connected machine that can run programs."""

    host: Host
    address: str | None = None
    """Address at which the machine was reached; None for the local machine."""
    why_lost: str = ""
    """Reason for a lost connection, if known."""

    @property
    def is_lost(self) -> bool:
        """True if the machine is known to be unreachable."""
        return False

    @abstractmethod
    async def open(self, python: str | None) -> ProgramStreams: ...

    async def close(self) -> None:  # noqa: B027
        """Closes the connection, if there is one."""


class RemoteProgram:
    """A program on a machine that exchanges lines of JSON."""

    def __init__(self, shell: Shell, streams: ProgramStreams, what: str) -> None:
        self.host = shell.host
        self.what = what
        self._streams = streams
        self._buffer = bytearray()
        self._errors = bytearray()
        self._overdue = 0
        """Answers that came after their deadline, or are still to come."""
        self._reading = asyncio.create_task(self._keep_errors())

    async def send(self, message: Frame) -> None:
        await self.write(json.dumps(message).encode() + b"\n")

    async def write(self, data: bytes) -> None:
        try:
            await self._streams.write(data)
        except (OSError, EOFError):
            pass  # It has exited; its last output and its status are more informative.

    async def ask(self, message: Frame, timeout_s: float) -> Frame:
        """Sends a message and returns the answer. Raises HostError on timeout or if it exits."""
        await self.send(message)
        return await self.answer(timeout_s, str(message.get("do", self.what)))

    async def answer(self, timeout_s: float, doing: str = "") -> Frame:
        doing = doing or self.what
        try:
            async with asyncio.timeout(timeout_s):
                while self._overdue and (await self._line()).endswith(b"\n"):
                    self._overdue -= 1
                line = await self._line()
        except TimeoutError:
            self._overdue += 1
            problem = f"no answer to {doing} within {timeout_s:g} s"
            raise HostError(self.host.host, "deadline", problem) from None
        if not line.endswith(b"\n"):
            raise await self._explain_end(doing)
        try:
            answer = json.loads(line)
        except ValueError:
            answer = None
        if not isinstance(answer, dict):
            # Usually a shell start-up file that prints something.
            text = line.decode(errors="replace").strip()[:80]
            problem = (
                f"its shell printed {text!r} before the answer; "
                "start-up files must not print anything in non-interactive shells"
            )
            raise HostError(self.host.host, "noise", problem)
        if "error" in answer:
            raise HostError(self.host.host, "program", str(answer["error"]))
        return answer

    async def lines(self) -> AsyncIterator[str]:
        """Yields the output line by line; a carriage return also ends a line (progress bars)."""
        pending = bytes(self._buffer)
        self._buffer.clear()
        while chunk := await self._streams.read():
            pending += chunk
            *complete, pending = pending.replace(b"\r\n", b"\n").replace(b"\r", b"\n").split(b"\n")
            for line in complete:
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
        """Returns the end of stderr."""
        return self._errors.decode(errors="replace").strip()

    async def end(self, grace_s: float = 2.0) -> None:
        """Closes stdin, on which our programs exit, and kills the program after `grace_s`."""
        self._streams.close_input()
        exited = asyncio.ensure_future(self._streams.wait())
        await asyncio.wait([exited], timeout=grace_s)
        if not exited.done():
            self._streams.kill()
            await asyncio.wait([exited], timeout=1.0)
        exited.cancel()
        self._reading.cancel()

    async def _line(self) -> bytes:
        while (at := self._buffer.find(b"\n")) < 0:
            chunk = await self._streams.read()
            if not chunk:
                at = len(self._buffer) - 1
                break
            self._buffer += chunk
        line = bytes(self._buffer[: at + 1])
        del self._buffer[: at + 1]
        return line

    async def _keep_errors(self) -> None:
        while chunk := await self._streams.read_errors():
            self._errors += chunk
            del self._errors[:-MAX_ERROR_CHARS]

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
            install = format_ssh_command(self.host, "sudo apt-get install -y python3 python3-venv")
            problem = f"{self.host.python or 'python3'} was not found"
            return HostError(name, "python", problem, install)
        last = self.errors.splitlines()[-1:] or [f"exit status {status}"]
        return HostError(name, "program", f"{doing} failed: {last[0][:200]}")


@asynccontextmanager
async def run_program(
    shell: Shell, name: str, *, python: str | None = None, grace_s: float = 2.0
) -> AsyncIterator[RemoteProgram]:
    """Starts a program of `cluster/remote/` and ends it when the block exits."""
    streams = await shell.open(python or shell.host.python)
    program = RemoteProgram(shell, streams, name)
    try:
        source = read_remote(name).encode()
        await program.write(b"%d\n" % len(source) + source)
        yield program
    finally:
        await program.end(grace_s)


def read_remote(name: str) -> str:
    """Returns the source of a program in `cluster/remote/`."""
    return (Path(__file__).parent / "remote" / f"{name}.py").read_text(encoding="utf-8")


def format_ssh_command(host: Host, command: str) -> str:
    """Returns the local command line that runs a command on a machine."""
    if host.is_local:
        return command
    port = [] if host.port == 22 else ["-p", str(host.port)]
    target = host.host if host.user is None else f"{host.user}@{host.host}"
    return shlex.join(["ssh", *port, target]) + " " + shlex.quote(command)


class LocalShell(Shell):
    """Runs the same programs on the local machine, without SSH."""

    def __init__(self, host: Host) -> None:
        self.host = host

    async def open(self, python: str | None) -> ProgramStreams:
        chosen = os.path.expanduser(python) if python else sys.executable
        pipe = asyncio.subprocess.PIPE
        try:
            process = await asyncio.create_subprocess_exec(
                chosen, "-c", BOOT, stdin=pipe, stdout=pipe, stderr=pipe, start_new_session=True
            )
        except OSError as error:
            problem = f"cannot run {chosen} ({error.strerror})"
            raise HostError(self.host.host, "python", problem) from None
        return ProcessStreams(process, (OSError,))


class ProcessStreams:
    """Streams of a local process. A process of asyncssh has the same streams."""

    def __init__(self, process: Any, lost: tuple[type[Exception], ...]) -> None:
        self._process = process
        self._lost = lost

    async def write(self, data: bytes) -> None:
        try:
            self._process.stdin.write(data)
            await self._process.stdin.drain()
        except self._lost as error:
            raise EOFError(str(error)) from None

    async def read(self) -> bytes:
        return await self._read(self._process.stdout)

    async def read_errors(self) -> bytes:
        return await self._read(self._process.stderr)

    async def _read(self, stream: Any) -> bytes:
        try:
            chunk: bytes = await stream.read(CHUNK)
        except self._lost:
            return b""
        return chunk

    async def wait(self) -> int | None:
        await self._process.wait()
        return shell_status(self._process.returncode)

    def close_input(self) -> None:
        try:
            self._process.stdin.write_eof()
        except self._lost:
            pass

    def kill(self) -> None:
        if self._process.returncode is None:
            try:
                os.killpg(self._process.pid, signal.SIGKILL)
            except ProcessLookupError:
                pass


def shell_status(status: int | None) -> int | None:
    """Returns an exit status as shells do: 128 + n for signal n, which Python returns as -n."""
    return status if status is None or status >= 0 else 128 - status


Item = TypeVar("Item")
Found = TypeVar("Found")


async def run_on_all(
    items: list[Item], do: Callable[[Item], Awaitable[Found]]
) -> list[Found | HostError]:
    """Runs one coroutine per item concurrently; returns each result, or its HostError."""

    async def one(item: Item) -> Found | HostError:
        try:
            return await do(item)
        except HostError as error:
            return error

    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(one(item)) for item in items]
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None  # a usage error or a bug
    return [task.result() for task in tasks]
