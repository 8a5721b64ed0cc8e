"""The supervisor: starts a run's processes, executes the coordinator's actions, and cleans up.

A lost worker leaves the run, and is started again if possible, as long as enough others remain. Any
other failure ends the run: the process that caused it is named, all others are killed within
seconds, and no process remains, whether the run is done, failed or interrupted.
"""

import asyncio
import secrets
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from paceline.errors import PacelineError, UsageError
from paceline.launch.attendance import Attendance
from paceline.launch.deadlines import Deadlines
from paceline.launch.failure import CERTAINTY_BY_BLAME, Certainty, FailureLog, ProcessFailure
from paceline.launch.fault_injection import FaultInjector, FaultTarget
from paceline.launch.folder_service import FolderService, ProcessLogs
from paceline.launch.guests import JOIN_FILE, Guests
from paceline.launch.hub import Hub
from paceline.launch.launcher import LaunchedProcess, Launcher
from paceline.launch.live_monitor import LiveMonitor
from paceline.launch.restarts import RestartPolicy
from paceline.launch.signals import cancel_on_signals
from paceline.protocol.coordinator import Coordinator
from paceline.protocol.history import CoordinatorMemory
from paceline.protocol.messages import (
    ExchangeFailed,
    LeaveRequested,
    Message,
    ProcessFailing,
    StopServer,
    TelemetryForwarded,
    WorkerFinished,
)
from paceline.protocol.pace import Send, SendToServers
from paceline.protocol.run_spec import (
    Action,
    EmitEvent,
    EndRun,
    InterruptWorker,
    RefuseWorker,
    ReleaseWorker,
    RunSpec,
)
from paceline.specs.fault import InjectedFault
from paceline.strategies.registry import make_pace, make_switch_policy
from paceline.telemetry.result import RunOutcome
from paceline.telemetry.run_folder import ListenNotice, OnEvent, ProcessOutput, RunFolder
from paceline.worker.assignment import Assignment

GRACE_S = 1.0
"""Wait for the cause of a failure that may be a consequence."""
CORRELATED_EXIT_S = 0.2
"""A worker and the servers it started are lost within this time of each other."""
STACKS_S = 2.0
SHUTDOWN_TIMEOUT_S = 10.0
"""Time for processes to exit by themselves when the run is done."""
LAST_LINES = 10
PROGRESS_S = 0.5
LATE_S = 2.0
"""If this process itself was stopped for this long, it has missed heartbeats."""


@dataclass(kw_only=True, eq=False)
class Supervisor:
    """Runs one coordinator over real processes."""

    plan: RunSpec
    launcher: Launcher
    folder: RunFolder
    template: Mapping[str, Any]
    live: bytes | None
    timeout_s: float
    started_wall_s: float
    show: OnEvent
    memory: CoordinatorMemory | None
    monitor: LiveMonitor | None
    restarts: int = 0
    """Restarts of each lost worker."""
    coordinator: type[Coordinator] = Coordinator
    """Makes the decisions; those of training by default."""
    faults: Sequence[InjectedFault] = ()
    listen: str | None = None
    """Address at which machines can join; by default that of the launcher."""

    def __post_init__(self) -> None:
        self._token = secrets.token_hex(32)
        self._coordinator = self.coordinator(
            self.plan,
            now=self._now(),
            paces=make_pace,
            policies=make_switch_policy,
            memory=self.memory,
        )
        self._logs = ProcessLogs(self.folder)
        self._hub = Hub(
            *(self._token, self._on_message, self._on_gone),
            lambda text: self._logs.write("supervisor", f"refused a connection from {text}"),
        )
        self._processes: dict[str, LaunchedProcess] = {}
        """Processes that are part of the run, by name."""
        self._started: list[LaunchedProcess] = []
        self._restarts = RestartPolicy(self.restarts)
        self._tasks: list[asyncio.Task[Any]] = []
        self._failures = FailureLog()
        self._end: EndRun | None = None
        self._finished: set[str] = set()
        self._ended = asyncio.Event()
        self._folder_service = FolderService(self.folder, self.template.get("checkpoint"))
        self._parents = self.launcher.place_servers(self.plan.servers, self.plan.workers)
        if self.plan.is_elastic and self.launcher.starts_servers:
            self._parents = [None] * self.plan.servers
        self._attendance = Attendance(
            coordinator=self._coordinator,
            parents=self._parents,
            processes=self._processes,
            has_live_job=self.live is not None,
            now=self._now,
            launch=self._launch,
            carry_out=self._carry_out,
            log=lambda line: self._logs.write("supervisor", line),
        )
        self._guests = Guests(
            self._attendance,
            self.launcher,
            lambda: self.launcher.bundle_for_guests(self.template, self.folder.path),
            self._attendance.log,
        )
        target = FaultTarget(
            self.memory, self._parents, self._processes, self.show, self._hub.drop_all
        )
        self._faults = FaultInjector(self.faults, target)
        self._progress_due = 0.0

    def _now(self) -> float:
        return time.time() - self.started_wall_s

    async def run(self) -> RunOutcome:
        """Runs to the end and always cleans up; a cancelled run has the status `cancelled`."""
        cancel_on_signals()
        try:
            if self.monitor is not None:
                await self.monitor.start(self._now, self._token)
                verdicts = self.monitor.watch_verdicts(self._now, self.show, self._logs.write)
                self._tasks.append(asyncio.create_task(verdicts))
            await self._start()
            await self._ended.wait()
            if self._end is not None and self._end.status == "done":
                for server in range(self.plan.servers):
                    self._hub.send(f"server-{server}", StopServer())
                self._stop_joining()
                await self._wait_for_exits()
        except asyncio.CancelledError:
            self._carry_out(self._coordinator.stop("cancelled", "interrupted by the user"))
        finally:
            await self._clean_up()
        assert self._end is not None
        cause = self._failures.cause
        return RunOutcome(
            status=self._end.status,
            error=self._end.error,
            seconds=self._now(),
            coordinator=self._coordinator,
            is_usage_error=self._end.usage or bool(cause and cause.is_usage_error),
            details=cause.details if cause else "",
        )

    async def _start(self) -> None:
        try:
            await self.launcher.open(self._on_line)
            self._coordinator.members.begin(self._now())
            port = await self._hub.listen(self.listen or self.launcher.host)
            common = {
                "workers": self.plan.workers,
                "token": self._token,
                "host": self.listen or self.launcher.host,
                "port": port,
                "timeout_s": self.timeout_s,
                "elastic": self.plan.is_elastic,
                "folder": str(self.folder.path.resolve()),
                "started_wall_s": self.started_wall_s,
                **self.template,
            }
            for assignment in self._attendance.make_assignments(common):
                await self._launch(assignment)
            if self.plan.is_elastic:
                file = self.folder.path / JOIN_FILE
                address = await self._guests.open(self.listen or self.launcher.host, file)
                if self.listen is not None:
                    self.show(ListenNotice(address=address, token_file=file))
        except PacelineError as error:
            is_usage_error, details = isinstance(error, UsageError), getattr(error, "details", "")
            self._fail("supervisor", str(error), details, is_usage_error=is_usage_error)
            return
        self._tasks.append(asyncio.create_task(self._watch_deadlines()))

    async def _launch(self, assignment: Assignment) -> None:
        if assignment.kind == "worker" and assignment.index in self._guests:
            process = await self._guests.start(assignment, self._on_line)
        else:
            live = self.live if assignment.has_live_job else None
            process = await self.launcher.start(assignment, live, self._on_line)
        self._started.append(process)
        self._processes[assignment.process_name] = process
        self._tasks.append(asyncio.create_task(self._watch(process)))

    # ---- what comes in ------------------------------------------------------------------------

    def _on_message(self, who: str, message: Message, view: int | None) -> None:
        if isinstance(message, ProcessFailing):
            if message.blame == "usage":
                self._fail(who, message.error, message.traceback, is_usage_error=True)
            else:
                text = f"{who.replace('-', ' ')} failed{self._at_step(who)}: {message.error}"
                self._lose(who, text, message.traceback, CERTAINTY_BY_BLAME[message.blame])
            return
        if isinstance(message, TelemetryForwarded):
            if self.monitor is not None:
                self.monitor.record(who, message.event)
            return
        if isinstance(message, LeaveRequested):
            if (why := self._attendance.retire(message.worker)) is not None:
                self._logs.write("supervisor", why)
            return
        if isinstance(message, WorkerFinished):
            self._finished.add(who)
        if isinstance(message, ExchangeFailed):
            # The loss of the other worker is usually noticed first.
            text = f"{who.replace('-', ' ')}: {message.error}"
            asyncio.get_running_loop().call_later(GRACE_S, self._renew, view, text)
        try:
            taken, answer = self._folder_service.handle(who, message, self._now())
            if answer is not None:
                self._hub.send(who, answer)
            if not taken:
                self._carry_out(self._coordinator.handle(message, self._now(), view))
                self._show_progress()
                self._faults.inject_due(self._coordinator.history.samples, self._now())
        except Exception as error:
            # A bug of ours, or a full disk: no worker must be blamed for it.
            self._fail_supervisor(error)

    def _fail_supervisor(self, error: Exception) -> None:
        text = f"the supervisor failed: {type(error).__name__}: {error}"
        details = "" if isinstance(error, OSError) else traceback.format_exc()
        self._fail("supervisor", text, details)

    def _on_gone(self, who: str) -> None:
        self._failures.mark_gone(who)
        if self.monitor is not None:
            self.monitor.sample_now()
        if self._ended.is_set() or not who.startswith("server"):
            return  # A worker's end is reported by its process, with the exit status.
        if not self._failures.has_failed(who):
            # Its worker may have exited first and ended it: that is known at once.
            asyncio.get_running_loop().call_later(CORRELATED_EXIT_S, self._blame_server, who)

    def _blame_server(self, who: str) -> None:
        parent = self._parents[int(who.split("-")[1])]
        if parent is None:
            return  # Its process reports it.
        if (certainty := self._failures.certainty_of_server_loss(parent)) is not None:
            text = (
                f"{who.replace('-', ' ')} (started by worker {parent}) exited unexpectedly "
                f"after {self._coordinator.history.updates} updates: it was killed or crashed"
            )
            self._fail(who, text, certainty=certainty)

    def _on_line(self, who: str, line: str) -> None:
        try:
            self._logs.add_output(who, line)
        except OSError as error:
            self._fail_supervisor(error)
        if self.plan.custom_loop:
            self.show(ProcessOutput(process=who, line=line))

    # ---- what goes out ------------------------------------------------------------------------

    def _carry_out(self, actions: list[Action]) -> None:
        for action in actions:
            if isinstance(action, Send):
                self._hub.send(f"worker-{action.worker}", action.message)
            elif isinstance(action, SendToServers):
                for server in range(action.servers):
                    self._hub.send(f"server-{server}", action.message)
            elif isinstance(action, EmitEvent):
                self._faults.observe(action.event)
                self.show(action.event)
            elif isinstance(action, InterruptWorker):
                self._hub.interrupt(f"worker-{action.worker}", action.view)
            elif isinstance(action, RefuseWorker):
                self._logs.write("supervisor", f"refused: {action.reason}")
                self._drop(f"worker-{action.worker}")
                self._guests.refuse(action.worker, action.reason)
            elif isinstance(action, ReleaseWorker):
                process = self._processes.pop(f"worker-{action.worker}")
                self._guests.release(action.worker, process)
            elif isinstance(action, EndRun):
                self._end = action
                self._ended.set()

    def _show_progress(self) -> None:
        now, history = self._now(), self._coordinator.history
        if now < self._progress_due or not history.samples:
            return
        self._progress_due = now + PROGRESS_S
        event = history.describe_progress(round(now, 6))
        if self.monitor is not None:
            self.monitor.live.progress = event
        self.show(event)

    # ---- failures -----------------------------------------------------------------------------

    async def _watch(self, process: LaunchedProcess) -> None:
        how, who = await process.wait(), process.process_name
        if self._ended.is_set() or (how is None and who in self._finished):
            return
        # Its last message may still be in transit on the control connection.
        await asyncio.sleep(0.1)
        if self._ended.is_set() or self._processes.get(who) is not process:
            return
        if self._failures.has_failed(who):
            return
        text = (
            f"{who.replace('-', ' ')} ({process.location}) ended{self._at_step(who)}: "
            f"{how or 'exit status 0 before the run was over'}"
        )
        self._lose(who, text, "\n".join(self._logs.last_lines(who, LAST_LINES)))

    def _lose(
        self, who: str, text: str, details: str = "", certainty: Certainty = Certainty.CAUSE
    ) -> None:
        """Continues without a worker if the run can, else ends the run."""
        kind, _, index = who.partition("-")
        if self._ended.is_set() or who not in self._processes:
            return
        text += self._faults.explain(who)
        if kind != "worker" or not self._coordinator.can_lose(int(index)):
            self._fail(who, text, details, certainty)
            return
        worker = int(index)
        self._logs.write("supervisor", "\n".join(filter(None, (text, details))))
        self._drop(who)
        delay_s = self._restarts.next_delay_s(worker, text)
        if delay_s is not None:
            restarting = self._attendance.restart(worker, delay_s)
            self._tasks.append(asyncio.create_task(restarting))
        elif why := self._restarts.why_excluded(worker):
            text = f"{text}; {why}"
        self._carry_out(self._coordinator.lose(worker, text, self._now()))

    def _drop(self, who: str) -> None:
        """Ends a process and ignores everything that it still says."""
        self._processes.pop(who).kill()
        self._hub.forget(who)
        self._finished.discard(who)

    def _stop_joining(self) -> None:
        """Ends workers that have not joined yet when the run is done."""
        members = {f"worker-{worker}" for worker in self._coordinator.view.workers}
        for who in [w for w in self._processes if w.startswith("worker-") and w not in members]:
            self._drop(who)

    def _renew(self, view: int | None, reason: str) -> None:
        if view is not None:
            self._carry_out(self._coordinator.renew(view, reason, self._now()))

    def _fail(
        self,
        who: str,
        text: str,
        details: str = "",
        certainty: Certainty = Certainty.CAUSE,
        *,
        is_usage_error: bool = False,
    ) -> None:
        first = self._failures.add(ProcessFailure(who, text, certainty, is_usage_error, details))
        if certainty == Certainty.CAUSE:
            self._end_with_cause()
        elif first:
            asyncio.get_running_loop().call_later(GRACE_S, self._end_with_cause)

    def _end_with_cause(self) -> None:
        cause = self._failures.cause
        if cause is not None and not self._ended.is_set():
            why = cause.text + self._faults.explain(cause.who)
            self._carry_out(self._coordinator.stop("failed", why))

    async def _watch_deadlines(self) -> None:
        deadlines = Deadlines(self._coordinator.members, self.timeout_s)
        while True:
            due = self._now() + deadlines.interval_s
            await asyncio.sleep(deadlines.interval_s)
            if self._now() > due + LATE_S:
                self._coordinator.members.restart_timers(self._now())
            if self.plan.is_elastic:
                for worker, text in deadlines.find_silent(self._now()):
                    self._lose(f"worker-{worker}", text)
            if not deadlines.find_stuck(self._now()):
                continue
            for process in self._processes.values():
                process.send_command("stacks")
            await asyncio.sleep(min(STACKS_S, self.timeout_s))
            stuck = deadlines.find_stuck(self._now())
            if not stuck:
                continue  # It was slow, and has continued.
            if all(self._coordinator.can_lose(worker) for worker, _ in stuck):
                for worker, member in stuck:
                    self._lose(f"worker-{worker}", deadlines.describe([(worker, member)]))
                continue
            stacks = [
                f"stacks of worker {w}:\n" + self._logs.stacks(f"worker-{w}") for w, _ in stuck
            ]
            text = f"{deadlines.describe(stuck)}; the run was stopped"
            self._fail(f"worker-{stuck[0][0]}", text, "\n\n".join(stacks))
            return

    def _at_step(self, who: str) -> str:
        if not who.startswith("worker-"):
            return ""
        return f" at step {self._coordinator.members.last_step(int(who.split('-')[1]))}"

    # ---- the end ------------------------------------------------------------------------------

    async def _wait_for_exits(self) -> None:
        ends = [asyncio.create_task(process.wait()) for process in self._started]
        if ends:
            await asyncio.wait(ends, timeout=SHUTDOWN_TIMEOUT_S)

    async def _clean_up(self) -> None:
        for process in self._started:
            process.kill()
        if self.monitor is not None:
            await self.monitor.stop()
        await self._hub.close()
        for task in self._tasks:
            task.cancel()
        self._faults.close()
        await self._wait_for_exits()
        status = self._end.status if self._end is not None else "failed"
        await self._guests.close(f"the run is over: {status}")
        await self.launcher.close()
        await asyncio.sleep(0)
        self._folder_service.close()
        self._logs.close()
