"""Workers on other machines: the same processes, started under keepers through shells.

A machine is whatever gives a `Shell` (`cluster/shell.py`): one behind SSH, or a place on an engine
that has called back (`outposts.py`). A kind of machines says only how they are reached; looking at
them, copying the project, checking packages, starting, watching and ending is done here for all.
"""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

from paceline.cluster.doctor import most_common
from paceline.cluster.remote.probe import source_towards
from paceline.cluster.shell import Program, for_all, run_program, suggest
from paceline.errors import HostError, RunFailed, UsageError
from paceline.launch.launcher import OnLine, beside_workers
from paceline.launch.project import Project, find_project, read_project
from paceline.launch.sites import (
    ASK_S,
    Site,
    all_or_none,
    bring_project,
    look_around,
    make_environments,
    make_spec,
    run_kept,
)
from paceline.worker.assignment import Assignment, pack_assignment

PACKAGES = ("paceline", "torch")
"""Must be the same everywhere: messages and gradients have the form of one version."""


@dataclass(frozen=True, kw_only=True)
class Luggage:
    """What goes along to other machines, and how much is prepared there."""

    project: Project | None = None
    requirements: Path | None = None
    """Make a virtual environment from it."""
    venv_timeout_s: float = 1200.0
    tell: Callable[[str], None] = field(default=lambda line: None)
    """Gets what happens, for people."""


def pack_luggage(
    job_file: Path | None,
    *,
    out: Path,
    folder: Path | None = None,
    venv: bool = False,
    tell: Callable[[str], None] = lambda line: None,
) -> Luggage:
    """The project around a job file; a job of names needs none, unless a folder is said."""
    if job_file is None and folder is None:
        if venv:
            raise UsageError("--venv needs --project: the folder that holds requirements.txt")
        return Luggage(tell=tell)
    if job_file is not None:
        found = find_project(job_file, folder)
    else:
        assert folder is not None
        if not folder.is_dir():
            raise UsageError(f"--project {folder} is not a folder")
        found = folder.resolve()
    requirements = found / "requirements.txt" if venv else None
    if requirements is not None and not requirements.is_file():
        raise UsageError(f"--venv: {found} has no requirements.txt to make an environment from")
    # Earlier runs beside this one stay here too.
    project = read_project(found, leave_out=out.parent if out.parent.name == "runs" else out)
    if job_file is not None and job_file.relative_to(found).as_posix() not in project.files:
        raise UsageError(f"job file {job_file} is named in an ignore file of {found}")
    return Luggage(project=project, requirements=requirements, tell=tell)


class DistantLauncher:
    """A launcher for machines that are reached as `reach` says."""

    engine = "distant"
    carries_live = False
    threads = 0
    """Of a worker, where the user has not said; 0: a machine's cores divided by its workers."""

    def __init__(self, luggage: Luggage) -> None:
        self.host = "127.0.0.1"
        self.luggage = luggage
        self.sites: list[Site] = []
        self._stack = AsyncExitStack()

    def pack(self, job_file: Path | None, out: Path) -> None:
        if job_file is not None and self.luggage.project is None:
            self.luggage = pack_luggage(job_file, out=out, tell=self.luggage.tell)

    async def reach(self, stack: AsyncExitStack) -> list[Site]:
        """Reach the machines; what is opened is closed with the stack."""
        raise NotImplementedError

    @property
    def workers(self) -> int:
        """How many it has places for."""
        raise NotImplementedError

    def site_of(self, assignment: Assignment) -> int:
        """Which machine a worker, or a server of its own, is started on."""
        raise NotImplementedError

    def seat_servers(self, servers: int, workers: int) -> list[int | None]:
        return beside_workers(servers, workers)

    async def open(self, on_line: OnLine) -> None:
        luggage = self.luggage
        self.sites = sites = await self.reach(self._stack)
        await look_around(sites, ())
        if luggage.project is not None:
            await bring_project(sites, luggage.project, ".", luggage.tell)
        if luggage.requirements is not None:
            luggage.tell("making the environments")
            await make_environments(sites, luggage.requirements, luggage.venv_timeout_s, on_line)
        await check_packages(sites)
        self.host = find_own_address(sites)

    async def start(
        self, assignment: Assignment, live: bytes | None, on_line: OnLine
    ) -> DistantProcess:
        assert live is None, "live objects go to child processes only"
        site = self.sites[self.site_of(assignment)]
        told = assignment.model_copy(
            update={
                "bind": site.address if len(self.sites) > 1 else None,
                "folder": None,
                "threads": self._threads_on(site, assignment),
                "beside": self._place_on(site, assignment),
                "job": self._move_job(assignment),
            }
        )
        threads = str(told.threads)
        spec = make_spec(
            [site.python, "-m", "paceline.worker"],
            {"OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads, "PYTHONUNBUFFERED": "1"},
            site.folder or "~",
            site.lock,
        )
        # Over standard input, as everything: arguments and environment can be read by others.
        spec["input"] = base64.b64encode(pack_assignment(told)).decode()
        return DistantProcess(told.who, site, spec, on_line)

    def _threads_on(self, site: Site, assignment: Assignment) -> int:
        """Cores divided by the workers there, where the user has not said how many."""
        if assignment.threads > 0 or self.threads > 0:
            return assignment.threads or self.threads
        _, here = self._place_on(site, assignment)
        return max(1, int(site.facts["cores"]) // here)

    def _place_on(self, site: Site, assignment: Assignment) -> tuple[int, int]:
        """Which of the workers there it is, and how many there are."""
        others = [
            assignment.model_copy(update={"kind": "worker", "index": rank})
            for rank in range(assignment.workers)
        ]
        here = [o.index for o in others if self.sites[self.site_of(o)].host == site.host]
        return here.index(assignment.index) if assignment.index in here else 0, max(1, len(here))

    def _move_job(self, assignment: Assignment) -> Any:
        """The job file as the machine finds it: inside the project, where the process starts."""
        job, project = assignment.job, self.luggage.project
        if job is None or job.file is None:
            return job
        assert project is not None, "a job file goes along with its project"
        return job.model_copy(update={"file": job.file.relative_to(project.folder)})

    async def close(self) -> None:
        await self._stack.aclose()


class DistantProcess:
    """A process under a keeper; ending the conversation ends it, and all that it started."""

    def __init__(self, who: str, site: Site, spec: dict[str, Any], on_line: OnLine) -> None:
        self.who = who
        self.place = f"on {site.title}"
        self._site = site
        self._keeper: Program | None = None
        self._running = asyncio.create_task(
            run_kept(site, spec, lambda line: on_line(who, line), self._remember)
        )

    def _remember(self, keeper: Program) -> None:
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

    def ask_stacks(self) -> None:
        if self._keeper is not None and not self._running.done():
            self._asking = asyncio.create_task(self._keeper.write(b"say stacks\n"))

    def kill(self) -> None:
        self._running.cancel()


async def check_packages(sites: Sequence[Site]) -> None:
    """Paceline and torch must be there, in our versions; each machine that lacks one is named."""
    ours = {name: _find_version(name) for name in PACKAGES}

    async def one(site: Site) -> None:
        async with run_program(site.shell, "probe", python=site.python) as probe:
            facts = await probe.ask({"do": "facts", "packages": list(PACKAGES)}, ASK_S)
        for name, version in ours.items():
            found = facts["packages"][name]
            if found == version:
                continue
            problem = (
                f"{name} is not installed for {facts['executable']}"
                if found is None
                else f"{name} is {found} there and {version} here"
            )
            fix = f"{facts['executable']} -m pip install {name}=={version}"
            raise HostError(site.host.host, "packages", problem, suggest(site.host, fix))

    all_or_none(await for_all(list(sites), one))


def _find_version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        raise RunFailed(f"{name} is not installed here") from None


def find_own_address(sites: Sequence[Site]) -> str:
    """Our address as the others reach it: by this machine's routes to them, never by its name."""
    elsewhere = [site for site in sites if site.shell.address is not None]
    if not elsewhere:
        return "127.0.0.1"
    sources = [source_towards(site.shell.address or "") for site in elsewhere]
    found = most_common([source for source in sources if source])
    if found is None:
        raise HostError(elsewhere[0].host.host, "route", "there is no route to it from here")
    return found
