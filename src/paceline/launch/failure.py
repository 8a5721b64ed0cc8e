"""Failures of a run's processes: which of them is the cause, and how it is reported."""

from dataclasses import dataclass
from enum import IntEnum


class Certainty(IntEnum):
    """Certainty that a failure is the cause of the run's end."""

    CONSEQUENCE = 0
    """Probably a consequence: the process lost a peer."""
    OWN_ERROR = 1
    """An exception of the process itself."""
    CAUSE = 2
    """Certainly a cause: the user's mistake, or a process that was killed."""


CERTAINTY_BY_BLAME = {"own": Certainty.OWN_ERROR, "peer": Certainty.CONSEQUENCE}
"""By `ProcessFailing.blame`, except for usage errors, which are causes."""


@dataclass(frozen=True)
class ProcessFailure:
    """One failure, as it is reported to the user."""

    who: str
    text: str
    certainty: Certainty
    is_usage_error: bool = False
    details: str = ""


class FailureLog:
    """Failures so far, in the order in which they became known, and processes that are gone."""

    def __init__(self) -> None:
        self._failures: list[ProcessFailure] = []
        self._gone: set[str] = set()

    def add(self, failure: ProcessFailure) -> bool:
        """Records a failure; returns whether it is the first."""
        self._failures.append(failure)
        return len(self._failures) == 1

    def mark_gone(self, who: str) -> None:
        self._gone.add(who)

    def has_failed(self, who: str) -> bool:
        return any(failure.who == who for failure in self._failures)

    @property
    def cause(self) -> ProcessFailure | None:
        """The most certain failure; the first of several."""
        return max(self._failures, key=lambda failure: failure.certainty, default=None)

    def certainty_of_server_loss(self, parent: int) -> Certainty | None:
        """Certainty that a lost server is the cause; None if its parent worker is."""
        parent_name = f"worker-{parent}"
        if parent_name not in self._gone:
            return Certainty.CAUSE
        reported = [f.certainty for f in self._failures if f.who == parent_name]
        if not reported or max(reported) > Certainty.CONSEQUENCE:
            return None
        # The worker lost a peer: this server, or another whose loss is reported soon.
        return Certainty.OWN_ERROR
