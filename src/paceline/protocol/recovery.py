"""The way of a run from view to view: what remains is settled, and training continues from it.

A view ends when a worker is lost whose work the others need, or to admit workers that are ready:

    stop leases    the pace takes all work back; what is applied stays applied
    settle         every worker of the next view stops and offers its newest complete state
    import         they form a group, and take over the newest state that was offered
    continue       the strategy starts again, from the samples that this state contains

The sequence of a run waits at `yield`; a loss is thrown into it there as `MemberLost`. Everything
that was interrupted is repeated in the next view.
"""

import dataclasses
from abc import abstractmethod
from collections.abc import Callable, Generator
from typing import Any, TypeVar

from paceline.protocol.journal import ViewBegun
from paceline.protocol.journal_keeper import JournalKeeper
from paceline.protocol.member_rules import MemberRules
from paceline.protocol.membership import Membership
from paceline.protocol.messages import (
    Dismiss,
    FormGroup,
    GroupFormed,
    Message,
    Regroup,
    StateOffered,
    WorkerReady,
)
from paceline.protocol.pace import OutgoingMessage, Pace, Send
from paceline.protocol.run_spec import (
    Action,
    EmitEvent,
    InterruptWorker,
    RefuseWorker,
    ReleaseWorker,
    RunSpec,
    RunStopped,
)
from paceline.protocol.server_members import ServerMembers
from paceline.protocol.switch_policy import RunHorizon
from paceline.protocol.view import MemberLost, MembershipView
from paceline.specs.strategy import Strategy
from paceline.telemetry.events import Event, ViewChanged, ViewRow

MAX_REASONS = 8
"""Reasons that are named for one change of the view; others are counted."""
MAX_RENEWALS = 3
"""A view in which exchanges fail this often although no worker is lost ends the run."""

T = TypeVar("T")
Script = Generator[None, list[Any], T]


class ViewSequence(MemberRules, JournalKeeper):
    """Members of a run and the change of views; `RunSequence` adds what happens inside one."""

    _horizon: RunHorizon

    def __init__(self, plan: RunSpec, now: float) -> None:
        self.plan = plan
        self.view = MembershipView(0, tuple(range(plan.workers)), tuple(range(plan.servers)))
        self.members = Membership(plan.workers, now)
        self.servers = ServerMembers(plan.shards, plan.servers)
        self._now = now
        self._actions: list[Action] = []
        self._awaited: type[Message] | None = WorkerReady
        self._answers: dict[int, Any] = {}
        """Replies so far, by rank."""
        self._answered: dict[int, Message] = {}
        """Last reply of each worker, to detect duplicates."""
        self._last_step: dict[int, int] = {}
        self._resumed: dict[int, float] = {}
        self._entering = False
        """True while some workers may have entered a strategy and others not."""
        self._pace: Pace | None = None
        self._pace_view = 0
        """View in which the pace was made; servers report under its number until the next one."""
        self._ready: dict[int, WorkerReady] = {}
        """Reports of the workers of the first view."""
        self._lost, self._joining = {}, {}
        self._returning, self._leaving = set(), set()
        self._is_waiting = False
        """True while there are fewer workers than the run needs."""
        self._speeds: dict[int, float] = {}
        """Samples per second of each worker, as last measured."""
        self._view_samples = 0
        """Samples of the state that the view began with."""
        self._changing_since: float | None = None
        self._reasons: list[str] = []
        """Why the view changes."""
        self._is_interrupted = False
        self._renewals = 0
        self._must_regroup = False
        """True if the workers could not meet at the start."""

    @abstractmethod
    def _advance(self, step: Callable[[], object]) -> None: ...

    @abstractmethod
    def _end(self, status: str, error: str | None) -> None: ...

    @abstractmethod
    def _start_strategy(self) -> Script[None]: ...

    @abstractmethod
    def _flush_switch(self) -> None: ...

    @abstractmethod
    def _on_view_changed(self) -> None: ...

    @abstractmethod
    def _strategy(self) -> Strategy: ...

    # ---- events -------------------------------------------------------------------------------

    def can_lose_server(self, server: int) -> bool:
        """Returns whether the run can continue without a server: another has the same state."""
        if server not in self.view.servers or server in self.servers.lost:
            return True
        return self.plan.is_elastic and self.servers.can_spare(server, self.view.servers)

    def _lose_server(self, server: int, reason: str) -> None:
        self.servers.remove(server)
        if server not in self.view.servers or server in self.servers.lost:
            return
        self.servers.lost[server] = reason
        if self._awaited is WorkerReady:
            self._resume_if_all_answered()
        elif not self._is_training() or self._strategy().servers_for(self.plan.workers):
            self._begin_change()
            self._change_view()

    def _admit_server(self, server: int) -> None:
        """Admits a server that was started again at the next quiesce."""
        self.servers.joining.add(server)
        self._stop_early()

    def _retire(self, worker: int) -> None:
        """Continues without a worker from the next quiesce on, when its work is done."""
        if self.view.rank_of(worker) is None or worker in self._lost:
            self.members.remove(worker)
            self._joining.pop(worker, None)
            self._returning.discard(worker)
            self._actions.append(ReleaseWorker(worker))
            return
        self._leaving.add(worker)
        self._stop_early()

    def _stop_early(self) -> None:
        """Quiesces as soon as the work that is planned is done."""
        if self._is_training():
            assert self._pace is not None
            self._pace.stop_early()

    def _lose(self, worker: int, reason: str, *, returns: bool) -> None:
        self.members.remove(worker)
        self._joining.pop(worker, None)
        self._leaving.discard(worker)
        self._returning.discard(worker)
        if returns:
            self._returning.add(worker)
        rank = self.view.rank_of(worker)
        if rank is None or worker in self._lost:
            return
        self._lost[worker] = reason
        self._begin_change()
        if self._awaited is WorkerReady:
            # Others may wait for it in the first rendezvous.
            self._interrupt_others()
            self._resume_if_all_answered()
            return
        if self._is_training() and not self._is_short():
            assert self._pace is not None
            orders = self._pace.lose_worker(rank, self._now)
            if orders is not None:
                self._send(orders)
                if self._pace.drained:
                    self._resume([])
                return
        self._change_view()

    def _begin_change(self) -> None:
        if self._changing_since is None:
            self._changing_since = self._now

    def _interrupt_others(self) -> None:
        self._is_interrupted = True
        for worker in self.view.workers:
            if worker not in self._lost:
                self._actions.append(InterruptWorker(worker, self.view.number))

    def _change_view(self) -> None:
        self._awaited, self._answers = None, {}
        self._interrupt_others()
        self._advance(lambda: self._sequence.throw(MemberLost()))

    def _renew(self, reason: str) -> None:
        """Forms the view again, because an exchange failed although no worker is lost."""
        self._renewals += 1
        if self._renewals > MAX_RENEWALS:
            self._end("failed", reason)
            return
        self._begin_change()
        self._reasons.append(reason)
        self._change_view()

    def _admit(self, ready: WorkerReady) -> None:
        """Admits a worker at the next quiesce."""
        self._returning.discard(ready.worker)
        self._joining[ready.worker] = ready
        self._refuse_other_jobs()
        if not self._is_waiting:
            self._stop_early()
        elif not self._is_short():
            self._resume([])

    def _refuse_other_jobs(self) -> None:
        """Refuses workers whose data or batch differs from those of the run, once it is known."""
        if not self._ready:
            return
        facts = self._ready[min(self._ready)]
        for worker, ready in list(self._joining.items()):
            if not same_facts(ready, facts):
                del self._joining[worker]
                self.members.remove(worker)
                reason = describe_difference(ready, facts)
                self._actions.append(RefuseWorker(worker, reason))
                if self._is_waiting and not self.can_lose(worker):
                    self._end("failed", reason)

    def _is_training(self) -> bool:
        return self._awaited is None and self._pace is not None and not self._pace.drained

    # ---- the change ---------------------------------------------------------------------------

    def _retrying(self, operation: Callable[[], Script[T]]) -> Script[T]:
        """Repeats an operation of all workers until it passes within one view."""
        while True:
            try:
                return (yield from operation())
            except MemberLost:
                yield from self._regroup()

    def _regroup(self) -> Script[None]:
        """Moves to the next view, and again if a worker is lost meanwhile."""
        self._begin_change()
        while True:
            try:
                yield from self._wait_for_members()
                yield from self._form_view()
                return
            except MemberLost:
                continue

    def _wait_for_members(self) -> Script[None]:
        """Waits until enough of the lost workers have been started again."""
        if not self._is_short():
            return
        if self._pace is not None:
            self._send(self._pace.suspend())
        self._is_waiting = True
        try:
            yield
        finally:
            self._is_waiting = False

    def _form_view(self) -> Script[None]:
        before = self.view
        self._refuse_other_jobs()
        gone, servers = self._departing(), self.servers
        self._reasons += [*self._lost.values(), *servers.lost.values()]
        self._reasons += [f"worker {w} left" for w in sorted(gone)]
        self._reasons += [f"worker {w} joined" for w in self._joining]
        self._reasons += [f"server {s} joined" for s in sorted(servers.joining)]
        self._remember_speeds()
        self._flush_switch()
        if self._pace is not None:
            self._send(self._pace.suspend())
        for worker in sorted(gone):
            self.members.remove(worker)
            self._actions += [Send(worker, Dismiss()), ReleaseWorker(worker)]
        stay = [w for w in before.workers if w not in self._lost and w not in gone]
        members = tuple(sorted({*stay, *self._joining}))
        self.view = MembershipView(before.number + 1, members, servers.next_members(before.servers))
        self._leaving -= gone
        self._lost, self._joining = {}, {}
        self._answered, self._last_step, self._resumed = {}, {}, {}
        version = self._pace.version if self._pace is not None else 0
        self._write(ViewBegun(self._now, self.view.number, members, self.view.servers))
        offers: list[StateOffered] = yield from self._ask_all_workers(
            Regroup(self.view.number, members, version, self._entering, servers.gone), StateOffered
        )
        contains = [
            (offer.samples if offer.samples >= 0 else self._view_samples, offer.worker)
            for offer in offers
            if offer.complete
        ]
        if not contains:
            raise RunStopped(
                "failed",
                f"{join_reasons(self._reasons)}, and no other worker holds the complete state of "
                f"{self._strategy()}; continue from the latest checkpoint with --resume",
            )
        samples = max(contains)[0]
        source = min(rank for held, rank in contains if held == samples)
        reached = max(offer.reached for offer in offers)
        if self._pace is not None:
            self._pace.rewind(samples)
        equal = len(contains) == len(offers) and all(held == samples for held, _ in contains)
        exact = self._strategy().exact and self._strategy().servers_for(self.view.size) == 0
        # With servers, the state contains all updates, of which workers know only those up to the
        # last quiesce.
        self._view_samples = self.history.samples
        keeps = equal and exact
        joining = not all(offer.complete for offer in offers)
        yield from self._ask_all_workers(
            FormGroup(source, self._view_samples, not keeps, joining), GroupFormed
        )
        self._on_view_changed()
        yield from self._start_strategy()
        self._note_change(max(0, reached - samples))

    def _note_change(self, recomputed: int) -> None:
        assert self._changing_since is not None
        self._is_interrupted = False
        row = ViewRow(
            number=self.view.number,
            samples=self.history.samples,
            seconds=self._event_time,
            members=list(self.view.workers),
            servers=list(self.view.servers),
            reason=join_reasons(self._reasons),
            pause_s=round(self._now - self._changing_since, 6),
            recomputed=recomputed,
        )
        self._reasons, self._changing_since = [], None
        self.history.views.append(row)
        self._emit(ViewChanged(t=self._event_time, row=row))

    def _remember_speeds(self) -> None:
        windows = self.history.throughput.windows
        if windows and len(windows[-1].speeds) == self.view.size:
            self._speeds.update(zip(self.view.workers, windows[-1].speeds, strict=True))

    @property
    def _rank_speeds(self) -> tuple[float, ...]:
        """Last measured speeds, by rank; their mean for workers that were not measured."""
        windows = self.history.throughput.windows
        if windows:
            return windows[-1].speeds
        known = [s for w in self.view.workers if (s := self._speeds.get(w, 0.0)) > 0]
        mean = sum(known) / len(known) if known else 0.0
        return tuple(self._speeds.get(w, 0.0) or mean for w in self.view.workers)

    # ---- messages -----------------------------------------------------------------------------

    def _send(self, orders: list[OutgoingMessage]) -> None:
        """Addresses messages of the pace, which knows ranks, to workers."""
        workers = self.view.workers
        self._note_planned_rows()
        for order in orders:
            if isinstance(order, Send):
                self._actions.append(Send(workers[order.worker], order.message))
            else:
                self._note_update(order)
                holders = self._holders(order.servers)
                self._actions.append(dataclasses.replace(order, holders=holders))

    def _holders(self, shards: int) -> tuple[int, ...]:
        """Returns the servers that have loaded one of the first shards."""
        servers = self.servers
        loaded = servers.holding if servers.holding is not None else self.view.servers
        return tuple(sorted(s for s in loaded if servers.shard_of(s) < shards))

    def _ask_all_workers(self, question: Message, answer: type[Message]) -> Script[list[Any]]:
        self._awaited, self._answers = answer, {}
        self._actions.extend(Send(w, question) for w in self.view.workers)
        return (yield)

    def _resume_if_all_answered(self) -> None:
        if self._awaited is WorkerReady:
            if len(self._ready) < self.live_workers:
                return  # Without a search, because thousands of workers may follow.
            answers = {w: r for w, r in self._ready.items() if w not in self._lost}
            expected = self.live_workers
        else:
            answers, expected = self._answers, self.view.size
        if len(answers) == expected and self.servers.are_ready(self.view.servers):
            in_order = [answers[w] for w in sorted(answers)]
            self._awaited, self._answers = None, {}
            self._resume(in_order)

    def _resume(self, answers: list[Any]) -> None:
        self._advance(lambda: self._sequence.send(answers))

    _sequence: Script[None]

    @property
    def _event_time(self) -> float:
        return round(self._now, 6)

    def _emit(self, event: Event) -> None:
        self._actions.append(EmitEvent(event))


def join_reasons(reasons: list[str]) -> str:
    """Returns one line; of many reasons, the first ones and the last."""
    if len(reasons) > MAX_REASONS:
        more = f"{len(reasons) - MAX_REASONS} more changes"
        reasons = [*reasons[: MAX_REASONS - 1], more, reasons[-1]]
    return "; ".join(reasons)


def same_facts(ready: WorkerReady, facts: WorkerReady) -> bool:
    """Returns whether two workers have the same data and batch; speeds and probes may differ."""
    return (
        dataclasses.replace(
            ready, worker=facts.worker, speed=facts.speed, cv=facts.cv, exchange=facts.exchange
        )
        == facts
    )


def describe_difference(ready: WorkerReady, facts: WorkerReady) -> str:
    return (
        f"worker {ready.worker} has {ready.samples} samples in batches of {ready.batch}, "
        f"but worker {facts.worker} has {facts.samples} in batches of {facts.batch}; "
        "all workers must have the same data and batch size"
    )
