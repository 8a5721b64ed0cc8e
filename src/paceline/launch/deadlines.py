"""Workers that make no progress, and workers that send no heartbeats."""

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from paceline.launch.launcher import LaunchedProcess
from paceline.protocol.coordinator import Coordinator
from paceline.protocol.membership import Membership, MemberStatus

STARTUP_S = 60.0
"""Time for importing torch and joining the group, however short the deadline."""
SILENCE_S = 10.0
"""A worker without a heartbeat for this long may be stopped or cut off; it sends one per second."""
SILENCE_FACTOR = 3.0
"""On a machine that is so busy that heartbeats are late, it may be silent for this many times the
longest silence after which a worker has continued."""
COMPUTE_PHASES = frozenset({"input", "forward", "backward", "optimizer"})
MIN_PHASE_S = 60.0
PHASE_FACTOR = 20.0
"""A worker may spend this many times the longest time in such a phase that any has completed."""

STACKS_S = 2.0
"""Time for workers to print their stacks."""
LATE_S = 2.0
"""If this process itself was stopped for this long, it has missed heartbeats."""

Stuck = list[tuple[int, MemberStatus]]


@dataclass(frozen=True)
class Deadlines:
    """Judges the heartbeats of the members, by those of the run so far."""

    members: Membership
    timeout_s: float
    """Longest time in one phase."""
    servers: Membership
    adapts: bool = False
    """A worker may be lost, so that one which is stuck is replaced early."""

    @property
    def interval_s(self) -> float:
        return min(1.0, self.timeout_s / 4)

    def restart_timers(self, now: float) -> None:
        """Restarts all timers, because this process itself was stopped."""
        self.members.restart_timers(now)
        self.servers.restart_timers(now)

    def _limit_s(self, phase: str) -> float:
        """Longest time in a phase: less than `timeout_s` if others show how long it takes."""
        known = self.members.longest_s(phase) if phase in COMPUTE_PHASES else None
        if known is None or not self.adapts:
            return self.timeout_s
        return min(self.timeout_s, max(MIN_PHASE_S, PHASE_FACTOR * known))

    def find_stuck(self, now: float) -> Stuck:
        return [
            (worker, member)
            for worker, member in self.members.find_stuck(now, self._limit_s)
            if member.phase != "startup" or now - member.since > STARTUP_S
        ]

    def describe(self, stuck: Stuck) -> str:
        names = ", ".join(f"worker {worker}" for worker, _ in stuck)
        where = ", ".join(f"step {m.step}, in {m.phase}" for _, m in stuck)
        limit_s = min(self._limit_s(m.phase) for _, m in stuck)
        return f"{names} made no progress for {limit_s:g} s ({where})"

    def find_silent(self, now: float) -> list[tuple[str, str]]:
        """Returns processes without heartbeats, and a description of each."""
        limit_s = max(SILENCE_S, SILENCE_FACTOR * self.members.longest_silence_s)
        return [
            (f"{kind}-{index}", f"{kind} {index} sent no heartbeat for {limit_s:.3g} s")
            for kind, group in (("worker", self.members), ("server", self.servers))
            for index in group.find_silent(now, limit_s)
        ]


@dataclass(eq=False)
class DeadlineWatch:
    """Continues without workers that are past a deadline, or ends the run."""

    coordinator: Coordinator
    timeout_s: float
    processes: Mapping[str, LaunchedProcess]
    stacks: Callable[[str], str]
    """Returns the last stacks that a process has printed."""
    now: Callable[[], float]
    lose: Callable[[str, str], None]
    fail: Callable[[str, str, str], None]
    is_over: Callable[[], bool]

    async def watch(self) -> None:
        """Runs until it has ended the run, or is cancelled."""
        coordinator, now = self.coordinator, self.now
        plan, servers = coordinator.plan, coordinator.servers.status
        deadlines = Deadlines(
            coordinator.members, self.timeout_s, servers, adapts=plan.can_lose_workers
        )
        while True:
            due = now() + deadlines.interval_s
            await asyncio.sleep(deadlines.interval_s)
            if self.is_over():
                return
            if now() > due + LATE_S:
                deadlines.restart_timers(now())
            if coordinator.plan.is_elastic:
                for who, text in deadlines.find_silent(now()):
                    self.lose(who, text)
            if not deadlines.find_stuck(now()):
                continue
            for process in self.processes.values():
                process.send_command("stacks")
            await asyncio.sleep(min(STACKS_S, self.timeout_s))
            stuck = deadlines.find_stuck(now())
            if not stuck:
                continue  # It was slow, and has continued.
            if all(coordinator.can_lose(worker) for worker, _ in stuck):
                for worker, member in stuck:
                    self.lose(f"worker-{worker}", deadlines.describe([(worker, member)]))
                continue
            stacks = [f"stacks of worker {w}:\n" + self.stacks(f"worker-{w}") for w, _ in stuck]
            text = f"{deadlines.describe(stuck)}; the run was stopped"
            self.fail(f"worker-{stuck[0][0]}", text, "\n\n".join(stacks))
            return
