"""Ways in which the tensors of the parameter server travel; here over TCP.

`ParameterTransport` is a worker's link to one server shard; TCP and shared memory implement it. A
transport that never blocks lets the same runner work in one process without threads. Over TCP,
typed messages pass a `Channel`, and bodies are optionally compressed.
"""

import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol, TypeVar

import torch

from paceline.codecs.base import pack_payload, unpack_payload
from paceline.codecs.compressor import Compressor
from paceline.comm.flat_layout import as_memoryview
from paceline.comm.wire import MAX_BODY, Channel
from paceline.errors import PeerLost, WireError
from paceline.protocol.server_members import Address
from paceline.protocol.shard import Handle
from paceline.strategies.ps.messages import (
    AwaitVersion,
    DataMessage,
    ExportSlots,
    Failed,
    Loaded,
    LoadShard,
    PayloadTable,
    Pull,
    PushGradient,
    PushHeader,
    SlotEntry,
    Slots,
    VersionApplied,
    Weights,
    data_from_wire,
    data_to_wire,
)
from paceline.strategies.ps.store import (
    ParameterStore,
    PendingGradient,
    ShardState,
    Slot,
    dtype_from_name,
)
from paceline.strategies.runner import CommReport

M = TypeVar("M", bound=DataMessage)
TransportKind = Literal["shared", "network", "simulated"]
WaitForExchange = Callable[[float], float]
"""Waits this many seconds for the weights to arrive; returns the seconds the exchange took."""


class Pulled(NamedTuple):
    """Version of the weights received, and how long updates in progress delayed them."""

    version: int
    queued_us: int


class ParameterTransport(Protocol):
    """One worker's link to one server shard.

    Every wait has a deadline. Raises PeerLost if the server is gone or reports a failure, and
    DeadlineExceeded if it does not answer in time.
    """

    @property
    def kind(self) -> TransportKind: ...

    @property
    def bytes_sent(self) -> int: ...

    @property
    def bytes_received(self) -> int: ...

    def push(self, header: PushHeader, gradient: torch.Tensor) -> None:
        """Sends this shard's bytes of the send buffer, which must not change before the next pull.

        A codec may change them: it leaves gradient plus residual there.
        """

    def request(self, at_least: int, *, after: Handle | None = None, exact: bool = False) -> None:
        """Asks for weights; separate from `receive`, so that all shards work at the same time."""

    def receive(self, out: torch.Tensor) -> Pulled:
        """Writes the requested weights into `out`, this shard's bytes of the receive buffer."""

    def load(self, state: ShardState) -> None:
        """Replaces the shard's state; versions start at 0 again."""

    def request_slots(self, at_least: int) -> None:
        """Asks for the optimizer state of at least this version."""

    def receive_slots(self) -> list[Slot]:
        """Returns the requested optimizer state, as copies."""

    def interrupt(self) -> None:
        """Makes all waits fail, in any thread; then only `close` is allowed."""

    def close(self) -> None: ...


class RecoverShard(Protocol):
    def __call__(
        self, shard: int, lost: Sequence[Address], version: int, out: torch.Tensor
    ) -> list[Slot]:
        """Reads the weights of a version into `out`, and returns the optimizer state.

        No server answers at the lost addresses. Raises PeerLost if none holds the shard.
        """


class DeferredExchanges:
    """Exchanges of `overlap=true`, one at a time, without threads: the pull runs in the wait."""

    def start(self, push: Callable[[], None], pull: Callable[[], None]) -> WaitForExchange:
        """Runs `push`, then `pull`."""

        def wait(timeout_s: float) -> float:
            start = time.perf_counter()
            pull()
            return time.perf_counter() - start

        push()
        return wait

    def close(self) -> None:
        return


@dataclass(frozen=True, kw_only=True)
class Connected:
    """Links to all shards, in their order."""

    transports: tuple[ParameterTransport, ...]
    send_buffer: torch.Tensor
    """Gradients of all shards; in shared memory if a server reads them there."""
    report: CommReport
    """The reason says why gradients pass through the network; empty if all share memory."""
    exchanges: DeferredExchanges | None
    recover: RecoverShard | None = None
    """Reads a shard when the view ends; None if the links never fail."""


class EncodedGradient(NamedTuple):
    """A gradient as it is sent; compressed if there is a payload table."""

    table: PayloadTable | None
    body: list[memoryview]


class TcpTransport:
    """A worker's connection to one server; see `ParameterTransport`."""

    kind: TransportKind = "network"

    def __init__(self, channel: Channel, compressor: Compressor | None = None) -> None:
        self.channel = channel
        self.peer = channel.peer
        self._compressor = compressor

    @property
    def compresses(self) -> bool:
        return self._compressor is not None

    @property
    def bytes_sent(self) -> int:
        return self.channel.bytes_sent

    @property
    def bytes_received(self) -> int:
        return self.channel.bytes_received

    def push(self, header: PushHeader, gradient: torch.Tensor) -> None:
        self.push_encoded(header, self.encode(gradient))

    def encode(self, gradient: torch.Tensor) -> EncodedGradient:
        """Compresses a gradient, at most once per push: the residual changes."""
        if self._compressor is None or not gradient.numel():
            return EncodedGradient(None, [as_memoryview(gradient)])
        payload = self._compressor.encode(gradient.view(self._compressor.coder.dtype))
        rows, body = pack_payload(payload)
        return EncodedGradient(tuple(map(tuple, rows)), body)

    def push_encoded(self, header: PushHeader, gradient: EncodedGradient) -> None:
        table, body = gradient
        push = PushGradient(
            header.worker, header.view, header.handle, header.missing, header.options, table
        )
        self.send(push, *body)

    def request(self, at_least: int, *, after: Handle | None = None, exact: bool = False) -> None:
        self.send(Pull(at_least=at_least, after=after, exact=exact))

    def receive(self, out: torch.Tensor) -> Pulled:
        weights, size = self.receive_message(Weights, max_body=out.numel())
        if weights.payload is None:
            if size != out.numel():
                raise WireError(f"{self.peer} sent {size} bytes, expected {out.numel()}")
            if size:
                self.channel.receive_into(as_memoryview(out))
        elif self._compressor is None:
            raise WireError(f"{self.peer} sent compressed weights, but no codec is in use")
        else:
            payload = unpack_payload(weights.payload, _receive_body(self.channel, size))
            coder = self._compressor.coder
            coder.decode(payload, out.view(coder.dtype))
        return Pulled(weights.version, weights.queued_us)

    def load(self, state: ShardState) -> None:
        entries, tensors = pack_slots(state.slots)
        nbytes, slices, options = state.weights.numel(), state.slices, state.options
        message = LoadShard(
            state.view, nbytes, slices, options, state.optimizer, entries, state.codec
        )
        self.send(message, as_memoryview(state.weights), *tensors)
        self.receive_message(Loaded)

    def request_slots(self, at_least: int) -> None:
        self.send(ExportSlots(at_least=at_least))

    def receive_slots(self) -> list[Slot]:
        message, size = self.receive_message(Slots, max_body=MAX_BODY)
        return unpack_slots(message.slots, _receive_body(self.channel, size))

    def request_version(self, at_least: int) -> None:
        """Asks for an answer when at least this version is applied."""
        self.send(AwaitVersion(at_least))

    def receive_version(self) -> None:
        self.receive_message(VersionApplied)

    def wait_for_consumption(self) -> None:
        """Waits until the gradient of the last push may be overwritten."""
        return

    def interrupt(self) -> None:
        self.channel.shut_down()

    def close(self) -> None:
        self.channel.close()

    def send(self, message: DataMessage, *body: memoryview) -> None:
        self.channel.send(data_to_wire(message), *body)

    def receive_message(self, expected: type[M], *, max_body: int = 0) -> tuple[M, int]:
        """Returns a message and the size of its body; raises PeerLost if the server failed."""
        head, size = self.channel.receive_head(max_body=max_body)
        message = data_from_wire(head)
        if isinstance(message, Failed):
            raise PeerLost(f"{self.peer} reports: {message.error}")
        if not isinstance(message, expected):
            raise WireError(
                f"{self.peer} sent {type(message).__name__}, expected {expected.__name__}"
            )
        return message, size

    def check_peer(self) -> None:
        """Raises if the server has closed the connection or sent a failure, without waiting."""
        if self.channel.has_input():
            message, _ = self.receive_message(DataMessage)
            raise WireError(f"{self.peer} sent {type(message).__name__} without a request")


class EndpointCounters(NamedTuple):
    """Traffic of one worker."""

    pulls: int
    queued_us: int
    bytes_sent: int
    bytes_received: int


class TcpEndpoint:
    """The server's end of one worker's connection: receives its gradients, sends weights."""

    def __init__(
        self, channel: Channel, store: ParameterStore, lock: AbstractContextManager[object]
    ) -> None:
        self.channel = channel
        self.store = store
        self.lock = lock
        """Lock of the store."""
        self._counted = EndpointCounters(0, 0, 0, 0)

    def receive(self, push: PushHeader, body_bytes: int) -> PendingGradient:
        """Takes a gradient announced on the connection; raises WireError if it does not fit."""
        if not isinstance(push, PushGradient):
            raise WireError(
                f"{type(push).__name__} without shared memory; send a PushGradient instead"
            )
        with self.lock:
            buffer = self.store.borrow_buffer()
        self._receive_gradient(push.payload, body_bytes, buffer)
        return PendingGradient(buffer, frozenset(push.missing), push.options)

    def _receive_gradient(
        self, table: PayloadTable | None, body_bytes: int, buffer: torch.Tensor
    ) -> None:
        expected, coder = buffer.numel(), self.store.coder
        if table is None or coder is None:
            if body_bytes != expected or table is not None:
                raise WireError(f"a gradient has {body_bytes} bytes, expected {expected}")
            if expected:
                self.channel.receive_into(as_memoryview(buffer))
            return
        values = buffer.view(coder.dtype)
        most = coder.max_payload_bytes(values.numel())
        if body_bytes > most:
            raise WireError(
                f"a compressed gradient has {body_bytes} bytes, expected at most {most}"
            )
        coder.decode(unpack_payload(table, _receive_body(self.channel, body_bytes)), values)

    def pop_counters(self) -> EndpointCounters:
        """Returns the traffic since the last call."""
        now = self._totals()
        before, self._counted = self._counted, now
        return EndpointCounters(*(n - b for n, b in zip(now, before, strict=True)))

    def _totals(self) -> EndpointCounters:
        """Returns the bytes; pulls are counted where they are answered."""
        return EndpointCounters(0, 0, self.channel.bytes_sent, self.channel.bytes_received)

    def send(self, message: DataMessage, *body: memoryview) -> None:
        self.channel.send(data_to_wire(message), *body)

    def send_weights(
        self, version: int, weights: torch.Tensor, *, exact: bool, queued_us: int
    ) -> None:
        coder = self.store.weight_coder
        table: PayloadTable | None = None
        body = [as_memoryview(weights)]
        if coder is not None and not exact:
            rows, body = pack_payload(coder.encode(weights.view(coder.dtype)))
            table = tuple(map(tuple, rows))
        self.send(Weights(version=version, payload=table, queued_us=queued_us), *body)

    def receive_state(self, message: LoadShard, body_bytes: int) -> ShardState:
        body = _receive_body(self.channel, body_bytes)
        return ShardState(
            view=message.view,
            slices=message.slices,
            options=message.options,
            optimizer=message.optimizer,
            codec=message.codec,
            weights=body[: message.nbytes],
            slots=tuple(unpack_slots(message.slots, body[message.nbytes :])),
        )

    def send_slots(self, slots: Iterable[Slot]) -> None:
        entries, tensors = pack_slots(slots)
        self.send(Slots(slots=entries), *tensors)


def pack_slots(slots: Iterable[Slot]) -> tuple[tuple[SlotEntry, ...], list[memoryview]]:
    """Returns the table of optimizer tensors for a message, and their memory for its body."""
    entries, body = [], []
    for index, name, value in slots:
        nbytes = value.numel() * value.element_size()
        dtype = str(value.dtype).removeprefix("torch.")
        entries.append(SlotEntry(index, name, dtype, tuple(value.shape), nbytes))
        body.append(as_memoryview(value))
    return tuple(entries), body


def unpack_slots(entries: Sequence[SlotEntry], body: torch.Tensor) -> list[Slot]:
    """Returns the optimizer tensors of a message; raises WireError if the table does not fit."""
    if sum(entry.nbytes for entry in entries) != body.numel():
        raise WireError(f"optimizer state of {body.numel()} bytes does not match its table")
    slots, at = [], 0
    for index, name, dtype, shape, nbytes in entries:
        # Copied: a view would keep the whole message alive.
        value = body[at : at + nbytes].clone().view(dtype_from_name(dtype)).reshape(shape)
        slots.append(Slot(index, name, value))
        at += nbytes
    return slots


def _receive_body(channel: Channel, size: int) -> torch.Tensor:
    body = torch.empty(size, dtype=torch.uint8)
    if size:
        channel.receive_into(as_memoryview(body))
    return body
