"""Every exception Paceline raises on purpose, in one tree.

An error's text is one line that says the value, the rule and the remedy. `exit_code` is what the
command line returns for it: 2 for the user's mistake, 1 for a run that failed.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class PacelineError(Exception):
    """Base of all errors raised on purpose."""

    exit_code = 1


class UsageError(PacelineError):
    """The user asked for something that cannot be: nothing was started, nothing was written."""

    exit_code = 2


class SpecError(UsageError):
    """A strategy, optimizer or schedule expression that cannot be read."""


class DataError(UsageError):
    """A data set that is missing, truncated or not what it claims to be."""


class CheckpointError(UsageError):
    """A checkpoint that cannot be used: of another model, cut off, or of a newer format."""


class RunFailed(PacelineError):
    """The run ended early; the text names the process, its last step and its error.

    `details` holds what helps to find the cause: a traceback, stacks, or the last lines it wrote.
    """

    def __init__(self, text: str, details: str = "") -> None:
        super().__init__(text)
        self.details = details


class HostError(PacelineError):
    """A machine that cannot be reached or used. `kind` is one word for what is wrong, `fix` the
    command that mends it, or nothing where there is none.
    """

    def __init__(self, host: str, kind: str, problem: str, fix: str = "") -> None:
        super().__init__(f"host {host}: {problem}" + (f": try `{fix}`" if fix else ""))
        self.host = host
        self.kind = kind
        self.problem = problem
        self.fix = fix


class Diverged(PacelineError):
    """The loss became NaN, infinite or exploded; the text names step and worker."""


class DeadlineExceeded(PacelineError):
    """A wait reached its deadline; the text names who was waited for."""


class PeerLost(PacelineError):
    """Another process of the run went away: a consequence, seldom the cause of a failure."""


class WireError(PacelineError):
    """A message that does not follow the wire format, or a peer without the run's token."""


class StateError(PacelineError):
    """Training state that does not fit: missing names, other shapes, replicas that differ."""


def suggest_name(word: str, known: Iterable[str]) -> str:
    """The ending of an "unknown name" line: the nearest known name, or all of them."""
    names = sorted(known)
    close = difflib.get_close_matches(word.lower(), names, n=1, cutoff=0.5)
    if close:
        return f"did you mean {close[0]!r}? (known: {', '.join(names)})"
    return f"known: {', '.join(names)}"
