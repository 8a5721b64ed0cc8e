"""Membership: the last known status of each worker, and detection of stuck workers."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

WAITING_PHASES = frozenset({"comm_exposed", "wait"})
"""Phases in which a worker waits for others and is not the cause of a hang."""


@dataclass
class MemberStatus:
    step: int = 0
    phase: str = "startup"
    phase_changes: int = 0
    since: float = 0.0
    """Time of the last change of phase."""
    last_heartbeat: float = 0.0
    """Time of the last heartbeat."""
    is_ready: bool = False


class Membership:
    """Status of all workers from heartbeats; a worker that stays in one phase too long is stuck."""

    def __init__(self, workers: int, now: float) -> None:
        self._members = {w: MemberStatus(since=now, last_heartbeat=now) for w in range(workers)}
        self._longest_s: dict[str, float] = {}
        """Longest time that a worker has spent in a phase and left it, by phase."""
        self.longest_silence_s = 0.0
        """Longest time between two heartbeats of a worker."""

    def replace(self, workers: Iterable[int], now: float) -> None:
        """Replaces all members by these workers, who are not ready yet."""
        self._members = {}
        for worker in workers:
            self.add(worker, now)

    def begin(self, now: float) -> None:
        """Resets the timers; called when the processes are started."""
        for worker in self._members:
            self.add(worker, now)

    def add(self, worker: int, now: float) -> None:
        """Adds a worker that has been started, or started again."""
        self._members[worker] = MemberStatus(since=now, last_heartbeat=now)

    def __contains__(self, worker: int) -> bool:
        return worker in self._members

    def remove(self, worker: int) -> None:
        self._members.pop(worker, None)

    def on_heartbeat(self, worker: int, step: int, phase: str, turn: int, now: float) -> None:
        member = self._members.get(worker)
        if member is not None:
            ready = member.is_ready
            if ready:
                silence_s = now - member.last_heartbeat
                self.longest_silence_s = max(self.longest_silence_s, silence_s)
            since = member.since
            if turn != member.phase_changes:
                longest_s = self._longest_s.get(member.phase, 0.0)
                self._longest_s[member.phase] = max(longest_s, now - since)
                since = now
            self._members[worker] = MemberStatus(step, phase, turn, since, now, ready)

    def set_step(self, worker: int, step: int) -> None:
        if worker in self._members:
            self._members[worker].step = step

    def last_step(self, worker: int) -> int:
        """Returns the last known step of a worker; 0 for one that is not a member."""
        return self._members[worker].step if worker in self._members else 0

    def longest_s(self, phase: str) -> float | None:
        """Returns the longest completed time in a phase so far; None if there was none."""
        return self._longest_s.get(phase)

    def restart_timers(self, now: float) -> None:
        """Restarts all timers, because workers could not report for a reason of their own."""
        for member in self._members.values():
            member.since = member.last_heartbeat = now

    def set_ready(self, worker: int, now: float) -> None:
        """Notes that a worker is ready, and sends heartbeats from now on."""
        if worker in self._members:
            self._members[worker].is_ready = True
            self._members[worker].last_heartbeat = now

    def find_silent(self, now: float, deadline_s: float) -> list[int]:
        """Returns ready workers without a heartbeat for this long: stopped, or cut off."""
        return [
            worker
            for worker, member in self._members.items()
            if member.is_ready and now - member.last_heartbeat > deadline_s
        ]

    def find_stuck(
        self, now: float, limit_s: Callable[[str], float]
    ) -> list[tuple[int, MemberStatus]]:
        """Returns workers that are in a phase beyond its limit; only those that block the others,
        if identifiable."""
        late = [(w, m) for w, m in self._members.items() if now - m.since > limit_s(m.phase)]
        causes = [(w, m) for w, m in late if m.phase not in WAITING_PHASES]
        if causes:
            return causes
        # Waiting is only a failure if no other worker is active within the deadline.
        return late if len(late) == len(self._members) else []
