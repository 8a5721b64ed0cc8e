"""Changes of the view in a simulated run: workers offer their state, form a group, and continue."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from paceline.plan.cost_model import allreduce_s
from paceline.protocol.messages import FormGroup, GroupFormed, Regroup, StateOffered
from paceline.twin.strategy_simulation import CompleteState, StrategySimulation

if TYPE_CHECKING:
    from paceline.twin.simulator import Simulator


class ViewChange:
    """The workers of a simulated run between two views.

    All workers that remain offer the same state. A worker that was started again holds none.
    """

    def __init__(self, simulator: Simulator) -> None:
        self._simulator = simulator
        self._leaving: StrategySimulation | None = None
        """The simulation whose state is recovered for the next view."""
        self._offered = CompleteState(-1, -1)
        self._offering: dict[int, float] = {}
        """Workers of the next view that wait for this state, and since when."""
        self._forming: dict[int, float] = {}
        """Workers that wait for the others of their group, and since when."""
        self._trained: tuple[int, ...] | None = None
        """Workers that the backend has, by rank; None before the first change."""
        self.joining: set[int] = set()
        """Workers that were started again and hold no state."""

    @property
    def serving(self) -> StrategySimulation:
        """The simulation whose servers apply updates."""
        active = self._simulator.simulation
        if self._leaving is not None and active is self._simulator.idle:
            return self._leaving
        return active

    def forget(self) -> None:
        """Forgets the last view when a strategy starts."""
        self._leaving, self._offered = None, CompleteState(-1, -1)

    def on_regroup(self, number: int, message: Regroup, now: float) -> None:
        simulator = self._simulator
        if message.view < simulator.view:
            return  # Others have begun the next one.
        if message.view > simulator.view:
            self._trained = self._trained or simulator.members
            leaving = simulator.begin_view(message.view, message.workers)
            if leaving is not simulator.idle:
                # Servers need not have received the state of a strategy that is being entered.
                keeps = message.entering and simulator.is_fresh
                self._leaving = None if keeps else leaving
                self._offered = leaving.settled
            self._offering, self._forming = {}, {}
        simulator.present.add(number)
        rank = simulator.rank_of[number]
        if number in self.joining:
            simulator.send(rank, StateOffered(rank, -1, -1, False), now)
        elif self._leaving is None:
            self._offer(rank, now)
        else:
            self._offering[rank] = now
            if len(self._offering) == 1:
                self._leaving.recover(message.version, now, self._recovered)

    def _recovered(self, now: float, state: CompleteState) -> None:
        self._leaving, self._offered = None, state
        waiting, self._offering = self._offering, {}
        for rank, since in waiting.items():
            self._offer(rank, max(now, since))

    def _offer(self, rank: int, now: float) -> None:
        state = self._offered
        self._simulator.send(rank, StateOffered(rank, state.samples, state.reached, True), now)

    def on_form(self, number: int, message: FormGroup, now: float) -> None:
        """The group is formed when its last worker has received the message."""
        simulator = self._simulator
        self._forming[simulator.rank_of[number]] = now
        if len(self._forming) < simulator.size:
            return
        began = max(self._forming.values())
        simulator.timeline.schedule(began, partial(self._form, simulator.view, message))

    def _form(self, view: int, message: FormGroup, now: float) -> None:
        simulator, members = self._simulator, self._simulator.members
        if view != simulator.view or any(w in simulator.failures.died_at for w in members):
            return  # It cannot be formed; the loss is noticed later.
        before = {worker: rank for rank, worker in enumerate(self._trained or members)}
        kept = [None if w in self.joining else before[w] for w in members]
        simulator.weights.regroup(members, kept, self._offered.state)
        self._trained = members
        self.joining.difference_update(members)
        self._offered = CompleteState(message.samples, message.samples)
        formed_s = self._seconds(message.broadcast)
        simulator.clocks["switch"] += formed_s
        simulator.note_state(message.samples)
        for rank in range(simulator.size):
            simulator.send(rank, GroupFormed(rank), now + formed_s)

    def _seconds(self, broadcast: bool) -> float:
        """Time to connect, and to send the state to all workers: half of an all-reduce."""
        simulator = self._simulator
        seconds = simulator.pool.regroup_s
        if broadcast and simulator.size > 1:
            nbytes = simulator.work.state_bytes
            seconds += allreduce_s(simulator.pool, simulator.fleet.hosts, nbytes) / 2
        return seconds
