"""Starts local processes through a fork server (`worker/fork_server.py`).

One fork server per supervisor process: started by the first run, used by all further runs (of
`compare`, `tune`, `demo`, a matrix), ended with the process that started it.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import os
import resource
import select
import socket
import subprocess
import sys
import threading
from dataclasses import dataclass
from typing import IO

from paceline.worker.fork_server import (
    FORK,
    KEEP,
    MODULE,
    PADDING,
    READY,
    STATUS_BYTES,
    ChildSetup,
)

IS_SUPPORTED = hasattr(os, "pidfd_open")
"""Linux 5.3 or newer."""
FORK_TIMEOUT_S = 60.0
"""Deadline of the first fork, which waits for the import of torch on a loaded machine."""
SEND_TIMEOUT_S = 5.0
MAX_LINE = 1 << 20
"""Longest line of output that is read in one piece."""
EXIT_TIMEOUT_S = 2.0
PROCESS_OUTPUT = "utf-8:backslashreplace"
"""Encoding of what processes print, whatever the locale: logs are UTF-8."""

_STARTUP_PREFIXES = (
    "CUDA", "GLIBC_", "GOMP_", "KMP_", "LD_", "MALLOC_", "MKL_", "NUMEXPR_", "OMP_", "OPENBLAS_",
    "PYTHON", "PYTORCH_", "TORCH",
)  # fmt: skip
"""Variables that are read when a process starts or a library is loaded: too early for a fork."""
_LIMITS = tuple(sorted(name for name in dir(resource) if name.startswith("RLIMIT_")))

Fingerprint = tuple[tuple[str, object], ...]


class ForkServerError(Exception):
    """The fork server cannot start a process; the message says why."""


@dataclass
class ForkedProcess:
    """A process that the fork server started for this one."""

    pid: int
    stdin: asyncio.WriteTransport
    stdout: asyncio.StreamReader
    status: asyncio.StreamReader
    server: ForkServerClient

    async def wait(self) -> int | None:
        """Waits for the process to end. Returns its exit code (negative: the signal), or None if
        the fork server ended first, which kills all of its children."""
        try:
            return _decode(await self.status.readexactly(STATUS_BYTES))
        except asyncio.IncompleteReadError:
            return None
        finally:
            self.server.running -= 1


class ForkServerClient:
    """A running fork server, seen from the process that started it."""

    def __init__(self, environment: dict[str, str]) -> None:
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._control.settimeout(SEND_TIMEOUT_S)
        with theirs:
            self._popen = subprocess.Popen(
                [sys.executable, "-m", MODULE, str(theirs.fileno()), PADDING],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
                env=environment,
            )
        self.pid = self._popen.pid
        self.running = 0
        """Number of processes that have not ended."""
        self._ready = False
        self._keeps = False
        """True if it may have children that outlive this process."""

    def is_running(self) -> bool:
        return self._popen.poll() is None

    async def fork(self, setup: ChildSetup, *, keep: bool = False) -> ForkedProcess:
        """Starts a process, which outlives this one with `keep`.

        Raises ForkServerError with the reason if it cannot.
        """
        (input_end, stdin), (stdout, output_end), (status, status_end) = (
            os.pipe() for _ in range(3)
        )
        files = os.fdopen(stdin, "wb", 0), os.fdopen(stdout, "rb", 0), os.fdopen(status, "rb", 0)
        try:
            try:
                request = KEEP if keep else FORK
                socket.send_fds(self._control, [request], [input_end, output_end, status_end])
            finally:
                for descriptor in (input_end, output_end, status_end):
                    os.close(descriptor)
            status_reader = await _read_pipe(files[2])
            async with asyncio.timeout(FORK_TIMEOUT_S):
                pid = _decode(await status_reader.readexactly(STATUS_BYTES))
        except BaseException as error:
            for file in files:
                file.close()
            if isinstance(error, TimeoutError):
                raise ForkServerError(f"no answer within {FORK_TIMEOUT_S:g} s") from None
            if isinstance(error, OSError | asyncio.IncompleteReadError):
                raise ForkServerError(self._explain(str(error))) from None
            raise
        loop = asyncio.get_running_loop()
        transport, _ = await loop.connect_write_pipe(asyncio.BaseProtocol, files[0])
        stdout_reader = await _read_pipe(files[1])
        transport.write(setup.pack())
        self.running += 1
        self._keeps |= keep
        return ForkedProcess(pid, transport, stdout_reader, status_reader, self)

    def wait_until_ready(self, timeout_s: float = FORK_TIMEOUT_S) -> None:
        """Waits until torch has been imported. Returns early if the server fails: the next `fork`
        reports the reason."""
        if not self._ready:
            select.select([self._control], [], [], timeout_s)
            self._ready = self.is_running()

    def _explain(self, otherwise: str) -> str:
        """Returns the reason that the server sent before it ended."""
        with contextlib.suppress(OSError):
            while message := self._control.recv(4096):
                if message != READY:
                    return message.decode(errors="replace")
        return otherwise

    def close(self) -> None:
        """Ends the server and every process that it started."""
        self._control.close()
        try:
            self._popen.wait(EXIT_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            if self._keeps:
                return  # It ends with them.
            self._popen.kill()
            self._popen.wait()


_lock = threading.Lock()
_servers: dict[Fingerprint, ForkServerClient] = {}
"""By what a fork inherits and cannot change: one entry, unless the environment changes."""


def get_fork_server() -> ForkServerClient:
    """Returns the fork server of this process, starting it if necessary."""
    environment = server_environment()
    fingerprint = _fingerprint(environment)
    with _lock:
        server = _servers.get(fingerprint)
        if server is None or not server.is_running():
            for other, idle in list(_servers.items()):
                if not idle.running:
                    _servers.pop(other).close()
            server = _servers[fingerprint] = ForkServerClient(environment)
        return server


def warm_up() -> None:
    """Starts the fork server and waits until it can fork.

    A comparison calls it before its first run, whose time would otherwise include the import.
    """
    if IS_SUPPORTED:
        get_fork_server().wait_until_ready()


def server_environment() -> dict[str, str]:
    """Returns the environment of a fork server: one thread, so that forking is safe."""
    return {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
        "PYTHONUNBUFFERED": "1",
        "PYTHONIOENCODING": PROCESS_OUTPUT,
    }


def close_fork_servers() -> None:
    """Ends all fork servers of this process; the next run starts a new one."""
    with _lock:
        while _servers:
            _servers.popitem()[1].close()


def _forget_fork_servers() -> None:
    """In a fork of this process: the servers belong to the parent. Kept, so that they stay open."""
    _inherited.extend(_servers.values())
    _servers.clear()


_inherited: list[ForkServerClient] = []
atexit.register(close_fork_servers)
os.register_at_fork(after_in_child=_forget_fork_servers)


def _fingerprint(environment: dict[str, str]) -> Fingerprint:
    variables = [
        (name, value) for name, value in environment.items() if name.startswith(_STARTUP_PREFIXES)
    ]
    limits = [(name, resource.getrlimit(getattr(resource, name))) for name in _LIMITS]
    return (*sorted(variables), *limits)


async def _read_pipe(file: IO[bytes]) -> asyncio.StreamReader:
    reader = asyncio.StreamReader(limit=MAX_LINE)
    loop = asyncio.get_running_loop()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), file)
    return reader


def _decode(number: bytes) -> int:
    return int.from_bytes(number, "little", signed=True)
