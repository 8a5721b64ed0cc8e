"""Installing a public key on machines that still ask for a password.

A password is asked for once, used for one connection and forgotten: it is never stored, printed or
logged, and never leaves this process but through SSH.
"""

from __future__ import annotations

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
    load_asyncssh,
    open_shell,
)
from paceline.errors import HostError, UsageError

USUAL = ("id_ed25519.pub", "id_ecdsa.pub", "id_rsa.pub")
ANSWER_S = 20.0


@dataclass(frozen=True, kw_only=True)
class UserPrompts:
    """How to ask whoever sits here."""

    password: Callable[[str], str]
    trust: Callable[[str], bool]
    """May a machine with this fingerprint be trusted?"""
    tell: Callable[[str], None]


def find_public_key(host: Host, chosen: Path | None) -> Path:
    """The public half of the key that the pool names, else the user's usual one."""
    if chosen is not None:
        tried = [chosen]
    elif host.key is not None:
        tried = [Path(host.key + ".pub").expanduser()]
    else:
        tried = [Path("~/.ssh").expanduser() / name for name in USUAL]
    for path in tried:
        if path.is_file():
            if "PRIVATE KEY" in path.read_text(errors="replace"):
                raise UsageError(f"key {path} is a private one: name its public half, {path}.pub")
            return path
    raise UsageError(
        f"no public key at {' or '.join(map(str, tried))}: make one with `ssh-keygen -t ed25519`"
    )


async def install_key(
    host: Host, chosen: Path | None, asked: UserPrompts, patience: SshTimeouts
) -> str:
    """Make a machine accept our key and say what was done; raises HostError where it cannot."""
    if host.is_local:
        return "needs no key"
    lib = load_asyncssh()
    public = find_public_key(host, chosen)
    try:
        shell = await open_shell(host, patience)
        await shell.close()
        return "accepts a key already"
    except HostError as error:
        if error.kind == "host_key" and "not known here" in error.problem:
            await _learn_host_key(lib, host, asked, patience, error)
        elif error.kind != "key":
            raise
    await _with_password(lib, host, public, asked, patience)
    shell = await open_shell(host, patience)
    await shell.close()
    return f"accepts {public} now"


async def _learn_host_key(
    lib: Any, host: Host, asked: UserPrompts, patience: SshTimeouts, unknown: HostError
) -> None:
    try:
        async with asyncio.timeout(patience.connect_s):
            key = await lib.get_server_host_key(host.host, host.port)
    except (TimeoutError, OSError, lib.Error) as error:
        raise explain_ssh_error(lib, host, error, patience) from None
    if key is None or not asked.trust(f"{host.host} has the fingerprint {key.get_fingerprint()}"):
        raise unknown
    label = host.host if host.port == 22 else f"[{host.host}]:{host.port}"
    path = Path("~/.ssh/known_hosts").expanduser()
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    kind, data = key.export_public_key().decode().split()[:2]
    with path.open("a", encoding="utf-8") as file:
        file.write(f"{label} {kind} {data}\n")


async def _with_password(
    lib: Any, host: Host, public: Path, asked: UserPrompts, patience: SshTimeouts
) -> None:
    options = await connect_options(host.model_copy(update={"key": None}), patience)
    options["client_keys"] = None
    options["preferred_auth"] = "password,keyboard-interactive"
    who = host.host if host.user is None else f"{host.user}@{host.host}"
    options["password"] = asked.password(f"password of {who}: ")
    try:
        async with asyncio.timeout(patience.connect_s):
            connection = await lib.connect(host.host, **options)
    except lib.PermissionDenied:
        raise HostError(host.host, "password", "the password was not accepted") from None
    except (TimeoutError, OSError, lib.Error) as error:
        raise explain_ssh_error(lib, host, error, patience) from None
    finally:
        del options
    shell = SshShell(host, connection)
    try:
        async with run_program(shell, "authorize") as program:
            await program.tell({"key": public.read_text(encoding="utf-8").strip()})
            await program.answer(ANSWER_S)
    finally:
        await shell.close()
