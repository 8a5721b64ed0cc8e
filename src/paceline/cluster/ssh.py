"""Connections to machines over SSH, with asyncssh.

Host keys are verified, only public-key authentication is used, and every wait has a deadline. The
user's ~/.ssh/config and known_hosts apply as they do for `ssh`. Every failure becomes a one-line
HostError with the command that fixes it.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.cluster.pool import Host
from paceline.cluster.shell import (
    CHUNK,
    LocalShell,
    ProgramStreams,
    Shell,
    format_ssh_command,
    python_command,
)
from paceline.errors import HostError, UsageError

if TYPE_CHECKING:
    import asyncssh


START_TIMEOUT_S = 20.0
CLOSE_TIMEOUT_S = 2.0


@dataclass(frozen=True, kw_only=True)
class SshTimeouts:
    """Timeouts and heartbeat settings of an SSH connection."""

    connect_s: float = 10.0
    """Time to connect and authenticate."""
    beat_s: float = 2.0
    beats_missed: int = 3
    """A machine is lost after beat_s x (beats_missed + 1) seconds without a reply."""


def load_asyncssh() -> Any:
    try:
        import asyncssh
    except ImportError:
        raise UsageError("SSH requires the package asyncssh; install paceline[ssh]") from None
    return asyncssh


async def open_shell(host: Host, timeouts: SshTimeouts) -> Shell:
    """Connects to a machine. Raises HostError with the problem and its fix."""
    if host.is_local:
        return LocalShell(host)
    lib = load_asyncssh()
    options = await connect_options(host, timeouts)

    async def connect() -> asyncssh.SSHClientConnection:
        return await _connect(lib, host, timeouts, options)

    return SshShell(host, await connect(), connect)


async def connect_options(host: Host, timeouts: SshTimeouts) -> dict[str, object]:
    """Returns the asyncssh options of a machine, for public-key authentication only."""
    options: dict[str, object] = {
        "keepalive_interval": timeouts.beat_s,
        "keepalive_count_max": timeouts.beats_missed,
        "connect_timeout": timeouts.connect_s,
        "preferred_auth": "publickey",
    }
    # Everything that is not set in the pool comes from ~/.ssh/config.
    if host.user is not None:
        options["username"] = host.user
    if host.port != 22:
        options["port"] = host.port
    if host.key is not None:
        options["client_keys"] = await _find_key(host)
    return options


async def _find_key(host: Host) -> list[Any]:
    lib = load_asyncssh()
    assert host.key is not None
    path = Path(host.key).expanduser()
    if path.is_file():
        try:
            return [lib.read_private_key(path)]
        except (lib.KeyImportError, lib.KeyEncryptionError, OSError) as error:
            if "assphrase" in str(error):
                problem = f"key {path} has a passphrase; add it to the SSH agent and remove `key`"
                raise HostError(host.host, "key", problem, f"ssh-add {path}") from None
            raise HostError(host.host, "key", f"cannot read key {path} ({error})") from None
    agent = os.environ.get("SSH_AUTH_SOCK")
    if agent:
        try:
            async with asyncio.timeout(5.0):
                async with await lib.connect_agent(agent) as connection:
                    pairs = await connection.get_keys()
        except (OSError, TimeoutError, lib.Error):
            pairs = []
        named = [pair for pair in pairs if pair.get_comment(errors="replace") == host.key]
        if named:
            return named
    raise HostError(
        host.host, "key", f"key {host.key} is neither a file nor a key in the SSH agent"
    )


async def _connect(
    lib: Any, host: Host, timeouts: SshTimeouts, options: dict[str, object]
) -> asyncssh.SSHClientConnection:
    try:
        async with asyncio.timeout(timeouts.connect_s + 2.0):
            connection: asyncssh.SSHClientConnection = await lib.connect(host.host, **options)
            return connection
    except (TimeoutError, OSError, ValueError, lib.Error) as error:
        # ValueError: an unreadable key, known_hosts or ~/.ssh/config.
        raise explain_ssh_error(lib, host, error, timeouts) from None


def explain_ssh_error(lib: Any, host: Host, error: Exception, timeouts: SshTimeouts) -> HostError:
    """Returns the cause of a failed connection and its fix."""
    name = host.host
    where = f"port {host.port}"
    if isinstance(error, lib.HostKeyNotVerifiable):
        return _explain_host_key(lib, host)
    if isinstance(error, lib.PermissionDenied):
        user = host.user or "this user"
        return HostError(
            name,
            "key",
            f"no local key is accepted for {user}",
            f"paceline pool keys POOL --host {name}",
        )
    if isinstance(error, socket.gaierror):
        return HostError(
            name, "unknown", "the host name cannot be resolved", f"getent hosts {name}"
        )
    if isinstance(error, TimeoutError):
        return HostError(
            name,
            "unreachable",
            f"no response on {where} within {timeouts.connect_s:g} s (powered off, or a firewall)",
            f"ping -c 3 {name}",
        )
    if isinstance(error, ConnectionRefusedError):
        return HostError(
            name,
            "unreachable",
            f"connection refused on {where}; start the SSH server on the machine itself",
            "sudo systemctl start ssh",
        )
    if isinstance(error, OSError):
        text = error.strerror or str(error)
        return HostError(
            name, "unreachable", f"unreachable on {where} ({text})", f"ping -c 3 {name}"
        )
    return HostError(name, "ssh", f"SSH failed ({error})", format_ssh_command(host, "true"))


def _explain_host_key(lib: Any, host: Host) -> HostError:
    name = host.host if host.port == 22 else f"[{host.host}]:{host.port}"
    known_path = Path("~/.ssh/known_hosts").expanduser()
    known = False
    if known_path.is_file():
        try:
            port = None if host.port == 22 else host.port
            found = lib.match_known_hosts(str(known_path), host.host, "", port)
            known = bool(found[0])
        except (ValueError, OSError):
            known = False
    if known:
        return HostError(
            host.host,
            "host_key",
            "its host key does not match known_hosts: another machine responds, or it was "
            "reinstalled; if so",
            f"ssh-keygen -R '{name}'",
        )
    option = "" if host.port == 22 else f"-p {host.port} "
    return HostError(
        host.host,
        "host_key",
        "its host key is not in known_hosts; compare the fingerprint, then",
        f"ssh-keyscan {option}{host.host} >> ~/.ssh/known_hosts",
    )


class SshShell:
    """Programs on a machine over SSH; opens further connections if one is at its session limit."""

    def __init__(
        self,
        host: Host,
        connection: asyncssh.SSHClientConnection,
        connect: Callable[[], Awaitable[asyncssh.SSHClientConnection]] | None = None,
    ) -> None:
        self.host = host
        peer = connection.get_extra_info("peername")
        self.address: str | None = str(peer[0]) if peer else host.host
        self.why_lost = ""
        self._connections = [connection]
        self._connect = connect
        self._opening = asyncio.Lock()

    async def open(self, python: str | None) -> ProgramStreams:
        lib = load_asyncssh()
        command = python_command(python)
        try:
            async with self._opening, asyncio.timeout(START_TIMEOUT_S):
                try:
                    process = await self._connections[-1].create_process(command, encoding=None)
                except lib.ChannelOpenError:
                    # OpenSSH allows ten programs per connection (MaxSessions).
                    if self._connect is None:
                        raise
                    self._connections.append(await self._connect())
                    process = await self._connections[-1].create_process(command, encoding=None)
        except (lib.Error, OSError, TimeoutError) as error:
            raise HostError(self.host.host, "lost", f"cannot start a program ({error})") from None
        return _SshStreams(lib, process)

    async def close(self) -> None:
        for connection in self._connections:
            connection.close()
        closing = [asyncio.ensure_future(c.wait_closed()) for c in self._connections]
        _, slow = await asyncio.wait(closing, timeout=CLOSE_TIMEOUT_S)
        if slow:
            for connection in self._connections:
                connection.abort()
            await asyncio.wait(slow, timeout=CLOSE_TIMEOUT_S)


class _SshStreams:
    def __init__(self, lib: Any, process: asyncssh.SSHClientProcess[bytes]) -> None:
        self._lost = (lib.Error, OSError)
        self._process = process

    async def write(self, data: bytes) -> None:
        try:
            self._process.stdin.write(data)
            await self._process.stdin.drain()
        except self._lost as error:
            raise EOFError(str(error)) from None

    async def read(self) -> bytes:
        try:
            return await self._process.stdout.read(CHUNK)
        except self._lost:
            return b""

    async def read_errors(self) -> bytes:
        try:
            return await self._process.stderr.read(CHUNK)
        except self._lost:
            return b""

    async def wait(self) -> int | None:
        await self._process.wait_closed()
        status = self._process.returncode
        return status if status is None or status >= 0 else 128 - status

    def close_input(self) -> None:
        try:
            self._process.stdin.write_eof()
        except self._lost:
            pass

    def kill(self) -> None:
        self._process.close()
