"""Exception hierarchy of Paceline.

The message of an error is one line with the problem, the rule and the remedy. `exit_code` is the
exit status of the command line: 2 for a usage error, 1 for a failed run.
"""

import difflib
from collections.abc import Iterable


class PacelineError(Exception):
    """Base class of all errors of Paceline."""

    exit_code = 1


class UsageError(PacelineError):
    """Invalid input. Raised before anything is started or written."""

    exit_code = 2


class SpecError(UsageError):
    """A strategy, optimizer or schedule expression that cannot be parsed."""


class DataError(UsageError):
    """A dataset that is missing, truncated or invalid."""


class CheckpointError(UsageError):
    """A checkpoint that is truncated, has a newer format, or belongs to another model."""


class RunFailed(PacelineError):
    """The run failed. The message names the process, its last step and its error.

    `details` helps to find the cause: a traceback, stacks, or the last lines of its log.
    """

    def __init__(self, text: str, details: str = "") -> None:
        super().__init__(text)
        self.details = details


class HostError(PacelineError):
    """A machine that cannot be reached or used.

    `kind` names the problem in one name; `fix` is a command that fixes it, or empty.
    """

    def __init__(self, host: str, kind: str, problem: str, fix: str = "") -> None:
        super().__init__(f"host {host}: {problem}" + (f": try `{fix}`" if fix else ""))
        self.host = host
        self.kind = kind
        self.problem = problem
        self.fix = fix


class Diverged(PacelineError):
    """The loss became NaN, infinite or exploded. The message names the step and the worker."""


class DeadlineExceeded(PacelineError):
    """A wait timed out. The message names the process that was waited for."""


class PeerLost(PacelineError):
    """Another process of the run is gone; usually a consequence, not the cause of a failure."""


class WireError(PacelineError):
    """A message that violates the wire format, or a peer without the run's token."""


class StateError(PacelineError):
    """Incompatible training state: missing names, other shapes, or diverged replicas."""


def suggest_name(name: str, known: Iterable[str]) -> str:
    """Returns the end of an "unknown name" message: the nearest known name, or all names."""
    names = sorted(known)
    close = difflib.get_close_matches(name.lower(), names, n=1, cutoff=0.5)
    if close:
        return f"did you mean {close[0]!r}? (known: {', '.join(names)})"
    return f"known: {', '.join(names)}"
