"""Starts workers on other machines: the same processes, under watchdogs, through shells.

A machine is whatever gives a `Shell` (`cluster/shell.py`): one behind SSH, or a place on an engine
that has called back (`engines/engine.py`). A kind of machines says only how they are reached;
probing them, copying the project, checking packages, starting, watching and ending is the same for
all.
"""

from __future__ import annotations

import asyncio
import base64
import dataclasses
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from importlib import metadata
from pathlib import Path
from typing import Any

from paceline.cluster.doctor import most_common
from paceline.cluster.remote.probe import source_address_for
from paceline.cluster.shell import RemoteProgram, format_ssh_command, run_on_all, run_program
from paceline.errors import HostError, RunFailed, UsageError
from paceline.launch.hosts import (
    ASK_S,
    RemoteHost,
    prepare_hosts,
    raise_host_errors,
    run_guarded,
    watchdog_command,
)
from paceline.launch.launcher import LaunchedProcess, Launcher, OnLine
from paceline.launch.process_client import ProcessClient
from paceline.launch.project import Project, ProjectBundle, bundle_project
from paceline.launch.run_loop import LoopThread
from paceline.plugins import Plugin
from paceline.worker.assignment import Assignment, pack_assignment

PACKAGES = ("paceline", "torch")
"""Packages whose versions must match on all machines."""


class RemoteLauncher(Launcher):
    """A launcher for machines to which `connect` connects."""

    workers: int
    """Number of workers that it places."""
    threads = 0
    """Default threads per worker; 0 for the cores of a machine divided by its workers."""

    def __init__(self, luggage: ProjectBundle) -> None:
        self.project_bundle = luggage
        self.remote_hosts: list[RemoteHost] = []
        self._stack = AsyncExitStack()
        self._process_clients: list[ProcessClient] = []
        """By machine, if machines are kept between runs."""
        self._is_kept = False
        self._wanted_sites: list[int] = []
        """Machine of each server of a run that survives losses, if copies allow it."""
        self._server_sites: dict[int, int] = {}
        """The machine that was chosen for it."""
        self._shards = 1

    def keep_open(self, loop: LoopThread) -> None:
        """Keeps machines connected and prepared between runs, until `disconnect`."""
        self.loop = loop

    def bundle(self, job_file: Path | None, out: Path) -> None:
        if job_file is not None and self.project_bundle.project is None:
            self.project_bundle = bundle_project(
                job_file, out=out, tell=self.project_bundle.on_progress
            )

    def bundle_for_guests(self, template: Mapping[str, Any], out: Path) -> ProjectBundle:
        return self.project_bundle

    def warm_up(self) -> None:
        if self.loop is not None:
            self.loop.run(self._prepare)

    async def _prepare(self) -> None:
        try:
            await self.open(lambda who, line: None)
        finally:
            await self.close()

    @abstractmethod
    async def connect(self, stack: AsyncExitStack) -> list[RemoteHost]:
        """Connects to the machines; connections are closed with the stack."""

    @abstractmethod
    def host_index_of(self, kind: str, index: int) -> int:
        """Index of the machine for a worker or a separate server."""

    def separate_servers(self, parents: list[int | None], shards: int) -> list[int | None]:
        self._wanted_sites = [
            self.host_index_of("server", server)
            if parent is None
            else self.host_index_of("worker", parent)
            for server, parent in enumerate(parents)
        ]
        self._shards, self._server_sites = shards, {}
        return super().separate_servers(parents, shards)

    @property
    def server_candidates(self) -> list[int]:
        """Indices of the machines that may run servers of their own."""
        return [self.host_index_of("worker", rank) for rank in range(self.workers)]

    def _site_of(self, assignment: Assignment) -> int:
        """Index of the machine for a worker or a server."""
        server = assignment.index
        if assignment.kind == "worker" or server >= len(self._wanted_sites):
            return self.host_index_of(assignment.kind, server)
        names = [site.host.host for site in self.remote_hosts]
        usable = [s for s in self.server_candidates if not self.remote_hosts[s].shell.is_lost]
        others = {s: names[at] for s, at in self._server_sites.items() if s != server}
        copies = {name for s, name in others.items() if (s - server) % self._shards == 0}
        site = choose_site(self._wanted_sites[server], usable, names, copies, list(others.values()))
        self._server_sites[server] = site
        return site

    async def open(self, on_line: OnLine) -> None:
        if self._is_kept and not any(site.shell.is_lost for site in self.remote_hosts):
            await self._open_clients()
            return
        await self.disconnect()
        self.remote_hosts = sites = await self.connect(self._stack)
        await prepare_hosts(sites, (), self.project_bundle, on_line)
        await check_packages(sites)
        self.host = own_address_towards(sites)
        if self.loop is not None:
            self._process_clients = [ProcessClient(site) for site in sites]
            for client in self._process_clients:
                self._stack.push_async_callback(client.close)
            await self._open_clients()
            self._is_kept = True

    async def _open_clients(self) -> None:
        """Starts the process servers of all machines with workers; those that run continue."""
        used = {self.host_index_of("worker", rank) for rank in range(self.workers)}
        clients = [self._process_clients[index] for index in sorted(used)]
        raise_host_errors(await run_on_all(clients, lambda client: client.open()))

    async def start(
        self, assignment: Assignment, live: bytes | None, on_line: OnLine
    ) -> LaunchedProcess:
        assert live is None, "live objects go to child processes only"
        site = self.remote_hosts[self._site_of(assignment)]
        # Also with fewer workers than places, so that all runs of a comparison get equal threads.
        places = [self.host_index_of("worker", r) for r in range(self.workers)]
        seats = [r for r, at in enumerate(places) if self.remote_hosts[at].host == site.host]
        here = [r for r in seats if r < assignment.workers]
        local_rank = here.index(assignment.index) if assignment.index in here else 0
        local_size = max(1, len(here))
        default_threads = self.threads or max(1, int(site.facts["cores"]) // max(1, len(seats)))
        placed = move_assignment(assignment, self.project_bundle).model_copy(
            update={
                "bind": site.address if len(self.remote_hosts) > 1 else None,
                "threads": assignment.threads or default_threads,
                "local_rank": (local_rank, local_size),
            }
        )
        defaults = {}
        if (gpus := site.host.gpu_count) > 1 and assignment.kind == "worker":
            defaults["CUDA_VISIBLE_DEVICES"] = str(local_rank % gpus)
        if self._process_clients and assignment.kind == "worker":
            client = self._process_clients[self.host_index_of("worker", assignment.index)]
            return await client.start(placed, defaults, on_line)
        return start_watched(site, placed, defaults, on_line)

    async def close(self) -> None:
        if not self._is_kept:
            await self.disconnect()

    async def disconnect(self) -> None:
        """Ends everything on the machines and closes the connections."""
        self._is_kept = False
        self._process_clients = []
        await self._stack.aclose()


def move_assignment(assignment: Assignment, bundle: ProjectBundle) -> Assignment:
    """Returns an assignment with its files as another machine finds them."""
    job, project, script = assignment.job, bundle.project, assignment.script
    if job is not None and job.file is not None:
        assert project is not None, "a job file goes along with its project"
        job = job.model_copy(update={"file": job.file.relative_to(project.folder)})
    if script is not None:
        script = bundle.locate(Path(script)) if assignment.kind == "worker" else None
    plugins = tuple(_move_plugin(plugin, project) for plugin in assignment.plugins)
    files = {"folder": None, "job": job, "script": script, "plugins": plugins}
    return assignment.model_copy(update=files)


def _move_plugin(plugin: Plugin, project: Project | None) -> Plugin:
    """Returns a plugin as another machine finds it: inside the project, or installed."""
    if plugin.file is None:
        return plugin
    if project is None or not plugin.file.is_relative_to(project.folder):
        raise UsageError(
            f"plugin {plugin.file} is outside the project that is copied to other "
            "machines; move it there, or choose a directory with --project"
        )
    return dataclasses.replace(plugin, file=plugin.file.relative_to(project.folder))


def start_watched(
    site: RemoteHost, placed: Assignment, defaults: dict[str, str], on_line: OnLine
) -> RemoteProcess:
    """Starts a process under a watchdog; `defaults` are variables that the machine may set."""
    threads = str(placed.threads)
    spec = watchdog_command(
        [site.python, "-m", "paceline.worker"],
        {"OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads, "PYTHONUNBUFFERED": "1"},
        site.folder or "~",
        site.lock,
        **defaults,
    )
    # Sent over stdin, because other users can read arguments and environment.
    spec["input"] = base64.b64encode(pack_assignment(placed)).decode()
    return RemoteProcess(placed.process_name, site, spec, on_line)


def choose_site(
    wanted: int, usable: Sequence[int], names: Sequence[str], copies: set[str], taken: Sequence[str]
) -> int:
    """Returns the machine for a server: the wanted one unless it is lost or holds a copy.

    Then it is the machine with the fewest servers among those without a copy, or among all.
    `names` are those of the machines, some of which may be the same; `copies` those that hold a
    copy of the shard, `taken` those of all other servers.
    """
    free = [site for site in usable if names[site] not in copies]
    if wanted in free or not usable:
        return wanted
    return min(free or usable, key=lambda site: taken.count(names[site]))


class RemoteProcess:
    """A process under a watchdog; closing the connection ends it and its descendants."""

    pid: int | None = None

    def __init__(self, who: str, site: RemoteHost, spec: dict[str, Any], on_line: OnLine) -> None:
        self.process_name = who
        self.location = f"on {site.title}"
        self._site = site
        self._keeper: RemoteProgram | None = None
        self._running = asyncio.create_task(
            run_guarded(site, spec, lambda line: on_line(who, line), self._remember)
        )

    def _remember(self, keeper: RemoteProgram) -> None:
        self._keeper = keeper

    async def wait(self) -> str | None:
        done, _ = await asyncio.wait([self._running])
        ended = done.pop()
        if ended.cancelled():
            return "ended by the supervisor"
        if (problem := ended.exception()) is not None:
            return str(problem)
        status, words = ended.result()
        if status is None:
            why = self._site.shell.why_lost
            return f"host {self._site.title} was lost" + (f" ({why})" if why else "")
        if status == 0:
            return None
        text = f"exit status {status}" if status <= 128 else f"killed by signal {status - 128}"
        return f"{text}: {words.splitlines()[-1]}" if words else text

    def send_command(self, line: str) -> None:
        if self._keeper is not None and not self._running.done():
            self._asking = asyncio.create_task(self._keeper.write(f"say {line}\n".encode()))

    def kill(self) -> None:
        self._running.cancel()


async def check_packages(sites: Sequence[RemoteHost]) -> None:
    """Checks that packages have the local versions. Raises HostError with all that differ."""
    ours = {name: _find_version(name) for name in PACKAGES}

    async def one(site: RemoteHost) -> None:
        async with run_program(site.shell, "probe", python=site.python) as probe:
            facts = await probe.ask({"do": "facts", "packages": list(PACKAGES)}, ASK_S)
        for name, version in ours.items():
            found = facts["packages"][name]
            if found == version:
                continue
            problem = f"{name} is {found} there and {version} here"
            if found is None:
                problem = f"{name} is not installed for {facts['executable']}"
            fix = f"{facts['executable']} -m pip install {name}=={version}"
            raise HostError(site.host.host, "packages", problem, format_ssh_command(site.host, fix))

    raise_host_errors(await run_on_all(list(sites), one))


def _find_version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        raise RunFailed(f"{name} is not installed on this machine") from None


def own_address_towards(sites: Sequence[RemoteHost]) -> str:
    """Returns the local address of the routes to the other machines."""
    elsewhere = [site for site in sites if site.shell.address is not None]
    if not elsewhere:
        return "127.0.0.1"
    sources = [source_address_for(site.shell.address or "") for site in elsewhere]
    found = most_common([source for source in sources if source])
    if found is None:
        raise HostError(elsewhere[0].host.host, "route", "no route to it from this machine")
    return found
