"""Prepares machines for a script: connects, probes, and copies the project and environment."""

import asyncio
import hashlib
import sys
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any, TypeVar

from paceline.cluster.doctor import most_common
from paceline.cluster.pool import Host
from paceline.cluster.shell import RemoteProgram, Shell, read_remote, run_on_all, run_program
from paceline.cluster.ssh import SshTimeouts, open_shell
from paceline.errors import HostError, RunFailed
from paceline.launch.project import Project, ProjectBundle
from paceline.launch.script_tasks import ScriptTask

ASK_S = 30.0
CHUNK = 1 << 18
CHUNK_S = 60.0
"""Timeout of sending a chunk of the project to a machine."""
BEAT_S = 2.0
SILENT_S = 10.0
"""A watchdog that receives no heartbeat for this long ends its program."""
VENV_TIMEOUT_S = 1200.0
GRACE_S = 3.0
"""Time between terminating a process and killing it."""
KEEPER_END_S = 10.0
"""Time for a watchdog to exit: GRACE_S and the time to kill its program."""


@dataclass
class RemoteHost:
    """A machine and the paths on it."""

    host: Host
    shell: Shell
    facts: dict[str, Any] = field(default_factory=dict)
    address: str = "127.0.0.1"
    interface: str | None = "lo"
    """Address and interface towards the other machines; local ones for a single machine."""
    ports: list[int] = field(default_factory=list)
    copy_root: str | None = None
    """Directory of the project on the host; None if it runs in place."""
    folder: str = ""
    python: str = "python3"
    node: str = ""
    agent_index: int | None = None
    """Distinguishes the files of several slots on one machine."""

    @property
    def title(self) -> str:
        """Name for messages: the machine, and the engine's name for it."""
        return f"{self.host.host} ({self.node})" if self.node else self.host.host

    @property
    def lock(self) -> str | None:
        return None if self.copy_root is None else f"{self.copy_root}/lock"


async def connect_hosts(
    hosts: Sequence[Host], patience: SshTimeouts, stack: AsyncExitStack
) -> list[RemoteHost]:
    """Connects to all machines concurrently. Raises HostError with all that failed."""
    shells = await run_on_all(list(hosts), lambda host: open_shell(host, patience))
    for shell in shells:
        if not isinstance(shell, HostError):
            stack.push_async_callback(shell.close)
    found = raise_host_errors(shells)
    return [RemoteHost(s.host, s, python=find_python(s.host, s)) for s in found]


def find_python(host: Host, shell: Shell) -> str:
    """Returns the interpreter of a machine; by default python3, and this one locally."""
    return host.python or ("python3" if shell.address else sys.executable)


Found = TypeVar("Found")


def raise_host_errors(results: list[Found | HostError]) -> list[Found]:
    wrong = [result for result in results if isinstance(result, HostError)]
    if len(wrong) == 1:
        raise wrong[0]
    if wrong:
        names = ", ".join(error.host for error in wrong)
        raise RunFailed(
            f"{len(wrong)} of {len(results)} machines cannot be used: {names}; "
            "run `paceline doctor` for a fix",
            details="\n".join(map(str, wrong)),
        )
    return [result for result in results if not isinstance(result, HostError)]


async def prepare_hosts(
    sites: list[RemoteHost],
    tasks: Sequence[ScriptTask],
    bundle: ProjectBundle,
    on_line: Callable[[str, str], None],
) -> None:
    """Probes the machines, copies the project and creates environments."""
    await probe_hosts(sites, tasks)
    if bundle.project is not None:
        await copy_project(sites, bundle.project, bundle.directory, bundle.on_progress)
    if bundle.requirements is not None:
        bundle.on_progress("making the environments")
        await create_venvs(sites, bundle.requirements, on_line)


async def probe_hosts(sites: list[RemoteHost], tasks: Sequence[ScriptTask]) -> None:
    """Queries facts, routes to the others and free ports of each machine."""
    reached = {id(site): site.shell.address for site in sites}

    async def one(site: RemoteHost) -> None:
        others = [reached[id(s)] for s in sites if s is not site and reached[id(s)]]
        mine = [task for task in tasks if sites[task.site] is site]
        async with run_program(site.shell, "probe") as probe:
            site.facts = await probe.ask({"do": "facts", "packages": []}, ASK_S)
            asked = {"do": "routes", "peers": others}
            routes = list((await probe.ask(asked, ASK_S))["routes"].values())
            # One port per task, and one for the rendezvous.
            ports = await probe.ask({"do": "ports", "count": len(mine) + 1}, ASK_S)
        site.ports = ports["ports"]
        if len(sites) > 1:
            sources = [route["source"] for route in routes if route["source"]]
            site.address = most_common(sources) or site.shell.address or site.address
            reached[id(site)] = site.address
            names = [r["interface"] for r in routes if r["source"] == site.address]
            site.interface = names[0] if names else None

    # The local machine comes first: its address follows from its routes to the others.
    for here in (True, False):
        chosen = [site for site in sites if (site.shell.address is None) == here]
        raise_host_errors(await run_on_all(chosen, one))


async def copy_project(
    sites: list[RemoteHost], project: Project, inner: str, tell: Callable[[str], None]
) -> None:
    """Synchronizes the project to all other machines; locally it runs in place."""

    async def one(site: RemoteHost) -> tuple[int, int]:
        if site.host.is_local:
            site.folder = str(project.folder / inner)
            return 0, 0
        suffix = "" if site.agent_index is None else f"-{site.agent_index}"
        site.copy_root = project.root_on(site.host.host + suffix)
        site.folder = str(PurePosixPath(site.copy_root, "files", inner))
        async with run_program(site.shell, "file_sync", grace_s=5.0) as receiver:
            files = {path: list(facts) for path, facts in project.files.items()}
            asked = {"root": site.copy_root, "files": files}
            needed = (await receiver.ask(asked, ASK_S + CHUNK_S))["needed"]
            sent = 0
            for path in needed:
                sent += await _send(receiver, site, project, path)
            await receiver.answer(CHUNK_S, "copying")
            return len(needed), sent

    copied = raise_host_errors(await run_on_all(sites, one))
    for site, (count, nbytes) in zip(sites, copied, strict=True):
        if site.copy_root is not None:
            tell(f"{site.host.host}: {count} of {len(project.files)} files copied, {nbytes} bytes")


async def _send(receiver: RemoteProgram, site: RemoteHost, project: Project, path: str) -> int:
    size = project.files[path][0]
    left = size
    with (project.folder / path).open("rb") as file:
        while left:
            # A file that has become shorter is padded: its hash differs, which is reported.
            piece = file.read(min(CHUNK, left)) or bytes(min(CHUNK, left))
            try:
                async with asyncio.timeout(CHUNK_S):
                    await receiver.write(piece)
            except TimeoutError:
                problem = f"it took nothing of {path} for {CHUNK_S:g} s"
                raise HostError(site.host.host, "deadline", problem) from None
            left -= len(piece)
    return size


async def create_venvs(
    sites: list[RemoteHost], requirements: Path, on_line: Callable[[str, str], None]
) -> None:
    """Creates a virtual environment on each machine from the project's requirements, once."""
    text = requirements.read_bytes()

    async def one(site: RemoteHost) -> None:
        root = site.copy_root or "~/.paceline/launch/here"
        version = str(site.facts["python"]).encode()
        folder = f"{root}/venv-{hashlib.sha256(text + version).hexdigest()[:12]}"
        listed = f"{root}/files/{requirements.name}" if site.copy_root else str(requirements)
        argv = [site.facts["executable"], "-c", read_remote("venv"), folder, listed]
        spec = watchdog_command(argv, {}, "~", None)
        label = f"venv-{site.host.host}"
        try:
            async with asyncio.timeout(VENV_TIMEOUT_S):
                status, errors = await run_guarded(site, spec, lambda line: on_line(label, line))
        except TimeoutError:
            problem = f"its environment was not made within {VENV_TIMEOUT_S:g} s"
            raise HostError(site.host.host, "venv", problem) from None
        if status != 0:
            why = errors or f"exit status {status}, see logs/{label}.log"
            raise HostError(site.host.host, "venv", f"cannot create its environment: {why}")
        site.python = f"{folder}/bin/python"

    raise_host_errors(await run_on_all(sites, one))


def watchdog_command(
    argv: list[str], env: dict[str, str], cwd: str, lock: str | None, **defaults: str
) -> dict[str, Any]:
    """Returns the configuration of a watchdog."""
    command = {"argv": argv, "env": env, "defaults": defaults, "cwd": cwd, "lock": lock}
    return {**command, "beat_s": SILENT_S, "grace_s": GRACE_S}


async def run_guarded(
    site: RemoteHost,
    spec: dict[str, Any],
    on_line: Callable[[str], None],
    on_start: Callable[[RemoteProgram], None] = lambda keeper: None,
) -> tuple[int | None, str]:
    """Runs a command under a watchdog; returns its status (None if lost) and last message.

    Cancelling this ends the command there, and waits for that.
    """
    async with run_program(site.shell, "watchdog", grace_s=KEEPER_END_S) as keeper:
        await keeper.send(spec)
        on_start(keeper)
        beating = asyncio.create_task(_beat(keeper))
        try:
            async for line in keeper.lines():
                on_line(line)
            return await keeper.wait(), keeper.errors
        finally:
            beating.cancel()


async def _beat(keeper: RemoteProgram) -> None:
    while True:
        await asyncio.sleep(BEAT_S)
        await keeper.write(b"beat\n")
