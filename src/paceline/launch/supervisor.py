"""The supervisor: starts a run's processes, executes the coordinator's actions, and cleans up.

A lost worker leaves the run, and is started again if possible, as long as enough others remain. Any
other failure ends the run: the process that caused it is named, all others are killed within
seconds, and no process remains, whether the run is done, failed or interrupted.
"""

import asyncio
import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from paceline.errors import PacelineError, UsageError
from paceline.launch.attendance import Attendance
from paceline.launch.deadlines import DeadlineWatch
from paceline.launch.failure import CERTAINTY_BY_BLAME, GRACE_S, Certainty, FailureHandler
from paceline.launch.fault_injection import FaultInjector, FaultTarget
from paceline.launch.folder_service import FolderService, ProcessLogs
from paceline.launch.guests import Guests
from paceline.launch.hub import Hub
from paceline.launch.launcher import LaunchedProcess, Launcher
from paceline.launch.live_monitor import LiveMonitor, ProgressNotices
from paceline.launch.restarts import RestartPolicy
from paceline.launch.signals import cancel_on_signals
from paceline.launch.succession import ADOPT_S, Adoption, Succession
from paceline.protocol.coordinator import Coordinator
from paceline.protocol.history import CoordinatorMemory
from paceline.protocol.messages import (
    ExchangeFailed,
    LeaveRequested,
    Message,
    ProcessFailing,
    ServerReady,
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
    WriteJournal,
)
from paceline.specs.fault import InjectedFault
from paceline.strategies.registry import make_pace, make_switch_policy
from paceline.telemetry.result import RunOutcome
from paceline.telemetry.run_folder import OnEvent, ProcessOutput, RunFolder
from paceline.worker.assignment import Assignment

SHUTDOWN_TIMEOUT_S = 10.0
"""Time for processes to exit by themselves when the run is done."""
LAST_LINES = 10


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
    adoption: Adoption | None = None
    """The run to continue with the processes that another supervisor has left."""
    orphan_grace_s: float = 0.0
    """Time that processes wait for another supervisor if this one is lost."""

    def __post_init__(self) -> None:
        self._token = secrets.token_hex(32)
        if self.adoption is not None:
            self._token = self.adoption.journal.head.token
        heritage = (self.folder, self._token, self.started_wall_s, self.adoption)
        self._succession = Succession(*heritage) if self.plan.journaled else None
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
            on_return=self._on_return,
            incarnation=self._succession.incarnation if self._succession is not None else 0,
        )
        self._processes: dict[str, LaunchedProcess] = {}
        """Processes that are part of the run, by name."""
        self._started: list[LaunchedProcess] = []
        self._restarts = RestartPolicy(self.restarts)
        self._tasks: list[asyncio.Task[Any]] = []
        self._end: EndRun | None = None
        self._finished: set[str] = set()
        self._has_returned = False
        """True if connections were cut, until the view is renewed."""
        self._ended = asyncio.Event()
        self._folder_service = FolderService(self.folder, self.template.get("checkpoint"))
        self._parents = self.launcher.place_servers(self.plan.servers, self.plan.workers)
        if self.plan.is_elastic:
            self._parents = self.launcher.separate_servers(self._parents, self.plan.shards)
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
        self._guests = Guests(self._attendance, self.launcher, self.template, self.folder.path)
        target = FaultTarget(
            self.memory, self._parents, self._processes, self.show, self._hub.drop_all
        )
        self._faults = FaultInjector(self.faults, target)
        self._failures = FailureHandler(
            self._coordinator, self._parents, self._faults.explain, self._carry_out
        )
        self._deadlines = DeadlineWatch(
            *(self._coordinator, self.timeout_s, self._processes, self._logs.stacks, self._now),
            *(self._lose, self._failures.fail, self._is_superseded),
        )
        live = self.monitor.live if self.monitor is not None else None
        self._progress = ProgressNotices(self.show, live)

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
                self._stop_joining()
                for server in self._coordinator.view.servers:
                    self._hub.send(f"server-{server}", StopServer())
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
            if self._succession is not None:
                self._succession.announce(self.launcher.host, port)
            common = {
                "workers": self.plan.workers,
                "token": self._token,
                "host": self.listen or self.launcher.host,
                "port": port,
                "timeout_s": self.timeout_s,
                "elastic": self.plan.is_elastic,
                "orphan_grace_s": self.orphan_grace_s if self.plan.journaled else 0.0,
                "incarnation": self._hub.incarnation,
                "folder": str(self.folder.path.resolve()),
                "started_wall_s": self.started_wall_s,
                **self.template,
            }
            assignments = list(self._attendance.make_assignments(common))
            if self.adoption is not None:
                self._adopt(self.adoption)
            else:
                for assignment in assignments:
                    await self._launch(assignment)
            if self.plan.can_lose_workers:
                await self._guests.open(self.listen, self.show)
        except PacelineError as error:
            is_usage_error, details = isinstance(error, UsageError), getattr(error, "details", "")
            self._failures.fail("supervisor", str(error), details, is_usage_error=is_usage_error)
            return
        self._tasks.append(asyncio.create_task(self._deadlines.watch()))

    async def _launch(self, assignment: Assignment) -> None:
        if assignment.kind == "worker" and assignment.index in self._guests:
            process = await self._guests.start(assignment, self._on_line)
        else:
            live = self.live if assignment.has_live_job else None
            process = await self.launcher.start(assignment, live, self._on_line)
        if self._succession is not None and process.pid is not None:
            self._succession.add_process(assignment.process_name, process.pid)
        self._take(process)

    def _take(self, process: LaunchedProcess) -> None:
        self._started.append(process)
        self._processes[process.process_name] = process
        self._tasks.append(asyncio.create_task(self._watch(process)))

    def _adopt(self, adoption: Adoption) -> None:
        """Takes over the processes of the run that are alive, and replaces the other workers."""
        for process in adoption.take_over():
            self._take(process)
        workers = sorted({*range(self.plan.workers), *adoption.memory["position"].members})
        servers = adoption.memory["position"].servers
        for who in [*(f"worker-{w}" for w in workers), *(f"server-{s}" for s in servers)]:
            if who not in self._processes:
                self._replace(who, f"{who.replace('-', ' ')} was lost with the coordinator")
        asyncio.get_running_loop().call_later(ADOPT_S, self._lose_absent)

    def _lose_absent(self) -> None:
        for who in self._attendance.members:
            if who not in self._hub.members:
                self._lose(who, f"{who.replace('-', ' ')} did not return within {ADOPT_S:g} s")

    # ---- what comes in ------------------------------------------------------------------------

    def _on_return(self, who: str) -> None:
        """Repeats what may be lost, when processes whose connections were cut are back."""
        if not self._has_returned:
            self._has_returned = True
            asyncio.get_running_loop().call_later(GRACE_S, self._renew_after_cut)

    def _renew_after_cut(self) -> None:
        self._has_returned = False
        view = self._coordinator.view.number
        self._renew(view, "the connections to the coordinator were cut")

    def _on_message(self, who: str, message: Message, view: int | None) -> None:
        if self._is_superseded():
            return
        if isinstance(message, ServerReady) and self._has_returned and self._succession:
            for order in self._succession.orders_after(message.version):
                self._hub.send(who, order)
        if isinstance(message, ProcessFailing):
            if message.blame == "usage":
                self._failures.fail(who, message.error, message.traceback, is_usage_error=True)
            else:
                text = f"{who.replace('-', ' ')} failed{self._at_step(who)}: {message.error}"
                certainty = CERTAINTY_BY_BLAME[message.blame]
                if remark := self._failures.find_error_of_job(message.error, certainty):
                    self._failures.fail(who, f"{text}; {remark}", message.traceback, certainty)
                else:
                    self._lose(who, text, message.traceback, certainty)
            return
        if isinstance(message, TelemetryForwarded):
            if self.monitor is not None:
                self.monitor.record(who, message.event)
            return
        if isinstance(message, LeaveRequested):
            self._attendance.retire(message.worker)
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
                self._progress.show(self._coordinator.history, self._now())
                self._faults.inject_due(self._coordinator.history.samples, self._now())
        except Exception as error:
            # A bug of ours, or a full disk: no worker must be blamed for it.
            self._failures.fail_supervisor(error)

    def _is_superseded(self, *, check: bool = False) -> bool:
        """Returns whether another coordinator has taken over the run, and ends this one then."""
        why = self._succession.why_superseded(check=check) if self._succession else None
        if why is not None:
            self._end = EndRun("superseded", why)
            self._ended.set()
        return why is not None

    def _on_gone(self, who: str) -> None:
        if self._is_superseded(check=True):
            return
        if self.monitor is not None:
            self.monitor.sample_now()
        self._failures.note_gone(who)

    def _on_line(self, who: str, line: str) -> None:
        try:
            self._logs.add_output(who, line)
        except OSError as error:
            self._failures.fail_supervisor(error)
        if self.plan.custom_loop:
            self.show(ProcessOutput(process=who, line=line))

    # ---- what goes out ------------------------------------------------------------------------

    def _carry_out(self, actions: list[Action]) -> None:
        for action in actions:
            if isinstance(action, Send):
                self._hub.send(f"worker-{action.worker}", action.message)
            elif isinstance(action, SendToServers):
                for server in action.holders:
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
            elif isinstance(action, WriteJournal):
                if self._succession is not None:
                    self._succession.write(action.entry)
            elif isinstance(action, EndRun) and not self._is_superseded():
                self._end = action
                self._ended.set()

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
        """Continues without a worker or server if the run can, else ends the run."""
        if self._ended.is_set() or who not in self._processes:
            return
        text += self._faults.explain(who)
        if not self._is_superseded(check=True):
            self._replace(who, text, details, certainty)

    def _replace(
        self, who: str, text: str, details: str = "", certainty: Certainty = Certainty.CAUSE
    ) -> None:
        """Continues without a worker or server if the run can, and starts it again if it may be."""
        delay_s = None
        if who in self._attendance.assignments:  # Else it had joined a lost coordinator.
            delay_s, text = self._restarts.decide(who, text)
        returns = delay_s is not None
        if not self._attendance.can_lose(who, returns=returns):
            self._failures.fail(who, text + self._attendance.describe_end(who), details, certainty)
            return
        self._logs.write("supervisor", "\n".join(filter(None, (text, details))))
        self._drop(who)
        if delay_s is not None:
            restarting = self._attendance.restart(who, delay_s)
            self._tasks.append(asyncio.create_task(restarting))
        self._attendance.lose(who, text, returns=returns)

    def _drop(self, who: str) -> None:
        """Ends a process and ignores everything that it still says."""
        if (process := self._processes.pop(who, None)) is not None:
            process.kill()
        self._hub.forget(who)
        self._finished.discard(who)

    def _stop_joining(self) -> None:
        """Ends processes that have not joined yet when the run is done."""
        for who in self._processes.keys() - set(self._attendance.members):
            self._drop(who)

    def _renew(self, view: int | None, reason: str) -> None:
        if view is not None:
            self._carry_out(self._coordinator.renew(view, reason, self._now()))

    def _at_step(self, who: str) -> str:
        kind, _, index = who.partition("-")
        if kind == "worker":
            return f" at step {self._coordinator.members.last_step(int(index))}"
        return f" after {self._coordinator.history.updates} updates" if kind == "server" else ""

    # ---- the end ------------------------------------------------------------------------------

    async def _wait_for_exits(self) -> None:
        ends = [asyncio.create_task(process.wait()) for process in self._started]
        if ends:
            await asyncio.wait(ends, timeout=SHUTDOWN_TIMEOUT_S)

    async def _clean_up(self) -> None:
        is_superseded = self._is_superseded(check=True)
        if not is_superseded:
            for process in self._started:
                process.kill()
        if self.monitor is not None:
            await self.monitor.stop()
        await self._hub.close()
        for task in self._tasks:
            task.cancel()
        self._faults.close()
        if not is_superseded:
            await self._wait_for_exits()
            status = self._end.status if self._end is not None else "failed"
            await self._guests.close(f"the run is over: {status}")
        await self.launcher.close()
        await asyncio.sleep(0)
        if self._succession is not None:
            self._succession.close()
        self._folder_service.close()
        self._logs.close()
