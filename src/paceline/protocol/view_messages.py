"""Messages with which the coordinator and the workers move to another view."""

from paceline.protocol.message_base import Message


class Regroup(Message):
    """The view ends: stop, keep the last complete state, and take this rank in the next view.

    Unlike all other messages it may arrive at any time.
    """

    view: int
    workers: tuple[int, ...]
    """Workers of the next view, by rank."""
    version: int
    """Version that servers must have applied before their state is taken over."""
    entering: bool
    """True if workers were entering a strategy: servers may not have received its state yet."""
    lost_servers: tuple[tuple[str, int], ...] = ()
    """Addresses of servers that are gone."""


class FormGroup(Message):
    """Form the process group of the view, and continue from the state of rank `source`."""

    source: int
    samples: int
    """Samples of the run that this state contains."""
    broadcast: bool
    """False if every worker holds this state already."""
    joining: bool
    """True if a worker of the view has just started and holds no state of the run."""


class Dismiss(Message):
    """The run is over, or continues without this worker: exit."""


class LeaveRequested(Message):
    """A worker that will be terminated asks to leave the run."""

    worker: int


class StateOffered(Message):
    """Reply to Regroup: the newest complete state that this worker holds."""

    worker: int
    samples: int
    """Samples of the run that it contains; -1 if nothing was trained since the group was formed."""
    reached: int
    """The same for the last step of this worker, whose update need not be complete."""
    complete: bool
    """False if this worker cannot provide the whole global state."""


class GroupFormed(Message):
    worker: int


class ExchangeFailed(Message):
    """An exchange with the other workers failed, and this worker waits for the next view."""

    worker: int
    step: int
    error: str
