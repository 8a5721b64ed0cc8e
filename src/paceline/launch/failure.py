"""Failures of a run's processes: which of them is the cause, and how it is reported."""

import asyncio
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum

from paceline.protocol.coordinator import Coordinator
from paceline.protocol.run_spec import Action

GRACE_S = 1.0
"""Wait for the cause of a failure that may be a consequence."""
SAME_ERROR = 3
"""An exception that workers raise this often after the same samples is an error of the job."""
CORRELATED_EXIT_S = 0.2
"""A worker and the servers it started are lost within this time of each other."""


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


class FailureHandler:
    """Ends the run with the cause of its failures."""

    def __init__(
        self,
        coordinator: Coordinator,
        parents: Sequence[int | None],
        explain: Callable[[str], str],
        carry_out: Callable[[list[Action]], None],
    ) -> None:
        """`parents` are the workers that started the servers; `explain` names injected faults."""
        self._coordinator, self._parents = coordinator, parents
        self._explain, self._carry_out = explain, carry_out
        self._log = FailureLog()
        self._raised: Counter[tuple[str, int]] = Counter()

    @property
    def cause(self) -> ProcessFailure | None:
        return self._log.cause

    def has_failed(self, who: str) -> bool:
        return self._log.has_failed(who)

    def find_error_of_job(self, error: str, certainty: Certainty) -> str:
        """Counts a failure of a worker; returns a remark if it would be repeated, whichever worker
        computes these samples."""
        place = error, self._coordinator.history.samples
        self._raised[place] += certainty == Certainty.OWN_ERROR
        if self._raised[place] < SAME_ERROR:
            return ""
        return f"workers raised this {SAME_ERROR} times after the same samples"

    def fail(
        self,
        who: str,
        text: str,
        details: str = "",
        certainty: Certainty = Certainty.CAUSE,
        *,
        is_usage_error: bool = False,
    ) -> None:
        """Ends the run, after a while if this failure may be the consequence of another one."""
        first = self._log.add(ProcessFailure(who, text, certainty, is_usage_error, details))
        if certainty == Certainty.CAUSE:
            self._end()
        elif first:
            asyncio.get_running_loop().call_later(GRACE_S, self._end)

    def fail_supervisor(self, error: Exception) -> None:
        text = f"the supervisor failed: {type(error).__name__}: {error}"
        details = "" if isinstance(error, OSError) else traceback.format_exc()
        self.fail("supervisor", text, details)

    def note_gone(self, who: str) -> None:
        """Notes the end of a connection; that of a server may be a failure."""
        self._log.mark_gone(who)
        if self._coordinator.has_ended or not who.startswith("server"):
            return  # A worker's end is reported by its process, with the exit status.
        if not self._log.has_failed(who):
            # Its worker may have exited first and ended it: that is known at once.
            asyncio.get_running_loop().call_later(CORRELATED_EXIT_S, self._blame_server, who)

    def _blame_server(self, who: str) -> None:
        parent = self._parents[int(who.split("-")[1])]
        if parent is None:
            return  # Its process reports it.
        if (certainty := self._log.certainty_of_server_loss(parent)) is not None:
            text = (
                f"{who.replace('-', ' ')} (started by worker {parent}) exited unexpectedly "
                f"after {self._coordinator.history.updates} updates: it was killed or crashed"
            )
            self.fail(who, text, certainty=certainty)

    def _end(self) -> None:
        cause = self._log.cause
        if cause is not None and not self._coordinator.has_ended:
            why = cause.text + self._explain(cause.who)
            self._carry_out(self._coordinator.stop("failed", why))
