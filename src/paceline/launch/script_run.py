"""Runs any script on the machines of a pool: starts, monitors and stops it everywhere.

The first failure ends the run, as Ctrl-C does: every machine stops its processes. A machine that is
no longer reachable does so when its watchdog receives no heartbeats.
"""

import asyncio
import shlex
import signal
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from paceline.cluster.pool import Host
from paceline.cluster.ssh import SshTimeouts
from paceline.errors import RunFailed
from paceline.launch.folder_service import ProcessLogs
from paceline.launch.hosts import (
    KEEPER_END_S,
    RemoteHost,
    connect_hosts,
    prepare_hosts,
    run_guarded,
    watchdog_command,
)
from paceline.launch.project import bundle_project
from paceline.launch.script_tasks import (
    UNENDING,
    ScriptTask,
    TaskAddress,
    make_environment,
    place_tasks,
)
from paceline.launch.signals import cancel_on_signals
from paceline.telemetry.run_folder import RunFolder, write_json
from paceline.telemetry.run_lock import locked_folder

SETTLE_S = 1.0
"""After a failure that may be a consequence, wait this long for its cause to show."""
LAST_LINES = 15


@dataclass
class TaskResult:
    """The end of one task; `status` is None if its machine was lost."""

    task: ScriptTask
    status: int | None
    seconds: float

    @property
    def weight(self) -> int:
        """Causes before consequences: a lost machine, a killed process, an exit."""
        return 3 if self.status is None else 2 if self.status > 128 else 1

    @property
    def text(self) -> str:
        host, name = self.task.host.host, f"{self.task.role} {self.task.index}"
        where = f"{name} on {host}"
        if self.status is None:
            return f"host {host} was lost, with {name}"
        if self.status > 128:
            try:
                return f"{where} was killed by {signal.Signals(self.status - 128).name}"
            except ValueError:
                pass
        return f"{where} failed with exit status {self.status}"


Running = asyncio.Task[TaskResult]


class ScriptFailed(RunFailed):
    """A task failed; the command line ends with the script's own exit status."""

    def __init__(self, text: str, details: str, exit_code: int) -> None:
        super().__init__(text, details)
        self.exit_code = exit_code


@dataclass(kw_only=True)
class ScriptRun:
    """A script, the machines to run it on, and its options. Each object runs once.

    Validates everything that can be checked locally. Raises UsageError before the start.
    """

    script: Path
    args: tuple[str, ...]
    hosts: tuple[Host, ...]
    out: Path
    roles: dict[str, int] | None = None
    project: Path | None = None
    venv: bool = False
    force: bool = False
    patience: SshTimeouts = field(default_factory=SshTimeouts)
    tell: Callable[[str], None] = field(default=lambda line: None)
    """Receives progress messages for the user."""
    on_line: Callable[[str, str], None] = field(default=lambda label, line: None)
    """Receives the output of the script, with the name of the task."""

    def __post_init__(self) -> None:
        self._bundle = bundle_project(
            self.script,
            out=self.out,
            folder=self.project,
            venv=self.venv,
            kind="script",
            tell=self.tell,
        )
        assert self._bundle.project is not None, "a script goes along with its project"
        self._project = self._bundle.project
        self._command = ["-u", self._bundle.locate(self.script), *self.args]
        """Arguments of Python; the path is relative to the working directory."""
        self._tasks = place_tasks(self.hosts, self.roles)
        self._folder = RunFolder(self.out)
        self._logs = ProcessLogs(self._folder)
        self._ended: list[TaskResult] = []

    def describe(self) -> str:
        """Describes what would run where (`--dry-run`); ports are chosen by the machines."""
        project, tasks = self._project, self._tasks
        idle = [host for host in self.hosts if not any(task.host is host for task in tasks)]
        lines = project.describe([host for host in self.hosts if host not in idle])
        lines += [f"{host.host}: nothing to do" for host in idle]
        places = [
            TaskAddress(f"<address of {task.host.host}>", "<by route>", "<free port>")
            for task in tasks
        ]
        for task in tasks:
            environment = make_environment(tasks, places, task, "<free port>")
            root = project.root_on(task.host.host)
            folder = str(project.folder) if task.host.is_local else f"{root}/files"
            python = task.host.python or (sys.executable if task.host.is_local else "python3")
            if self.venv:
                python = f"{root}/venv-*/bin/python"
            lines.append(f"{task.role} {task.index} on {task.host.host}, rank {task.rank}:")
            inner = self._bundle.directory
            lines.append(f"  cd {folder}" + ("" if inner == "." else f"/{inner}"))
            lines += [f"  {name}={shlex.quote(value)}" for name, value in environment.items()]
            lines.append("  " + shlex.join([python, *self._command]))
        return "\n".join(lines)

    def launch(self) -> dict[str, Any]:
        """Runs the script and returns its result. Raises ScriptFailed, HostError or UsageError.

        The run folder keeps `result.json` and every task's output in logs/, whatever happens.
        """
        with locked_folder(self.out):
            return self._launch()

    def _launch(self) -> dict[str, Any]:
        self._folder.prepare(force=self.force, resume=False)
        config = {
            "format": 1,
            "kind": "script",
            "script": str(self.script),
            "args": list(self.args),
            "project": str(self._project.folder),
            "tasks": [
                {"who": t.who, "host": t.host.host, "rank": t.rank, "local_rank": t.local_rank}
                for t in self._tasks
            ],
            "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        }
        write_json(self._folder.config, config)
        began = time.monotonic()
        status = "failed"
        error: str | None = "the launcher failed"
        try:
            asyncio.run(self._main())
            chief = self._chief()
            status, error = ("done", None) if chief is None else ("failed", chief.text)
        except (KeyboardInterrupt, asyncio.CancelledError):
            status, error = "cancelled", "interrupted by the user"
            raise KeyboardInterrupt from None
        except Exception as problem:
            error = str(problem)
            raise
        finally:
            self._logs.close()
            result = {
                **config,
                "status": status,
                "error": error,
                "seconds": time.monotonic() - began,
                "ended": [
                    {"who": e.task.who, "status": e.status, "seconds": e.seconds}
                    for e in self._ended
                ],
            }
            write_json(self._folder.result, result)
        if chief is not None:
            code = chief.status if chief.status is not None else 1
            raise ScriptFailed(chief.text, self._details(chief), code)
        return result

    async def _main(self) -> None:
        cancel_on_signals()
        used = sorted({t.site for t in self._tasks})
        hosts = [self.hosts[site] for site in used]
        async with AsyncExitStack() as stack:
            self.tell(f"connecting to {', '.join(host.host for host in hosts)}")
            sites = await connect_hosts(hosts, self.patience, stack)
            tasks = [replace(t, site=used.index(t.site)) for t in self._tasks]
            await prepare_hosts(sites, tasks, self._bundle, self._logs.write)
            self.tell(f"{len(tasks)} tasks start; logs in {self._folder.path / 'logs'}")
            await self._watch(sites, tasks)

    async def _watch(self, sites: list[RemoteHost], tasks: Sequence[ScriptTask]) -> None:
        """Waits until all finite tasks have ended or one has failed, then ends the others."""
        places = [
            TaskAddress(site.address, site.interface, site.ports[1 + task.local_rank])
            for task, site in ((task, sites[task.site]) for task in tasks)
        ]
        meeting = sites[tasks[0].site].ports[0]
        running = {
            asyncio.create_task(
                self._one(sites[t.site], t, make_environment(tasks, places, t, meeting))
            ): t
            for t in tasks
        }
        try:
            while any(task.role not in UNENDING for task in running.values()):
                done, _ = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
                self._note(done, running)
                chief = self._chief()
                if chief is not None:
                    if chief.status is not None and running:
                        done, _ = await asyncio.wait(running, timeout=SETTLE_S)
                        self._note(done, running)
                    break
        finally:
            for each in running:
                each.cancel()
            if running:
                await asyncio.wait(running, timeout=2 * KEEPER_END_S)

    def _note(self, done: set[Running], running: dict[Running, ScriptTask]) -> None:
        for each in done:
            if running.pop(each, None) is not None:
                self._ended.append(ended := each.result())
                self.tell(ended.text if ended.status != 0 else f"{ended.task.label} is done")

    async def _one(
        self, site: RemoteHost, task: ScriptTask, environment: dict[str, str]
    ) -> TaskResult:
        began = time.monotonic()
        command, defaults = [site.python, *self._command], {}
        if task.local_size > 1:
            threads = max(1, int(site.facts["cores"]) // task.local_size)
            defaults["OMP_NUM_THREADS"] = str(threads)
        spec = watchdog_command(command, environment, site.folder, site.lock, **defaults)

        def show(line: str) -> None:
            self._logs.write(task.who, line)
            self.on_line(task.label, line)

        status, words = await run_guarded(site, spec, show)
        if words:
            show(words)
        return TaskResult(task, status, time.monotonic() - began)

    def _chief(self) -> TaskResult | None:
        """Returns the failure that explains the others: the most severe, then the first."""
        failed = [ended for ended in self._ended if ended.status != 0]
        return max(failed, key=lambda ended: ended.weight, default=None)

    def _details(self, chief: TaskResult) -> str:
        lines = self._logs.last_lines(chief.task.who, LAST_LINES)
        path = self._folder.log(chief.task.who)
        header = f"last lines of {chief.task.label} ({path}):"
        return "\n  ".join([header, *lines]) if lines else ""
