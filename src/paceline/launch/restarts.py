"""Rules by which a lost worker or server is started again."""

import re
from collections import Counter

FIRST_DELAY_S = 0.2
MAX_DELAY_S = 30.0
SAME_PLACE = 3
"""A process that ends this often at the same place is not started again."""
_VARIABLE = re.compile(r"\(pid \d+\) |(?<= failed) at step \d+")
"""Parts of a failure that do not distinguish places: the step of an exception is that of the last
report, which may be older."""


class RestartPolicy:
    """Counts restarts per worker or server; each waits twice as long as the one before."""

    def __init__(self, limit: int) -> None:
        """`limit`: restarts of each process."""
        self._limit = limit
        self._restarts: Counter[str] = Counter()
        self._places: Counter[tuple[str, str]] = Counter()

    def next_delay_s(self, who: str, failure: str) -> float | None:
        """Returns the wait before the next restart; None if there is none."""
        place = who, _VARIABLE.sub("", failure)
        self._places[place] += 1
        if self._restarts[who] >= self._limit or self._places[place] >= SAME_PLACE:
            return None
        delay_s = min(MAX_DELAY_S, FIRST_DELAY_S * 2.0 ** self._restarts[who])
        self._restarts[who] += 1
        return delay_s

    def decide(self, who: str, failure: str) -> tuple[float | None, str]:
        """Returns the wait before the next restart, if there is one, and the failure with the
        reason if there is none."""
        delay_s = self.next_delay_s(who, failure)
        why = self.why_excluded(who) if delay_s is None else ""
        return delay_s, f"{failure}; {why}" if why else failure

    def why_excluded(self, who: str) -> str:
        """Describes why a process is not started again; empty if restarts are disabled."""
        if not self._limit:
            return ""
        name = who.replace("-", " ")
        if self._restarts[who] >= self._limit:
            return f"{name} was restarted {self._limit} times and is excluded"
        return f"{name} ended {SAME_PLACE} times at the same place and is excluded"
