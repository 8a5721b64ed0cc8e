"""Workers that come to a run in progress, and those that leave it before its end."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from paceline.errors import PacelineError, UsageError
from paceline.launch.launcher import LaunchedProcess
from paceline.protocol.coordinator import Coordinator
from paceline.protocol.run_spec import Action
from paceline.worker.assignment import Assignment


@dataclass(kw_only=True, eq=False)
class Attendance:
    """Decides who may come and go, and gives new workers their number and assignment."""

    coordinator: Coordinator
    parents: Sequence[int | None]
    """Workers that started the servers; None for a server that was launched."""
    processes: dict[str, LaunchedProcess]
    has_live_job: bool
    now: Callable[[], float]
    launch: Callable[[Assignment], Awaitable[None]]
    carry_out: Callable[[list[Action]], None]
    log: Callable[[str], None]
    assignments: dict[str, Assignment] = field(default_factory=dict)
    """Assignments of all processes so far, by name."""

    def make_assignments(self, common: Mapping[str, Any]) -> Iterator[Assignment]:
        """The assignment of each process; servers without a parent worker come first."""
        for server, parent in enumerate(self.parents):
            if parent is None:
                assignment = Assignment(kind="server", index=server, **{**common, "job": None})
                self.assignments[assignment.process_name] = assignment
                yield assignment
        for rank in range(self.coordinator.plan.workers):
            assignment = Assignment(
                kind="worker",
                index=rank,
                servers=tuple(s for s, parent in enumerate(self.parents) if parent == rank),
                has_live_job=self.has_live_job,
                **common,
            )
            self.assignments[assignment.process_name] = assignment
            yield assignment

    def why_not_join(self, count: int) -> str | None:
        """Returns why this many further workers cannot join; None if they can."""
        if self.has_live_job:
            return "its job contains live objects, which only the program that started it has"
        workers = sum(who.startswith("worker-") for who in self.processes) + count
        strategy, batch = self.coordinator.plan.strategy, self.coordinator.history.batch
        try:
            strategy.check_workers(workers)
            if batch > 0:  # It is known when the first worker is ready.
                strategy.check_batch(batch, workers)
        except UsageError as error:
            return str(error)
        return None

    async def start_guest(self, take_place: Callable[[int], None]) -> int:
        """Starts a new worker, which then joins the run; returns its number.

        `take_place` receives the number before the process is started.
        """
        worker = 1 + max(a.index for a in self.assignments.values() if a.kind == "worker")
        update = {"index": worker, "servers": (), "checkpoint": None, "joins": 1}
        assignment = self.assignments["worker-0"].model_copy(update=update)
        self.assignments[assignment.process_name] = assignment
        self.coordinator.members.add(worker, self.now())
        take_place(worker)
        await self.launch(assignment)
        return worker

    @property
    def members(self) -> list[str]:
        """The processes that take part in the current view."""
        view = self.coordinator.view
        return [*(f"worker-{w}" for w in view.workers), *(f"server-{s}" for s in view.servers)]

    def can_lose(self, who: str, *, returns: bool) -> bool:
        """Returns whether the run can continue without a worker or server; `returns` if it is
        started again."""
        kind, _, index = who.partition("-")
        if kind == "server":
            return self.coordinator.can_lose_server(int(index))
        return kind == "worker" and self.coordinator.can_lose(int(index), returns=returns)

    def describe_end(self, who: str) -> str:
        """Returns why an elastic run ends with the loss of a server; empty otherwise."""
        kind, _, index = who.partition("-")
        if kind != "server" or not self.coordinator.plan.is_elastic:
            return ""
        shard = self.coordinator.servers.shard_of(int(index))
        return f"; no other server holds shard {shard}: continue from a checkpoint with --resume"

    def lose(self, who: str, reason: str, *, returns: bool) -> None:
        """Continues without a worker or server that is gone."""
        kind, _, index = who.partition("-")
        coordinator, now = self.coordinator, self.now()
        if kind == "server":
            self.carry_out(coordinator.lose_server(int(index), reason, now))
        else:
            self.carry_out(coordinator.lose(int(index), reason, now, returns=returns))

    async def restart(self, who: str, delay_s: float) -> None:
        """Starts a lost worker or server again, which then joins the run."""
        await asyncio.sleep(delay_s)
        before = self.assignments[who]
        update = {"joins": before.joins + 1, "servers": (), "checkpoint": None}
        assignment = self.assignments[who] = before.model_copy(update=update)
        try:
            await self.launch(assignment)
        except PacelineError as error:
            problem = f"{who.replace('-', ' ')} could not be restarted: {error}"
            self.log(problem)
            if assignment.kind == "worker":
                index, now = assignment.index, self.now()
                self.carry_out(self.coordinator.give_up(index, problem, now))
            return
        if assignment.kind == "worker":
            self.coordinator.members.add(assignment.index, self.now())

    def retire(self, worker: int) -> str | None:
        """Lets a worker leave at the next quiesce; returns why it cannot."""
        why = self.coordinator.why_not_leave(worker)
        if why is None:
            self.carry_out(self.coordinator.retire(worker, self.now()))
        else:
            self.log(why)
        return why
