"""What coordinator, workers and servers tell each other, as plain frozen values.

`to_plain` and `from_plain` turn a message into msgpack-able data and back; a message of unknown
kind, or with missing or unknown fields, is refused with a WireError.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

from paceline.errors import WireError
from paceline.protocol.block_plan import BlockLayout, RowRanges
from paceline.protocol.record import record

Plain = dict[str, Any]


@record
class Message:
    """Base of all messages: those of control connections are subclassed here directly."""

    row_types: ClassVar[dict[str, Any]] = {}
    """Fields that hold a sequence of records or named tuples, and the type of one of them."""


@record
class Lease:
    """Positions [lo, hi) of an epoch's seeded order, a part of the global batch [start, stop)."""

    id: int
    epoch: int
    start: int
    stop: int
    lo: int
    hi: int
    row_ranges: RowRanges = ()
    """The places of the rows, where workers read in blocks; else positions tell them."""
    next_ranges: RowRanges = ()
    """Places that will come next, as things stand."""

    @property
    def samples(self) -> int:
        return self.hi - self.lo

    @property
    def batch(self) -> int:
        return self.stop - self.start


# ---- coordinator to worker -------------------------------------------------------------------


@record
class PlannedSteps(Message):
    """Work planned ahead: the global batches of [start, stop), each split among all workers."""

    epoch: int
    start: int
    stop: int
    batch: int
    batch_weights: tuple[int, ...] | None
    """Shares of a batch in proportion to these; None is an even split."""
    pieces: RowRanges = ()
    """The places behind this worker's shares, one after another, where it reads in blocks."""
    ahead: RowRanges = ()


@record
class LeaseGranted(Message):
    """Answer to a push: version to pull at least, the next lease, and how stale the push was."""

    version: int
    lease: Lease
    staleness: int


@record
class EnterPhase(Message):
    """Take up the strategy of this phase, importing the exported state."""

    phase: int
    servers: tuple[tuple[str, int], ...]
    switching: bool
    """False at the start of a run: there is no pause to measure then."""
    groups: tuple[tuple[int, ...], ...] = ()
    """Workers that act as one, where the strategy has such."""
    snapshot: bool = False
    """Keep a copy of the state that is handed over: the switch is a trial."""
    restore: bool = False
    """The trial failed: take up that copy in place of the state as it is now."""


@record
class Quiesce(Message):
    """No work is in flight any more: export the state, servers having applied `version`."""

    version: int


@record
class Evaluate(Message):
    split: str


@record
class SaveCheckpoint(Message):
    """Write a checkpoint of the exported state, with the coordinator's own memory beside it."""

    name: str
    coordinator_state: Plain


@record
class EpochEnd(Message):
    epoch: int


@record
class FinishRun(Message):
    save_model: bool


# ---- worker to coordinator -------------------------------------------------------------------


@record
class WorkerReady(Message):
    """A worker stands ready; the facts must be the same on every worker."""

    worker: int
    samples: int
    batch: int
    epochs: int | None
    splits: tuple[str, ...]
    """Which of val and test the job can evaluate; a user's own loop evaluates by itself."""
    speed: float = 0.0
    """Samples a second in a short probe; 0 where no strategy needs to know."""
    layout: BlockLayout | None = None
    """The blocks of the training data, where workers read it in blocks."""
    clip: float | None = None
    """Largest norm of the gradient, where the script says it and not the plan."""


@record
class StepStats(Message):
    """Sums over the steps since the last report; `loss` is None where the loop does not tell."""

    samples: int
    predictions: int
    """As many as samples for a classifier, more for text."""
    loss_sum: float | None
    correct: int | None
    """None where there are no classes to be right about."""
    busy_s: float = 0.0
    """Time spent computing: input, forward and backward."""
    comm_s: float = 0.0
    """Time spent in exchanges that nothing hid."""
    norms: tuple[float, float, float, float] | None = None
    """Now and then: own samples, own gradient's squared norm, all samples, the mean's."""


@record
class StepsApplied(Message):
    """All planned work up to `position` of the epoch is applied here."""

    worker: int
    epoch: int
    position: int
    step: int
    measured: StepStats


@record
class GradientPushed(Message):
    """A gradient is on its way to every shard under this handle, computed on version `base`."""

    worker: int
    handle: int
    lease: int
    samples: int
    base: int
    step: int
    measured: StepStats


@record
class PhaseEntered(Message):
    worker: int


@record
class TrainingResumed(Message):
    """The first forward after a switch begins; drain and evaluation are not in the pause."""

    worker: int
    pause_s: float


@record
class Quiesced(Message):
    worker: int
    checksum: str
    lr: float


@record
class Evaluated(Message):
    worker: int
    loss_sum: float | None
    """None where nothing was learnt that could be measured."""
    correct: int | None
    count: int
    """Predictions made; for text more than samples."""


@record
class CheckpointWritten(Message):
    worker: int
    path: str


@record
class EpochEndReply(Message):
    """Answer to EpochOver: does this worker's loop want another epoch?"""

    worker: int
    more: bool


@record
class WorkerFinished(Message):
    """The last word of a worker, with its totals."""

    worker: int
    totals: Plain


@record
class LossDiverged(Message):
    worker: int
    step: int
    loss: float
    reason: str


@record
class Heartbeat(Message):
    """Sent every second by a thread of its own: what the worker is doing, and since when."""

    worker: int
    step: int
    phase: str
    phase_changes: int
    """Changes whenever the worker goes from one phase to the next."""


@record
class TelemetryForwarded(Message):
    """An event of telemetry, as it is written into the run folder; for those who watch live."""

    process_name: str
    event: Plain


@record
class ProcessFailing(Message):
    """A process is about to end because of an exception.

    `blame` is "usage" for the user's mistake, "peer" when another process caused it, else "own".
    """

    who: str
    error: str
    traceback: str
    blame: str


# ---- a run folder that a process cannot reach by itself -----------------------------------------


@record
class EventLine(Message):
    """A line for the sender's own file of events."""

    line: str


@record
class FileChunk(Message):
    """The next bytes of a file of a checkpoint (`NAME/FILE`), or of the model (`model`)."""

    path: str
    data: bytes


@record
class FilesComplete(Message):
    """All of a checkpoint, or of the model, has been sent: it takes its place now."""

    path: str
    keep: int


@record
class FileRequest(Message):
    """A piece of a file of the checkpoint that the run begins from."""

    name: str
    offset: int


@record
class FileResponse(Message):
    data: bytes
    size: int


@record
class RunClockRequest(Message):
    pass


@record
class RunClockResponse(Message):
    """Seconds since the run began, by the supervisor's clock."""

    seconds: float


# ---- servers ---------------------------------------------------------------------------------


@record
class ServerReady(Message):
    server: int
    host: str
    port: int


@record
class GradientRef(Message):
    """One gradient of an update, with its weight in the sum."""

    worker: int
    handle: int
    weight: float


@record
class ApplyUpdate(Message):
    """Make version `version` out of the parts; `clip` is the largest norm of the whole gradient."""

    row_types: ClassVar[dict[str, Any]] = {"parts": GradientRef}

    version: int
    parts: tuple[GradientRef, ...]
    lr_scale: float
    clip: float | None


@record
class ShardSqNorm(Message):
    """A shard's share of the squared norm of an update that is to be clipped."""

    server: int
    version: int
    square: float


@record
class ClipFactor(Message):
    version: int
    factor: float


@record
class StopServer(Message):
    pass


KINDS: dict[str, type[Message]] = {c.__name__: c for c in Message.__subclasses__()}
_NESTED: dict[str, Any] = {"lease": Lease, "measured": StepStats, "layout": BlockLayout}


def message_to_wire(message: Message) -> Plain:
    return {"kind": type(message).__name__, **dataclasses.asdict(message)}


def message_from_wire(plain: object, kinds: Mapping[str, type[Message]] = KINDS) -> Message:
    """Parses a message of one of these kinds; by default those of control connections."""
    kind = plain.get("kind") if isinstance(plain, dict) else type(plain).__name__
    if not isinstance(plain, dict) or not isinstance(kind, str) or kind not in kinds:
        raise WireError(f"a message of unknown kind {kind!r}: is the peer of another version?")
    cls = kinds[kind]
    fields = {f.name for f in dataclasses.fields(cls)}
    if fields != set(plain) - {"kind"}:
        given = sorted(map(str, set(plain) - {"kind"}))
        raise WireError(f"a {cls.__name__} message with fields {given}")
    try:
        values = {k: _restore(cls, k, v) for k, v in plain.items() if k != "kind"}
    except TypeError as error:
        raise WireError(f"a {cls.__name__} message with odd values ({error})") from None
    return cls(**values)


def _restore(cls: type[Message], name: str, value: Any) -> Any:
    nested = _NESTED.get(name)
    if nested is not None and isinstance(value, dict):
        return nested(**{k: _freeze(v) for k, v in value.items()})
    row_type = cls.row_types.get(name)
    if row_type is not None:
        return tuple(
            row_type(**row) if isinstance(row, dict) else row_type(*map(_freeze, row))
            for row in value
        )
    return _freeze(value)


def _freeze(value: Any) -> Any:
    if isinstance(value, list):
        return tuple(tuple(v) if isinstance(v, list) else v for v in value)
    return value


def split_batch(count: int, workers: int, weights: tuple[int, ...] | None = None) -> list[int]:
    """Offsets 0 = o[0] <= ... <= o[workers] = count that cut a batch into the workers' shares.

    Even shares differ by one at most, the larger ones first; weighted shares are rounded by
    largest remainder. Shares may be empty.
    """
    if weights is None:
        small, extra = divmod(count, workers)
        sizes = [small + (i < extra) for i in range(workers)]
    else:
        total = sum(weights)
        exact = [count * w / total for w in weights]
        sizes = [int(x) for x in exact]
        left = count - sum(sizes)
        by_remainder = sorted(range(workers), key=lambda i: (sizes[i] - exact[i], i))
        for i in by_remainder[:left]:
            sizes[i] += 1
    offsets = [0]
    for size in sizes:
        offsets.append(offsets[-1] + size)
    return offsets
