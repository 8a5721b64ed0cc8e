"""Phases of a run: entering a strategy, at its start, at a switch and in every new view."""

import dataclasses

from paceline.errors import SpecError
from paceline.protocol.messages import EnterPhase, PhaseEntered, WorkerReady
from paceline.protocol.pace import Pace, PaceContext
from paceline.protocol.recovery import Script, ViewSequence
from paceline.protocol.run_spec import PaceFactory, PolicyFactory, RunStopped
from paceline.protocol.switch_policy import SwitchDecision, SwitchPolicy
from paceline.specs.strategy import Strategy, WorkerGroups
from paceline.telemetry.events import StrategyStarted, StrategySwitched, SwitchRow


class PhaseSequence(ViewSequence):
    """The active strategy and the policy that changes it."""

    _make_pace: PaceFactory
    _make_policy: PolicyFactory
    _policy: SwitchPolicy
    _facts: WorkerReady

    def _enter(self, decision: SwitchDecision | None) -> Script[None]:
        """Starts the strategy of a phase on all workers."""
        history = self.history
        switching = decision is not None and history.samples > 0
        before, phase_before = self._strategy(), history.phase
        drain_s = self._pace.drain_s if self._pace is not None else 0.0
        if decision is not None:
            self._flush_switch()
            history.phase = decision.phase
            history.excluded_workers = set()
        strategy = self._strategy()
        keep, restore, best = False, False, False
        if decision is not None:
            keep, best = decision.snapshot, decision.best
            restore = decision.restore and (best or self._rollback_phase is not None)
            self._rollback_phase = phase_before if keep else None
        yield from self._retrying(
            lambda: self._start_strategy(
                switching=switching, snapshot=keep, restore=restore, best=best
            )
        )
        if decision is not None and switching:
            self._resumed = {}
            history.switches.append(
                SwitchRow(
                    samples=history.samples,
                    before=str(before),
                    after=str(strategy),
                    drain_s=round(drain_s, 6),
                    cause=decision.cause,
                    reason=decision.reason,
                )
            )
        self._emit(
            StrategyStarted(
                t=self._event_time,
                strategy=str(strategy),
                samples=history.samples,
                lr=strategy.lr_description(self.view.size),
            )
        )

    def _start_strategy(
        self,
        *,
        switching: bool = False,
        snapshot: bool = False,
        restore: bool = False,
        best: bool = False,
    ) -> Script[None]:
        history, strategy, size = self.history, self._strategy(), self.view.size
        shards = strategy.servers_for(self.plan.workers)
        servers, backups = self.servers.places(self.view.servers, shards)
        groups = strategy.worker_groups(size, self._rank_speeds)
        question = EnterPhase(
            *(history.phase, servers, switching, groups, snapshot, restore, best, history.lr_gain),
            backups=backups,
        )
        self._entering, self.servers.holding = True, None
        self._take_snapshot(entering=True)
        yield from self._ask_all_workers(question, PhaseEntered)
        self._entering, self.servers.holding = False, frozenset(self.view.servers)
        self._pace = self._make_pace_of_view(groups, self.view.number)

    def _make_pace_of_view(self, groups: WorkerGroups, view: int) -> Pace:
        self._pace_view = view
        context = PaceContext(
            workers=self.view.size,
            batch=self.history.batch,
            ledger=self._ledger,
            history=self.history,
            clip=self.plan.clip if self.plan.clip is not None else self._facts.clip,
            groups=groups,
            speeds=self._rank_speeds,
            view=view,
        )
        return self._make_pace(self._strategy(), context)

    def _make_new_policy(self) -> None:
        try:
            self._policy = self._make_policy(self.plan.strategy, self._horizon)
        except SpecError as error:
            raise RunStopped("failed", str(error), usage=True) from None

    def _on_view_changed(self) -> None:
        """Drops measurements, which do not hold for the members of this view."""
        self.history.excluded_workers = set()
        self.history.throughput.reset()
        self._horizon = dataclasses.replace(
            self._horizon,
            workers=self.view.size,
            speeds=self._rank_speeds,
            exchange=self._horizon.exchange if self.view.size > 1 else None,
        )
        self._make_new_policy()

    def _strategy(self) -> Strategy:
        return self.plan.strategy.phases[self.history.phase]

    def _flush_switch(self) -> None:
        """Completes the row of the last switch with the pause of the slowest worker."""
        if self._resumed and self.history.switches:
            pause_s = round(max(self._resumed.values()), 6)
            row = dataclasses.replace(self.history.switches[-1], pause_s=pause_s)
            self.history.switches[-1] = row
            self._resumed = {}
            self._emit(StrategySwitched(t=self._event_time, row=row))
