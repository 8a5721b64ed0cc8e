"""One virtual run: the real coordinator, and everybody it talks to as events in virtual time.

The coordinator and the server's shard are the protocol's own objects. What a message or a share
of a batch takes comes from the fleet and the cost model; what it does to the weights from the
learner. Workers of one strategy are played together by a crew.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from paceline.plan.cost import EVALUATING, Workload
from paceline.protocol.coordinator import Action, Coordinator, End, Note, RunPlan
from paceline.protocol.messages import (
    Diverging,
    Enter,
    Entered,
    EpochOver,
    Evaluate,
    Evaluated,
    Finish,
    Finished,
    Go,
    Lease,
    Message,
    Onward,
    Quiesce,
    Quiesced,
    Ready,
    Resumed,
    Save,
    Saved,
    ServerReady,
    Steps,
)
from paceline.protocol.pace import Tell, TellServers
from paceline.specs.strategy import Grouped, ParameterServer, Strategy
from paceline.telemetry.events import PHASES
from paceline.twin.fleet import Fleet, Floats
from paceline.twin.learner import Learner, Told
from paceline.twin.timeline import Deed, Lane, Timeline

DETECT_S = 1.0
"""A worker that dies is missed after so many seconds, as its process or its heartbeat is."""


class Postman(Protocol):
    """Brings messages in its own way; `deed` is told when one is there.

    Without one everything comes when it is due, and what nobody else can come before at once.
    """

    def up(self, worker: int, at_s: float, deed: Deed) -> None:
        """From a worker to the coordinator."""
        ...

    def down(self, worker: int, at_s: float, deed: Deed) -> None:
        """From the coordinator to a worker."""
        ...

    def order(self, at_s: float, deed: Deed) -> None:
        """From the coordinator to the servers."""
        ...

    def push(self, worker: int, at_s: float, gradient: Deed, word: Deed) -> None:
        """A gradient to the servers, and word of it to the coordinator."""
        ...


class Crew(Protocol):
    """Plays all workers while one strategy is in force."""

    bytes_sent: float
    bytes_before: float

    def on_steps(self, worker: int, steps: Steps, now: float) -> None: ...

    def on_go(self, worker: int, go: Go, now: float) -> None: ...

    def on_order(self, message: Message, now: float) -> None: ...

    def settle(self, worker: int, version: int, now: float, then: Callable[[float], None]) -> None:
        """Bring a worker to the newest weights; `then` is told when it has them."""
        ...

    def leave(self) -> None:
        """Another strategy comes, or the end: hand over what was counted."""
        ...


@dataclass
class Clocks:
    """Where each worker's virtual time goes."""

    workers: int
    seconds: dict[str, Floats] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.seconds = {name: np.zeros(self.workers) for name in PHASES}

    def add(self, phase: str, worker: int, seconds: float) -> None:
        self.seconds[phase][worker] += seconds

    def add_all(self, phase: str, seconds: Floats | float) -> None:
        self.seconds[phase] += seconds

    def computed(self, worker: int, seconds: float) -> None:
        self.seconds["forward"][worker] += seconds / 3
        self.seconds["backward"][worker] += seconds * 2 / 3


class World:
    """Runs a plan to its end; deterministic: the same inputs give the same events."""

    def __init__(
        self,
        plan: RunPlan,
        fleet: Fleet,
        work: Workload,
        learner: Learner,
        timeline: Timeline,
        *,
        note: Callable[[str, dict[str, Any]], None] = lambda kind, facts: None,
        model_path: Path | None = None,
        memory: dict[str, Any] | None = None,
        splits: tuple[str, ...] = (),
        postman: Postman | None = None,
    ) -> None:
        self.plan = plan
        self.fleet = fleet
        self.pool = fleet.pool
        self.work = work
        self.learner = learner
        self.timeline = timeline
        self.coordinator = Coordinator(plan, now=timeline.now, memory=memory)
        self.clocks = Clocks(plan.workers)
        self.steps = [0] * plan.workers
        """That each worker made by itself."""
        self.joint_steps = 0
        """That all made together."""
        self.end: End | None = None
        self.state_bytes = work.bytes * (1 + work.slots)
        self._postman = postman
        self._note = note
        self._model_path = model_path
        self._splits = splits
        self._control = Lane()
        self._control_s = self.pool.control_ms / 1e3
        self._crew: Crew | None = None
        self._crew_strategy: Strategy = plan.strategy
        self._entering: set[int] = set()
        self._spoilt: set[int] = set()
        """Workers that have said that their loss diverges."""
        self.dead: set[int] = set()
        self.watchers: list[Callable[[float], None]] = []
        """Told the time whenever the coordinator has heard something."""
        self._entered_at: dict[int, float] = {}
        self._settle_s = [0.0] * plan.workers
        self._sent = self._before = 0.0
        self._answered = 0
        self._lr = 0.0
        self._evaluate_s = 0.0

    def run(self) -> End:
        work, speeds = self.work, self._speeds()
        for server in range(self.plan.servers):
            self.send(0, ServerReady(server, "virtual", 1), self.timeline.now)
        for worker in range(self.plan.workers):
            ready = Ready(
                worker, work.samples, work.batch, work.epochs, self._splits, speeds[worker]
            )
            self.send(worker, ready, self.timeline.now)
        for worker, host in enumerate(self.fleet.hosts):
            if host.fails_at_s is not None:
                self._plan_death(worker, host.fails_at_s)
        if not self.timeline.run():
            raise AssertionError(
                f"everybody waits at {self.timeline.now:.6f} virtual seconds: the run is stuck"
            )
        assert self.end is not None
        self._leave_crew()
        return self.end

    def _speeds(self) -> list[float]:
        share = max(1, self.work.batch // self.plan.workers)
        return [share / max(c.step_s(share), 1e-12) for c in self.fleet.compute]

    def _plan_death(self, worker: int, at_s: float) -> None:
        def die(now: float) -> None:
            self.dead.add(worker)
            step = self.steps_of(worker)
            error = f"worker {worker} ({self.fleet.hosts[worker].host}) died at step {step}"

            def notice(later: float) -> None:
                self.carry_out(self.coordinator.stop("failed", error), later)

            self.timeline.at(now + DETECT_S, notice)

        self.timeline.at(at_s, die)

    def steps_of(self, worker: int) -> int:
        return self.steps[worker] + self.joint_steps

    # ---- messages -----------------------------------------------------------------------------

    def send(self, worker: int, message: Message, at_s: float) -> None:
        """From a worker to the coordinator, which hears one after another."""
        if worker in self.dead:
            return
        arrives = at_s + self.fleet.latency[worker]
        if self._postman is None:
            self.timeline.at(arrives, lambda now: self.hear(message, now))
        else:
            self._postman.up(worker, arrives, lambda now: self.hear(message, now))

    def send_push(self, worker: int, message: Message, at_s: float, gradient: Deed) -> None:
        """A gradient to the servers, and word of it to the coordinator."""
        if worker in self.dead:
            return
        arrives = at_s + self.fleet.latency[worker]
        if self._postman is not None:
            self._postman.push(worker, arrives, gradient, lambda now: self.hear(message, now))
            return

        def both(now: float) -> None:
            gradient(now)
            self.hear(message, now)

        self.timeline.at(arrives, both)

    def diverging(self, worker: int, told: Told, lease: Lease, at_s: float) -> None:
        """Said once a strategy, as a worker does before its report."""
        if worker not in self._spoilt:
            self._spoilt.add(worker)
            loss = (told.loss_sum or 0.0) / max(1, lease.samples)
            message = Diverging(worker, self.steps_of(worker), loss, told.diverged or "")
            self.send(worker, message, at_s)

    def hear(self, message: Message, now: float) -> None:
        heard = self._control.take(now, self._control_s)
        actions = self.coordinator.handle(message, heard)
        if actions:
            self.carry_out(actions, heard)
        for watch in self.watchers:
            watch(now)

    def carry_out(self, actions: list[Action], now: float) -> None:
        for action in actions:
            if isinstance(action, Tell):
                worker, message = action.worker, action.message
                arrives = now + self.fleet.latency[worker]
                if self._postman is None:
                    self._tell(worker, message, arrives)
                else:
                    self._postman.down(worker, arrives, partial(self._tell, worker, message))
            elif isinstance(action, TellServers):
                assert self._crew is not None
                if self._postman is None:
                    self._crew.on_order(action.message, now)
                else:
                    self._postman.order(now, partial(self._crew.on_order, action.message))
            elif isinstance(action, Note):
                self._note(action.kind, {"t": now, **action.facts})
            else:
                assert isinstance(action, End)
                self.end = action
                self.timeline.stop()

    def _tell(self, worker: int, message: Message, now: float) -> None:
        """What reaches a worker at `now`, which may lie ahead of the timeline by a message."""
        if isinstance(message, Go):
            if self._entered_at:
                self._resumed(worker, now)
            assert self._crew is not None
            self._crew.on_go(worker, message, now)
        elif isinstance(message, Steps):
            self._resumed(worker, now)
            assert self._crew is not None
            self._crew.on_steps(worker, message, now)
        elif isinstance(message, Enter):
            self._enter(worker, message, now)
        elif isinstance(message, Quiesce):
            self._quiesce(worker, message, now)
        elif isinstance(message, Evaluate):
            self._evaluate(worker, message.split, now)
        elif isinstance(message, Save):
            path = self.learner.save(message.name, message.memory) if worker == 0 else ""
            self.send(worker, Saved(worker, path), now)
        elif isinstance(message, EpochOver):
            self.send(worker, Onward(worker, True), now)
        else:
            assert isinstance(message, Finish)
            self._finish(worker, message, now)

    # ---- between stretches of training --------------------------------------------------------

    def _enter(self, worker: int, message: Enter, now: float) -> None:
        """All workers hand over together: the last one to be told begins the new strategy."""
        self._entering.add(worker)
        if message.switching:
            self._entered_at[worker] = now
        if len(self._entering) < self.plan.workers:
            return
        self._entering.clear()
        self._spoilt.clear()
        strategy = self.plan.strategy.phases[message.phase]
        began = now
        if self._crew is not None:
            now += self._handover_s(self._crew_strategy, strategy)
            self._leave_crew()
        self._crew = make_crew(self, strategy, message.groups)
        self._crew_strategy = strategy
        self.learner.enter(strategy, keep=message.keep, restore=message.restore)
        if message.switching:
            self.clocks.add_all("switch", now - began)
        for each in range(self.plan.workers):
            self.send(each, Entered(each), now)

    def _handover_s(self, before: Strategy, after: Strategy) -> float:
        """Everybody fetches the state from servers; one sends each server its part."""
        seconds = 0.0
        if uses_servers(before):
            lane = server_bytes_per_s(self, before)
            seconds += max(self.fleet.latency) + self.state_bytes * self.plan.workers / lane
        if uses_servers(after):
            seconds += max(self.fleet.latency) + self.state_bytes / server_bytes_per_s(self, after)
        return seconds

    def _leave_crew(self) -> None:
        if self._crew is not None:
            self._sent += self._crew.bytes_sent
            self._before += self._crew.bytes_before
            self._crew.leave()
            self._crew = None

    def _quiesce(self, worker: int, message: Quiesce, now: float) -> None:
        assert self._crew is not None

        def settled(at_s: float) -> None:
            self._settle_s[worker] = at_s - now
            self.clocks.add("comm_exposed", worker, at_s - now)
            if not self._answered:
                self._lr = self.learner.settle()
            self._answered = (self._answered + 1) % self.plan.workers
            self.send(worker, Quiesced(worker, "virtual", self._lr), at_s)

        self._crew.settle(worker, message.version, now, settled)

    def _resumed(self, worker: int, now: float) -> None:
        entered = self._entered_at.pop(worker, None)
        if entered is not None:
            self.send(worker, Resumed(worker, self._settle_s[worker] + now - entered), now)

    def _evaluate(self, worker: int, split: str, now: float) -> None:
        share = self.work.evaluated.get(split, 0) / self.plan.workers
        seconds = EVALUATING * share * self.fleet.compute[worker].per_sample_s
        self.clocks.add("eval", worker, seconds)
        if worker == 0:
            self._evaluate_s += seconds
        # One evaluation serves: all hold the same weights, and worker 0 answers for all.
        loss_sum, correct, count = self.learner.evaluate(split) if worker == 0 else (0.0, None, 0)
        self.send(worker, Evaluated(worker, loss_sum, correct, count), now + seconds)

    def _finish(self, worker: int, message: Finish, now: float) -> None:
        if worker == 0:
            self._leave_crew()
            if message.save_model and self._model_path is not None:
                self.learner.save_model(self._model_path)
        self.send(worker, Finished(worker, self._totals(worker, now)), now)

    def _totals(self, worker: int, now: float) -> dict[str, Any]:
        phases = {name: float(s[worker]) for name, s in self.clocks.seconds.items()}
        # Between two questions of the coordinator a worker waits for the others' answers.
        phases["wait"] += max(0.0, now - sum(phases.values()))
        stages = dict.fromkeys(("start", "read", "prepare", "save"), 0.0)
        stages["evaluate"] = self._evaluate_s
        stages["train"] = max(0.0, now - stages["evaluate"])
        share = 1 / self.plan.workers
        return {
            "phases": phases,
            "stages": stages,
            "bytes_sent": round(self._sent * share),
            "bytes_before": round(self._before * share),
            "parameter_bytes": self.work.bytes,
            "peak_rss_bytes": None,
            "steps": self.steps_of(worker),
        }


def uses_servers(strategy: Strategy) -> bool:
    return isinstance(strategy, ParameterServer | Grouped)


def server_bytes_per_s(world: World, strategy: Strategy) -> float:
    """Of all servers together: each worker's machine holds the servers of its number."""
    servers = strategy.servers_for(world.plan.workers)
    links = [world.fleet.links[s % world.plan.workers] for s in range(servers)]
    return servers * min(link.bytes_per_s for link in links)


def make_crew(world: World, strategy: Strategy, groups: tuple[tuple[int, ...], ...]) -> Crew:
    from paceline.twin.planned import PlannedCrew
    from paceline.twin.served import ServedCrew

    if uses_servers(strategy):
        return ServedCrew(world, strategy, groups)
    return PlannedCrew(world, strategy)
