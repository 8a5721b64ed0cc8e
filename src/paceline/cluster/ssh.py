"""Connections to machines over SSH, with asyncssh.

Host keys are verified, only public-key authentication is used, and every wait has a deadline. The
user's ~/.ssh/config and known_hosts apply as they do for `ssh`. Every failure becomes a one-line
HostError with the command that fixes it.
"""

from __future__ import annotations

import asyncio
import os
import shlex
import socket
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.cluster.pool import Host
from paceline.cluster.shell import (
    BOOT,
    LocalShell,
    ProcessStreams,
    ProgramStreams,
    Shell,
    format_ssh_command,
    shell_status,
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
    options = await connect_options(host, timeouts)
    connect = partial(_connect, load_asyncssh(), host, timeouts, options)
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
    problem = f"key {host.key} is neither a file nor a key in the SSH agent"
    raise HostError(host.host, "key", problem)


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
    name, fix = host.host, f"ping -c 3 {host.host}"
    kind, where = "unreachable", f"port {host.port}"
    if isinstance(error, lib.HostKeyNotVerifiable):
        return _explain_host_key(lib, host)
    if isinstance(error, lib.PermissionDenied):
        kind, fix = "key", f"paceline pool keys POOL --host {name}"
        problem = f"no local key is accepted for {host.user or 'this user'}"
    elif isinstance(error, socket.gaierror):
        kind, fix = "unknown", f"getent hosts {name}"
        problem = "the host name cannot be resolved"
    elif isinstance(error, TimeoutError):
        waited = f"within {timeouts.connect_s:g} s"
        problem = f"no response on {where} {waited} (powered off, or a firewall)"
    elif isinstance(error, ConnectionRefusedError):
        fix = "sudo systemctl start ssh"
        problem = f"connection refused on {where}; start the SSH server on the machine itself"
    elif isinstance(error, OSError):
        problem = f"unreachable on {where} ({error.strerror or error})"
    else:
        kind, fix = "ssh", format_ssh_command(host, "true")
        problem = f"SSH failed ({error})"
    return HostError(name, kind, problem, fix)


def _explain_host_key(lib: Any, host: Host) -> HostError:
    standard_port = host.port == 22
    known_hosts = Path("~/.ssh/known_hosts").expanduser()
    try:
        port = None if standard_port else host.port
        known = bool(lib.match_known_hosts(str(known_hosts), host.host, "", port)[0])
    except (ValueError, OSError):
        known = False
    if known:
        problem = (
            "its host key does not match known_hosts: another machine responds, or it was "
            "reinstalled; if so"
        )
        fix = f"ssh-keygen -R '{known_hosts_name(host)}'"
    else:
        problem = "its host key is not in known_hosts; compare the fingerprint, then"
        option = "" if standard_port else f"-p {host.port} "
        fix = f"ssh-keyscan {option}{host.host} >> ~/.ssh/known_hosts"
    return HostError(host.host, "host_key", problem, fix)


def known_hosts_name(host: Host) -> str:
    """Returns the name of a machine in known_hosts."""
    return host.host if host.port == 22 else f"[{host.host}]:{host.port}"


class SshShell(Shell):
    """Programs on a machine over SSH; opens further connections if one is at its session limit."""

    def __init__(
        self,
        host: Host,
        connection: asyncssh.SSHClientConnection,
        connect: Callable[[], Awaitable[asyncssh.SSHClientConnection]] | None = None,
    ) -> None:
        self.host = host
        peer = connection.get_extra_info("peername")
        self.address = str(peer[0]) if peer else host.host
        self._connections = [connection]
        self._connect = connect
        self._opening = asyncio.Lock()

    @property
    def is_lost(self) -> bool:
        return self._connections[0].is_closed()

    async def open(self, python: str | None) -> ProgramStreams:
        lib = load_asyncssh()
        python = python or "python3"
        home = '"$HOME"/' if python.startswith("~/") else ""  # A quoted ~ is not expanded.
        command = f"exec {home}{shlex.quote(python.removeprefix('~/'))} -c {shlex.quote(BOOT)}"
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
        return _SshStreams(process, (lib.Error, OSError))

    async def close(self) -> None:
        for connection in self._connections:
            connection.close()
        closing = [asyncio.ensure_future(c.wait_closed()) for c in self._connections]
        _, slow = await asyncio.wait(closing, timeout=CLOSE_TIMEOUT_S)
        if slow:
            for connection in self._connections:
                connection.abort()
            await asyncio.wait(slow, timeout=CLOSE_TIMEOUT_S)


class _SshStreams(ProcessStreams):
    async def wait(self) -> int | None:
        await self._process.wait_closed()
        return shell_status(self._process.returncode)

    def kill(self) -> None:
        self._process.close()
