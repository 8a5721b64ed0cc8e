"""Installs a public key on machines that still require a password.

A password is requested once, used for one connection and discarded: it is never stored, printed or
logged, and is sent only over SSH.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.cluster.pool import Host
from paceline.cluster.shell import run_program
from paceline.cluster.ssh import (
    SshShell,
    SshTimeouts,
    connect_options,
    explain_ssh_error,
    known_hosts_name,
    load_asyncssh,
    open_shell,
)
from paceline.errors import HostError, UsageError

DEFAULT_KEYS = ("id_ed25519.pub", "id_ecdsa.pub", "id_rsa.pub")
ANSWER_TIMEOUT_S = 20.0


@dataclass(frozen=True, kw_only=True)
class UserPrompts:
    """Callbacks that prompt the user."""

    password: Callable[[str], str]
    trust: Callable[[str], bool]
    """Asks whether to trust a machine with this fingerprint."""
    print_line: Callable[[str], None]


def find_public_key(host: Host, chosen: Path | None) -> Path:
    """Returns the public part of the pool's key, or else of the user's default key."""
    if chosen is not None:
        candidates = [chosen]
    elif host.key is not None:
        candidates = [Path(host.key + ".pub").expanduser()]
    else:
        candidates = [Path("~/.ssh").expanduser() / name for name in DEFAULT_KEYS]
    for path in candidates:
        if path.is_file():
            if "PRIVATE KEY" in path.read_text(errors="replace"):
                raise UsageError(f"{path} is a private key; use its public part, {path}.pub")
            return path
    raise UsageError(
        f"no public key at {' or '.join(map(str, candidates))}; "
        "create one with `ssh-keygen -t ed25519`"
    )


async def install_key(
    host: Host, chosen: Path | None, prompts: UserPrompts, timeouts: SshTimeouts
) -> str:
    """Installs the key and returns what was done. Raises HostError on failure."""
    if host.is_local:
        return "does not need a key"
    lib = load_asyncssh()
    public = find_public_key(host, chosen)
    try:
        await (await open_shell(host, timeouts)).close()
        return "already accepts a key"
    except HostError as error:
        if error.kind == "host_key" and "is not in known_hosts" in error.problem:
            await _learn_host_key(lib, host, prompts, timeouts, error)
        elif error.kind != "key":
            raise
    await _with_password(lib, host, public, prompts, timeouts)
    await (await open_shell(host, timeouts)).close()
    return f"now accepts {public}"


async def _learn_host_key(
    lib: Any, host: Host, prompts: UserPrompts, timeouts: SshTimeouts, unknown: HostError
) -> None:
    try:
        async with asyncio.timeout(timeouts.connect_s):
            key = await lib.get_server_host_key(host.host, host.port)
    except (TimeoutError, OSError, lib.Error) as error:
        raise explain_ssh_error(lib, host, error, timeouts) from None
    if key is None or not prompts.trust(f"{host.host} has the fingerprint {key.get_fingerprint()}"):
        raise unknown
    path = Path("~/.ssh/known_hosts").expanduser()
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    kind, data = key.export_public_key().decode().split()[:2]
    with path.open("a", encoding="utf-8") as file:
        file.write(f"{known_hosts_name(host)} {kind} {data}\n")


async def _with_password(
    lib: Any, host: Host, public: Path, prompts: UserPrompts, timeouts: SshTimeouts
) -> None:
    options = await connect_options(host.model_copy(update={"key": None}), timeouts)
    options["client_keys"] = None
    options["preferred_auth"] = "password,keyboard-interactive"
    account = host.host if host.user is None else f"{host.user}@{host.host}"
    options["password"] = prompts.password(f"password of {account}: ")
    try:
        async with asyncio.timeout(timeouts.connect_s):
            connection = await lib.connect(host.host, **options)
    except lib.PermissionDenied:
        raise HostError(host.host, "password", "the password was not accepted") from None
    except (TimeoutError, OSError, lib.Error) as error:
        raise explain_ssh_error(lib, host, error, timeouts) from None
    finally:
        del options
    shell = SshShell(host, connection)
    try:
        async with run_program(shell, "authorize") as program:
            await program.send({"key": public.read_text(encoding="utf-8").strip()})
            await program.answer(ANSWER_TIMEOUT_S)
    finally:
        await shell.close()
