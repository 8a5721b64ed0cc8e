"""Messages between a worker and a parameter server; bodies (tensors) follow as raw bytes.

They are written and parsed like the messages of the control connection. `data_to_wire` does not
copy nested values, because it runs at every push: fields hold plain values and tuples only.
"""

from typing import Any, ClassVar, NamedTuple

from paceline.protocol.messages import Message, Plain, message_from_wire

Options = dict[str, Any]
"""Plain options of an optimizer's parameter group, for example `lr`."""
PayloadTable = tuple[tuple[Any, ...], ...]
"""Type, shape and size of the tensors of a compressed payload (`codecs.base`)."""


class SliceEntry(NamedTuple):
    """One slice of a parameter in a shard: `nbytes` at byte `offset` of the shard."""

    name: str
    offset: int
    nbytes: int
    dtype: str
    group: int
    """Index of its parameter group in the optimizer."""
    shape: tuple[int, ...]


class SlotEntry(NamedTuple):
    """Type and size of one optimizer tensor, in the order of the message's body."""

    slice_index: int
    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int


class DataMessage(Message):
    """Base of everything that crosses a connection between a worker and a server."""


# ---- worker to server -------------------------------------------------------------------------


class PushHeader(DataMessage):
    """Description of one gradient: the only message that also travels through a mailbox."""

    worker: int
    view: int
    """Number of the sender's view: a gradient from another one is ignored."""
    handle: int
    """Number of this push, per worker."""
    missing: tuple[int, ...]
    """Slices of the shard for which there is no gradient."""
    options: tuple[Options, ...]
    """Options of the optimizer's parameter groups for this update."""


class PushGradient(PushHeader):
    """A gradient in the body; compressed if there is a payload table."""

    payload: PayloadTable | None


class PushShared(PushHeader):
    """A gradient in the worker's mailbox, announced here because the order will not suffice."""

    in_place: bool
    """True if it stays unchanged until its update is applied; otherwise copy it now."""


class Pull(DataMessage):
    """Request for weights of at least a version, that include the push `after`, if given."""

    at_least: int
    after: tuple[int, int] | None
    exact: bool
    """Never compress the weights."""


class LoadShard(DataMessage):
    """Replace the shard's state. Body: weights, then slots."""

    row_types: ClassVar[dict[str, Any]] = {"slices": SliceEntry, "slots": SlotEntry}

    view: int
    """Number of the view that continues from it."""
    nbytes: int
    slices: tuple[SliceEntry, ...]
    options: tuple[Options, ...]
    optimizer: str
    """Reference of its class, `module:name`."""
    slots: tuple[SlotEntry, ...]
    codec: str | None


class ExportSlots(DataMessage):
    """Request for the optimizer state of at least a version."""

    at_least: int


class AwaitVersion(DataMessage):
    """Request for an answer when at least this version is applied."""

    at_least: int


class OfferMemory(DataMessage):
    """A worker's shared memory: bytes `lo` to `hi` of the gradient in it are for this server."""

    worker: int
    domain: str
    """Identity of the machine (`shm_domain_id`): only processes with the same one can share."""
    segment: str
    server: int
    servers: int
    lo: int
    hi: int


# ---- server to worker -------------------------------------------------------------------------


class Weights(DataMessage):
    """Weights in the body; compressed if there is a payload table."""

    version: int
    payload: PayloadTable | None
    queued_us: int
    """Time that the pull waited for updates in progress."""


class Loaded(DataMessage):
    """The shard's state was replaced."""


class VersionApplied(DataMessage):
    """Answer to `AwaitVersion`."""


class Slots(DataMessage):
    """Optimizer state in the body."""

    row_types: ClassVar[dict[str, Any]] = {"slots": SlotEntry}

    slots: tuple[SlotEntry, ...]


class MemoryReply(DataMessage):
    """Answer to `OfferMemory`: where the server's weights are, or why it declines."""

    descriptor: dict[str, int] | None
    reason: str


class Failed(DataMessage):
    """The server cannot serve this worker any longer; the connection is closed after it."""

    error: str


_FROM_WORKER = (
    *(PushHeader, PushGradient, PushShared, Pull),
    *(LoadShard, ExportSlots, AwaitVersion, OfferMemory),
)
_FROM_SERVER = (Weights, Loaded, Slots, VersionApplied, MemoryReply, Failed)
KINDS: dict[str, type[Message]] = {cls.__name__: cls for cls in (*_FROM_WORKER, *_FROM_SERVER)}


def data_to_wire(message: DataMessage) -> Plain:
    plain: Plain = {"kind": type(message).__name__}
    names: tuple[str, ...] = message.__match_args__
    for name in names:
        plain[name] = getattr(message, name)
    return plain


def data_from_wire(plain: object) -> DataMessage:
    """Parses a message; raises WireError if its kind or fields are unknown."""
    message = message_from_wire(plain, KINDS)
    assert isinstance(message, DataMessage)
    return message
