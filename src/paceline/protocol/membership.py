"""Membership: the last known status of each worker, and detection of stuck workers."""

from dataclasses import dataclass

WAITING_PHASES = frozenset({"comm_exposed", "wait"})
"""Phases in which a worker waits for others and is not the cause of a hang."""


@dataclass
class MemberStatus:
    step: int = 0
    phase: str = "startup"
    phase_changes: int = 0
    since: float = 0.0


class Membership:
    """Status of all workers from heartbeats; a worker that stays in one phase too long is stuck."""

    def __init__(self, workers: int, now: float) -> None:
        self._members = [MemberStatus(since=now) for _ in range(workers)]

    def begin(self, now: float) -> None:
        """Resets the timers; called when the processes are started."""
        for member in self._members:
            member.since = now

    def on_heartbeat(self, worker: int, step: int, phase: str, turn: int, now: float) -> None:
        member = self._members[worker]
        since = now if turn != member.phase_changes else member.since
        self._members[worker] = MemberStatus(step, phase, turn, since)

    def set_step(self, worker: int, step: int) -> None:
        self._members[worker].step = step

    def last_step(self, worker: int) -> int:
        return self._members[worker].step

    def find_stuck(self, now: float, deadline_s: float) -> list[tuple[int, MemberStatus]]:
        """Returns workers past the deadline; only those that block the others, if identifiable."""
        late = [(w, m) for w, m in enumerate(self._members) if now - m.since > deadline_s]
        causes = [(w, m) for w, m in late if m.phase not in WAITING_PHASES]
        if causes:
            return causes
        # Waiting is only a failure if no other worker is active within the deadline.
        return late if len(late) == len(self._members) else []
