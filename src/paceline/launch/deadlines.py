"""Workers that make no progress, and workers that send no heartbeats."""

from dataclasses import dataclass

from paceline.protocol.membership import Membership, MemberStatus

STARTUP_S = 60.0
"""Time for importing torch and joining the group, however short the deadline."""
SILENCE_S = 10.0
"""A worker without a heartbeat for this long is stopped or cut off; it sends one per second."""

Stuck = list[tuple[int, MemberStatus]]


@dataclass(frozen=True)
class Deadlines:
    """Judges the heartbeats of the members."""

    members: Membership
    timeout_s: float
    """Longest time in one phase."""

    @property
    def interval_s(self) -> float:
        return min(1.0, self.timeout_s / 4)

    def find_stuck(self, now: float) -> Stuck:
        return [
            (worker, member)
            for worker, member in self.members.find_stuck(now, self.timeout_s)
            if member.phase != "startup" or now - member.since > STARTUP_S
        ]

    def describe(self, stuck: Stuck) -> str:
        names = ", ".join(f"worker {worker}" for worker, _ in stuck)
        where = ", ".join(f"step {m.step}, in {m.phase}" for _, m in stuck)
        return f"{names} made no progress for {self.timeout_s:g} s ({where})"

    def find_silent(self, now: float) -> list[tuple[int, str]]:
        """Returns workers without heartbeats, and a description of each."""
        return [
            (worker, f"worker {worker} sent no heartbeat for {SILENCE_S:g} s")
            for worker in self.members.find_silent(now, SILENCE_S)
        ]
