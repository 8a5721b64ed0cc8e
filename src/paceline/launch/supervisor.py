"""The supervisor: starts a run's processes, carries out what the coordinator says, ends it all.

The first failure ends the run: the process that caused it is named, everything else is killed
within seconds, and nothing is left behind, whether the run is done, failed or interrupted.
"""

from __future__ import annotations

import asyncio
import secrets
import signal
import threading
import time
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from typing import IO, Any

from paceline.errors import PacelineError, UsageError
from paceline.launch.folder_service import FolderService
from paceline.launch.hub import Hub
from paceline.launch.launcher import LaunchedProcess, Launcher
from paceline.launch.live_monitor import LiveMonitor
from paceline.protocol.coordinator import Coordinator
from paceline.protocol.membership import MemberStatus
from paceline.protocol.messages import (
    Message,
    ProcessFailing,
    StopServer,
    TelemetryForwarded,
    WorkerFinished,
)
from paceline.protocol.pace import Send, SendToServers
from paceline.protocol.run_spec import Action, EmitEvent, EndRun, RunSpec
from paceline.strategies.registry import make_pace, make_switch_policy
from paceline.telemetry.event_log import OnEvent, ProcessOutput
from paceline.telemetry.events import RunProgress
from paceline.telemetry.run_folder import RunFolder
from paceline.worker.assignment import Assignment
from paceline.worker.main import STACKS_BEGIN, STACKS_END

GRACE_S = 1.0
"""After a failure that may be a consequence, wait this long for its cause to show."""
TOGETHER_S = 0.2
"""A worker and the servers beside it go away within this time of each other."""
STARTUP_S = 60.0
"""Importing torch and meeting the others may take this long, however short the deadline."""
STACKS_S = 2.0
ORDERLY_S = 10.0
"""How long processes may take to end by themselves when the run is done."""
PROGRESS_S = 0.5
JUDGE_S = 1.0

"""Gets notes for people: kind and facts."""


@dataclass
class ProcessFailure:
    who: str
    text: str
    certainty: int
    """2: certainly a cause. 1: an exception of its own. 0: probably a consequence."""
    is_usage_error: bool = False
    details: str = ""


@dataclass
class RunOutcome:
    status: str
    error: str | None
    seconds: float
    coordinator: Coordinator
    is_usage_error: bool = False
    details: str = ""


class Supervisor:
    def __init__(
        self,
        *,
        plan: RunSpec,
        launcher: Launcher,
        folder: RunFolder,
        template: dict[str, Any],
        live: bytes | None,
        timeout_s: float,
        started_wall_s: float,
        show: OnEvent,
        memory: dict[str, Any] | None = None,
        show_output: bool = False,
        watch: LiveMonitor | None = None,
    ) -> None:
        self._plan = plan
        self._launcher = launcher
        self._folder = folder
        self._template = template
        self._live = live
        self._timeout_s = timeout_s
        self._began = started_wall_s
        self._show = show
        self._show_output = show_output
        self._monitor = watch
        self._token = secrets.token_hex(32)
        self._coordinator = Coordinator(
            plan,
            now=self._now(),
            paces=make_pace,
            policies=make_switch_policy,
            memory=memory,
        )
        self._hub = Hub(self._token, self._on_message, self._on_gone, self._on_refused)
        self._processes: list[LaunchedProcess] = []
        self._tasks: list[asyncio.Task[Any]] = []
        self._failures: list[ProcessFailure] = []
        self._gone: set[str] = set()
        self._end: EndRun | None = None
        self._finished: set[str] = set()
        self._ended = asyncio.Event()
        self._folder_service = FolderService(folder, template.get("checkpoint"))
        self._parents = launcher.place_servers(plan.servers, plan.workers)
        self._logs: dict[str, IO[str]] = {}
        self._stacks: dict[str, list[str]] = {}
        self._stacks_open: set[str] = set()
        self._progress_due = 0.0

    def _now(self) -> float:
        return time.time() - self._began

    async def run(self) -> RunOutcome:
        """Run to the end; always cleans up, also when cancelled (then the status says so)."""
        self._cancel_on_sigterm()
        try:
            if self._monitor is not None:
                await self._monitor.start(self._now, self._token)
                self._tasks.append(asyncio.create_task(self._watch_verdicts()))
            await self._start()
            await self._ended.wait()
            if self._end is not None and self._end.status == "done":
                await self._shut_down()
        except asyncio.CancelledError:
            self._carry_out(self._coordinator.stop("cancelled", "interrupted by the user"))
        finally:
            await self._clean_up()
        assert self._end is not None
        chief = self._main_failure()
        return RunOutcome(
            status=self._end.status,
            error=self._end.error,
            seconds=self._now(),
            coordinator=self._coordinator,
            is_usage_error=self._end.usage or bool(chief and chief.is_usage_error),
            details=chief.details if chief else "",
        )

    def _cancel_on_sigterm(self) -> None:
        """A batch system ends a job by SIGTERM: cancelled, with its result written."""
        task = asyncio.current_task()
        if task is not None and threading.current_thread() is threading.main_thread():
            asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)

    async def _start(self) -> None:
        try:
            await self._launcher.open(self._on_line)
            self._coordinator.members.begin(self._now())
            port = await self._hub.listen(self._launcher.host)
            for assignment in self._assign(port):
                process = await self._launcher.start(assignment, self._live, self._on_line)
                self._processes.append(process)
                self._tasks.append(asyncio.create_task(self._watch(process)))
        except PacelineError as error:
            usage = isinstance(error, UsageError)
            details = getattr(error, "details", "")
            self._fail(ProcessFailure("supervisor", str(error), 2, usage, details=details))
            return
        self._tasks.append(asyncio.create_task(self._watch_deadlines()))

    def _assign(self, port: int) -> Iterator[Assignment]:
        """What each process is told; servers without a worker beside them come first."""
        common = {
            "workers": self._plan.workers,
            "token": self._token,
            "host": self._launcher.host,
            "port": port,
            "timeout_s": self._timeout_s,
            "folder": str(self._folder.path.resolve()),
            "started_wall_s": self._began,
            **self._template,
        }
        for server, parent in enumerate(self._parents):
            if parent is None:
                yield Assignment(kind="server", index=server, **{**common, "job": None})
        for rank in range(self._plan.workers):
            yield Assignment(
                kind="worker",
                index=rank,
                servers=tuple(s for s, parent in enumerate(self._parents) if parent == rank),
                has_live_job=self._live is not None,
                **common,
            )

    # ---- what comes in ------------------------------------------------------------------------

    def _on_message(self, who: str, message: Message) -> None:
        if isinstance(message, ProcessFailing):
            weight = {"usage": 2, "own": 1, "peer": 0}[message.blame]
            text = f"{self._display_name(who)} failed{self._at_step(who)}: {message.error}"
            if message.blame == "usage":
                text = message.error
            self._fail(
                ProcessFailure(
                    who, text, weight, message.blame == "usage", details=message.traceback
                )
            )
            return
        if isinstance(message, TelemetryForwarded):
            if self._monitor is not None:
                self._monitor.record(who, message.event)
            return
        if isinstance(message, WorkerFinished):
            self._finished.add(who)
        try:
            taken, answer = self._folder_service.handle(who, message, self._now())
            if answer is not None:
                self._hub.send(who, answer)
            if taken:
                return
            self._carry_out(self._coordinator.handle(message, self._now()))
            self._show_progress()
        except Exception as error:
            # Our own fault, or a full disk: no worker must be blamed for it.
            self._fail_supervisor(error)

    def _fail_supervisor(self, error: Exception) -> None:
        text = f"the supervisor failed: {type(error).__name__}: {error}"
        details = "" if isinstance(error, OSError) else traceback.format_exc()
        self._fail(ProcessFailure("supervisor", text, 2, details=details))

    def _on_gone(self, who: str) -> None:
        self._gone.add(who)
        if self._monitor is not None:
            self._monitor.sample_now()
        if self._ended.is_set() or not who.startswith("server"):
            return  # A worker's end is told by its process, with its exit status.
        if not any(f.who == who for f in self._failures):
            # Its worker may have gone first and taken it along: that shows at once.
            asyncio.get_running_loop().call_later(TOGETHER_S, self._blame_server, who)

    def _blame_server(self, who: str) -> None:
        parent = self._parents[int(who.split("-")[1])]
        if parent is None:
            return  # Its process tells.
        told = [f.certainty for f in self._failures if f.who == f"worker-{parent}"]
        weight = 2
        if f"worker-{parent}" in self._gone:
            if not told or max(told) > 0:
                return  # The worker is the cause.
            weight = 1  # The worker lost a peer: this server, or another that shows soon.
        self._fail(
            ProcessFailure(
                who,
                f"{self._display_name(who)} (beside worker {parent}) went away without a word "
                f"after {self._coordinator.history.updates} updates: it was killed or crashed",
                weight,
            )
        )

    def _on_refused(self, text: str) -> None:
        self._log("supervisor", f"refused a connection from {text}")

    def _on_line(self, who: str, line: str) -> None:
        if line.startswith(STACKS_BEGIN):
            self._stacks_open.add(who)
            self._stacks[who] = []
        elif line.startswith(STACKS_END):
            self._stacks_open.discard(who)
        elif who in self._stacks_open:
            self._stacks[who].append(line)
        try:
            self._log(who, line)
        except OSError as error:
            self._fail_supervisor(error)
        if self._show_output:
            self._show(ProcessOutput(process=who, line=line))

    def _log(self, who: str, line: str) -> None:
        if who not in self._logs:
            path = self._folder.log(who)
            path.parent.mkdir(parents=True, exist_ok=True)
            self._logs[who] = path.open("a", encoding="utf-8")
        self._logs[who].write(line + "\n")
        self._logs[who].flush()

    async def _watch_verdicts(self) -> None:
        """Say what limits the run as soon as it can be told."""
        assert self._monitor is not None
        while True:
            await asyncio.sleep(JUDGE_S)
            try:
                for event in self._monitor.changed_verdicts(self._now()):
                    self._show(event)
            except Exception as error:
                # A rule that fails must not end a run that goes well.
                self._log("supervisor", f"verdicts: {type(error).__name__}: {error}")

    # ---- what goes out ------------------------------------------------------------------------

    def _carry_out(self, actions: list[Action]) -> None:
        for action in actions:
            if isinstance(action, Send):
                self._hub.send(f"worker-{action.worker}", action.message)
            elif isinstance(action, SendToServers):
                for server in range(action.servers):
                    self._hub.send(f"server-{server}", action.message)
            elif isinstance(action, EmitEvent):
                self._show(action.event)
            elif isinstance(action, EndRun):
                self._end = action
                self._ended.set()

    def _show_progress(self) -> None:
        now = self._now()
        if now < self._progress_due or not self._coordinator.history.samples:
            return
        self._progress_due = now + PROGRESS_S
        history = self._coordinator.history
        event = RunProgress(
            t=round(now, 6),
            epoch=history.epoch,
            samples=history.samples,
            updates=history.updates,
            loss=history.tally.loss,
        )
        if self._monitor is not None:
            self._monitor.live.progress = event
        self._show(event)

    # ---- failures -----------------------------------------------------------------------------

    async def _watch(self, process: LaunchedProcess) -> None:
        how = await process.wait()
        if self._ended.is_set() or (how is None and process.process_name in self._finished):
            return  # Done before the others: worker 0 may still be saving the model.
        # Its last words may still be on their way through the control connection.
        await asyncio.sleep(0.1)
        told = [f for f in self._failures if f.who == process.process_name]
        if self._ended.is_set() or told:
            return
        text = (
            f"{self._display_name(process.process_name)} ({process.location}) ended"
            f"{self._at_step(process.process_name)}: "
            f"{how or 'exit status 0 before the run was over'}"
        )
        last = self._last_lines(process.process_name)
        self._fail(ProcessFailure(process.process_name, text, 2, details=last))

    def _fail(self, failure: ProcessFailure) -> None:
        first = not self._failures
        self._failures.append(failure)
        if failure.certainty == 2:
            self._end_with_cause()
        elif first:
            asyncio.get_running_loop().call_later(GRACE_S, self._end_with_cause)

    def _end_with_cause(self) -> None:
        chief = self._main_failure()
        if chief is not None and not self._ended.is_set():
            self._carry_out(self._coordinator.stop("failed", chief.text))

    def _main_failure(self) -> ProcessFailure | None:
        return max(self._failures, key=lambda f: f.certainty, default=None)

    async def _watch_deadlines(self) -> None:
        while True:
            await asyncio.sleep(min(1.0, self._timeout_s / 4))
            if not self._find_stuck():
                continue
            for process in self._processes:
                process.request_stacks()
            await asyncio.sleep(min(STACKS_S, self._timeout_s))
            stuck = self._find_stuck()
            if not stuck:
                continue  # It was slow, and goes on.
            named = ", ".join(f"worker {w} (step {m.step}, {m.phase})" for w, m in stuck)
            stacks = [
                f"stacks of worker {w}:\n" + "\n".join(self._stacks.get(f"worker-{w}", ["none"]))
                for w, _ in stuck
            ]
            text = f"{named} made no progress for {self._timeout_s:g} s: stopped at the deadline"
            self._fail(
                ProcessFailure(f"worker-{stuck[0][0]}", text, 2, details="\n\n".join(stacks))
            )
            return

    def _find_stuck(self) -> list[tuple[int, MemberStatus]]:
        now = self._now()
        return [
            (worker, member)
            for worker, member in self._coordinator.members.find_stuck(now, self._timeout_s)
            if member.phase != "startup" or now - member.since > STARTUP_S
        ]

    def _display_name(self, who: str) -> str:
        return who.replace("-", " ")

    def _at_step(self, who: str) -> str:
        if not who.startswith("worker-"):
            return ""
        return f" at step {self._coordinator.members.last_step(int(who.split('-')[1]))}"

    def _last_lines(self, who: str) -> str:
        path = self._folder.log(who)
        if not path.exists():
            return ""
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
        return "\n".join(lines[-10:])

    # ---- the end ------------------------------------------------------------------------------

    async def _shut_down(self) -> None:
        """The run is done: servers are told, workers know; all get a moment to leave in order."""
        for server in range(self._plan.servers):
            self._hub.send(f"server-{server}", StopServer())
        ends = [asyncio.create_task(process.wait()) for process in self._processes]
        await asyncio.wait(ends, timeout=ORDERLY_S)

    async def _clean_up(self) -> None:
        for process in self._processes:
            process.kill()
        if self._monitor is not None:
            await self._monitor.stop()
        await self._hub.close()
        for task in self._tasks:
            task.cancel()
        ends = [asyncio.create_task(process.wait()) for process in self._processes]
        if ends:
            await asyncio.wait(ends, timeout=ORDERLY_S)
        await self._launcher.close()
        await asyncio.sleep(0)
        self._folder_service.close()
        for log in self._logs.values():
            log.close()
