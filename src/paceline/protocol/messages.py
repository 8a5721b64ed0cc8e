"""Messages between coordinator, workers and servers, as frozen dataclasses.

`message_to_wire` and `message_from_wire` convert a message to msgpack-compatible data and back. An
unknown kind, or missing or unknown fields, raise WireError.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

from paceline.errors import WireError
from paceline.protocol.block_plan import BlockLayout, RowRanges
from paceline.protocol.exchange_probe import ExchangeProbe
from paceline.protocol.message_base import Message as Message
from paceline.protocol.message_base import Plain as Plain
from paceline.protocol.message_base import record as record
from paceline.protocol.view_messages import Dismiss as Dismiss
from paceline.protocol.view_messages import ExchangeFailed as ExchangeFailed
from paceline.protocol.view_messages import FormGroup as FormGroup
from paceline.protocol.view_messages import GroupFormed as GroupFormed
from paceline.protocol.view_messages import LeaveRequested as LeaveRequested
from paceline.protocol.view_messages import Regroup as Regroup
from paceline.protocol.view_messages import StateOffered as StateOffered


@record
class Lease:
    """Positions [lo, hi) of an epoch's seeded order, part of the global batch [start, stop)."""

    id: int
    epoch: int
    start: int
    stop: int
    lo: int
    hi: int
    row_ranges: RowRanges = ()
    """Row ranges, if workers read in blocks; otherwise the positions define the rows."""
    next_ranges: RowRanges = ()
    """Row ranges that will probably follow, for prefetching."""

    @property
    def samples(self) -> int:
        return self.hi - self.lo

    @property
    def batch(self) -> int:
        return self.stop - self.start


# ---- coordinator to worker -------------------------------------------------------------------


class PlannedSteps(Message):
    """Work planned ahead: the global batches of [start, stop), each split across all workers."""

    epoch: int
    start: int
    stop: int
    batch: int
    batch_weights: tuple[int, ...] | None
    """Proportions of the shares of a batch; None for equal shares."""
    pieces: RowRanges = ()
    """Row ranges of this worker's shares, consecutively, if it reads in blocks."""
    ahead: RowRanges = ()


class LeaseGranted(Message):
    """Reply to a push: minimum version to pull, the next lease, and the staleness of the push."""

    version: int
    lease: Lease
    staleness: int


class EnterPhase(Message):
    """Start this phase's strategy from the exported state."""

    phase: int
    servers: tuple[tuple[str, int], ...]
    """Server of each shard."""
    switching: bool
    """False at the start of a run, when there is no pause to measure."""
    groups: tuple[tuple[int, ...], ...] = ()
    """Groups of workers that act as one, if the strategy has them."""
    snapshot: bool = False
    """Keep a copy of the state, because the switch is a trial."""
    restore: bool = False
    """Restore that copy instead of the current state, because the trial failed."""
    best: bool = False
    """Restore the state that `EpochEnd` kept, not that of the last snapshot."""
    lr_gain: float = 1.0
    backups: tuple[tuple[int, str, int], ...] = ()
    """Shard, host and port of further servers, which hold copies."""


class Quiesce(Message):
    """No work is in flight: export the state after servers have applied `version`."""

    version: int
    samples: int
    """Samples of the run that the settled state contains."""


class Evaluate(Message):
    split: str


class SaveCheckpoint(Message):
    """Write a checkpoint of the exported state, including the coordinator's state."""

    name: str
    coordinator_state: Plain


class EpochEnd(Message):
    """An epoch ended; with `keep`, workers keep a copy of the state for a rollback."""

    epoch: int
    keep: bool
    lr_gain: float = 1.0
    """Factor of the learning rate from now on, because of a larger global batch."""


class FinishRun(Message):
    """Save the model and report totals; the run can still continue in another view."""

    save_model: bool


# ---- worker to coordinator -------------------------------------------------------------------


class WorkerReady(Message):
    """A worker is ready; the fields must be equal on all workers."""

    worker: int
    samples: int
    batch: int
    epochs: int | None
    splits: tuple[str, ...]
    """Splits that the job can evaluate (val, test); custom training loops evaluate themselves."""
    speed: float = 0.0
    """Samples per second in a short probe; 0 if no strategy needs it."""
    layout: BlockLayout | None = None
    """Blocks of the training data, if workers read in blocks."""
    clip: float | None = None
    """Maximum gradient norm, if the script sets it instead of the job."""
    exchange: ExchangeProbe | None = None
    """None if no strategy needs it."""
    cv: float = 0.0
    """Standard deviation of the passes of the speed probe, relative to their mean."""
    notes: tuple[str, ...] = ()
    """Caveats on the data, to show with the results."""


class StepStats(Message):
    """Sums over the steps since the last report; `loss` is None if the loop does not log it."""

    samples: int
    predictions: int
    """Number of predictions: equal to the samples for a classifier, more for text."""
    loss_sum: float | None
    correct: int | None
    """None without classes."""
    busy_s: float = 0.0
    """Compute time: input, forward and backward."""
    comm_s: float = 0.0
    """Exposed communication time."""
    norms: tuple[float, float, float, float] | None = None
    """Periodically: local samples, squared norm of the local gradient, all samples, of the mean."""
    steps: int = 0
    """Steps with samples."""
    busy_square_s2: float = 0.0
    """Sum of the squared compute times of these steps."""


class StepsApplied(Message):
    """All planned work up to `position` of the epoch is applied on this worker."""

    worker: int
    epoch: int
    position: int
    step: int
    measured: StepStats


class GradientPushed(Message):
    """A gradient, computed on version `base`, is being sent to every shard under this handle."""

    worker: int
    handle: int
    lease: int
    samples: int
    base: int
    step: int
    measured: StepStats


class PhaseEntered(Message):
    worker: int


class TrainingResumed(Message):
    """The first forward pass after a switch starts; the pause excludes drain and evaluation."""

    worker: int
    pause_s: float


class Quiesced(Message):
    worker: int
    checksum: str
    lr: float


class Evaluated(Message):
    worker: int
    loss_sum: float | None
    """None if no loss is computed."""
    correct: int | None
    count: int
    """Number of predictions; more than samples for text."""


class CheckpointWritten(Message):
    worker: int
    path: str


class EpochEndReply(Message):
    """Reply to EpochEnd: whether this worker's loop requests another epoch."""

    worker: int
    more: bool


class WorkerFinished(Message):
    """The last message of a worker, with its totals."""

    worker: int
    totals: Plain


class LossDiverged(Message):
    worker: int
    step: int
    loss: float
    reason: str


class Heartbeat(Message):
    """Status of a worker, sent every second by a separate thread."""

    worker: int
    step: int
    phase: str
    phase_changes: int
    """Incremented whenever the worker enters another phase."""


class TelemetryForwarded(Message):
    """A telemetry event as written to the run folder, for live monitoring."""

    process_name: str
    event: Plain


class ProcessFailing(Message):
    """A process is about to exit because of an exception."""

    who: str
    error: str
    traceback: str
    blame: str
    """`usage` for a usage error, `peer` if another process caused it, else `own`."""


# ---- access to a run folder on another machine -----------------------------------------------


class EventLine(Message):
    """A line for the sender's event file."""

    line: str


class FileChunk(Message):
    """The next bytes of a checkpoint file (`NAME/FILE`) or of the model (`model`)."""

    path: str
    data: bytes


class FilesComplete(Message):
    """A checkpoint or the model has been sent completely and can be committed."""

    path: str
    keep: int


class FileRequest(Message):
    """Requests a chunk of a file of the checkpoint that the run starts from."""

    name: str
    offset: int


class FileResponse(Message):
    data: bytes
    size: int


class RunClockRequest(Message):
    pass


class RunClockResponse(Message):
    """Seconds since the start of the run, by the supervisor's clock."""

    seconds: float


# ---- servers ---------------------------------------------------------------------------------


class ServerReady(Message):
    server: int
    host: str
    port: int
    version: int = 0
    """Version that it has applied, if it has served another coordinator before."""


class GradientRef(Message):
    """A gradient of an update and its weight in the sum."""

    worker: int
    handle: int
    weight: float


class ApplyUpdate(Message):
    """Apply the parts as `version`; `clip` is the maximum norm of the whole gradient."""

    row_types: ClassVar[dict[str, Any]] = {"parts": GradientRef}

    version: int
    parts: tuple[GradientRef, ...]
    lr_scale: float
    clip: float | None
    fraction: tuple[float, float, float] | None = None
    """Share, delay and look-ahead of a `protocol.staleness.Fraction`; None for the optimizer's own
    step."""
    view: int = 0
    """View in which the servers have loaded their state; they ignore orders of any other."""


class ServerHeartbeat(Message):
    """Sent by a server every second, by a separate thread."""

    server: int


class ShardSqNorm(Message):
    """A shard's part of the squared norm of an update, for clipping."""

    server: int
    version: int
    square: float


class ClipFactor(Message):
    version: int
    factor: float
    view: int = 0


class StopServer(Message):
    pass


KINDS: dict[str, type[Message]] = {c.__name__: c for c in Message.__subclasses__()}
_NESTED: dict[str, Any] = {
    "lease": Lease,
    "measured": StepStats,
    "layout": BlockLayout,
    "exchange": ExchangeProbe,
}


def message_to_wire(message: Message) -> Plain:
    return {"kind": type(message).__name__, **dataclasses.asdict(message)}


def message_from_wire(plain: object, kinds: Mapping[str, type[Message]] = KINDS) -> Message:
    """Parses a message of one of these kinds; by default those of control connections."""
    kind = plain.get("kind") if isinstance(plain, dict) else type(plain).__name__
    if not isinstance(plain, dict) or not isinstance(kind, str) or kind not in kinds:
        raise WireError(
            f"unknown message kind {kind!r}; is the peer running a different version of Paceline?"
        )
    cls = kinds[kind]
    names: tuple[str, ...] = cls.__match_args__  # all fields, in the order of the constructor
    if len(plain) != len(names) + 1 or not all(map(plain.__contains__, names)):
        given = sorted(map(str, set(plain) - {"kind"}))
        raise WireError(f"invalid {cls.__name__} message: unexpected fields {given}")
    try:
        return cls(*[_restore(cls, name, plain[name]) for name in names])
    except TypeError as error:
        raise WireError(f"invalid {cls.__name__} message: {error}") from None


def _restore(cls: type[Message], name: str, value: Any) -> Any:
    if name in cls.row_types:
        row_type = cls.row_types[name]
        return tuple(
            row_type(**row) if isinstance(row, dict) else row_type(*map(_freeze, row))
            for row in value
        )
    if type(value) is dict and name in _NESTED:
        return _NESTED[name](**{k: _freeze(v) for k, v in value.items()})
    return _freeze(value)


def _freeze(value: Any) -> Any:
    if type(value) is list:
        return tuple([tuple(v) if type(v) is list else v for v in value])
    return value
