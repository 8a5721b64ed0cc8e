"""Weights and gradients through shared memory, for workers and servers on the same host.

The worker posts its gradient in a `GradientMailbox` and copies weights from the server's
`SharedWeights`. The coordinator's order is the server's only notification. The TCP connection
remains for the state, for gradients the server must copy at once, and for weights that changed
during every attempt to copy them.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Literal

import torch

from paceline.comm.shm.parameters import (
    GradientMailbox,
    SharedWeights,
    SharedWeightsReader,
    open_mailbox,
)
from paceline.comm.shm.segment import shm_domain_id
from paceline.comm.wire import pack, unpack_head
from paceline.errors import WireError
from paceline.protocol.shard import Handle
from paceline.strategies.ps.messages import (
    MemoryReply,
    OfferMemory,
    PushHeader,
    PushShared,
    data_from_wire,
    data_to_wire,
)
from paceline.strategies.ps.store import ParameterStore, PendingGradient, ShardState, Slot
from paceline.strategies.ps.transport import EndpointCounters, Pulled
from paceline.strategies.ps.transport_tcp import TcpEndpoint, TcpTransport


class SharedMemoryTransport:
    """A worker's link to a server on the same host; see `ParameterTransport`."""

    kind: Literal["shared"] = "shared"

    def __init__(
        self,
        tcp: TcpTransport,
        weights: SharedWeights,
        mailbox: GradientMailbox,
        *,
        in_place: bool,
        timeout_s: float,
    ) -> None:
        """`in_place`: the pull after a push waits for its update, so the gradient may stay."""
        self._tcp = tcp
        self._mailbox = mailbox
        self._in_place = in_place
        self._reader = SharedWeightsReader(
            weights, mailbox, peer=tcp.peer, timeout_s=timeout_s, check_peer=tcp.check_peer
        )
        self._request: tuple[int, Handle | None, bool] = (0, None, False)
        self._bytes_pushed = self._bytes_copied = 0

    @property
    def bytes_sent(self) -> int:
        return self._bytes_pushed + self._tcp.bytes_sent

    @property
    def bytes_received(self) -> int:
        return self._bytes_copied + self._tcp.bytes_received

    def push(self, header: PushHeader, gradient: torch.Tensor) -> None:
        """The gradient is in the mailbox already: `gradient` is the mailbox's memory."""
        self._bytes_pushed += gradient.numel()
        # Nothing overwrites a gradient before the next pull. If that pull does not wait for the
        # update, the server must copy the gradient now.
        if self._in_place and self._mailbox.post(header.handle, pack(data_to_wire(header))):
            return
        self._mailbox.last_handle = header.handle
        self._tcp.send(
            PushShared(
                worker=header.worker,
                handle=header.handle,
                missing=header.missing,
                options=header.options,
                in_place=self._in_place,
            )
        )

    def request(self, at_least: int, *, after: Handle | None = None, exact: bool = False) -> None:
        self._request = (at_least, after, exact)

    def receive(self, out: torch.Tensor) -> Pulled:
        at_least, after, exact = self._request
        copied = self._reader.copy_weights(at_least, out)
        if copied is None:  # Updates changed the weights during every attempt.
            self._tcp.request(at_least, after=after, exact=exact)
            return self._tcp.receive(out)
        self._bytes_copied += out.numel()
        return Pulled(*copied)

    def load(self, state: ShardState) -> None:
        self._tcp.load(state)

    def request_slots(self, at_least: int) -> None:
        self._tcp.request_slots(at_least)

    def receive_slots(self) -> list[Slot]:
        return self._tcp.receive_slots()

    def close(self) -> None:
        self._mailbox.clear()
        self._tcp.close()


class SharedMemoryEndpoint:
    """The server's end of a worker on the same host; see `GradientEndpoint`."""

    def __init__(
        self,
        tcp: TcpEndpoint,
        mailbox: GradientMailbox,
        store: ParameterStore,
        lock: AbstractContextManager[object],
    ) -> None:
        self.mailbox = mailbox
        self._tcp = tcp
        self._store = store
        self._lock = lock
        """Lock of the store. The caller holds it in all methods except `receive`."""
        self._counted = (0, 0)
        self._gradients = 0
        """Arrived since the counters were last read."""

    def receive(self, push: PushHeader, body_bytes: int) -> PendingGradient:
        if not isinstance(push, PushShared):
            return self._tcp.receive(push, body_bytes)
        with self._lock:
            gradient = self._pending(push)
            if push.in_place:
                return gradient
            shared = self._store.shared_weights
            assert shared is not None
            copy = self._store.borrow_buffer().copy_(gradient.buffer)
            self.consumed(push.handle)
            shared.notify()
            return PendingGradient(copy, gradient.missing, gradient.options)

    def find(self, handle: int) -> PendingGradient | None:
        packed = self.mailbox.header_of(handle)
        if packed is None:
            return None
        header = data_from_wire(unpack_head(packed))
        if not isinstance(header, PushHeader):
            raise WireError(f"unexpected {type(header).__name__} in a gradient mailbox")
        return self._pending(header)

    def _pending(self, header: PushHeader) -> PendingGradient:
        self._gradients += 1
        missing = frozenset(header.missing)
        return PendingGradient(self.mailbox.gradient, missing, header.options, self)

    def consumed(self, handle: int) -> None:
        self.mailbox.consumed = handle  # The worker may overwrite the gradient.

    def pop_counters(self) -> EndpointCounters:
        """Returns the worker's copies of weights as pulls, next to what passed the connection."""
        network, size = self._tcp.pop_counters(), self.mailbox.gradient.numel()
        now = self.mailbox.reads, self.mailbox.queued_us
        reads, queued_us = now[0] - self._counted[0], now[1] - self._counted[1]
        gradients, self._gradients = self._gradients, 0
        self._counted = now
        return EndpointCounters(
            reads,
            queued_us,
            reads * size + network.bytes_sent,
            gradients * size + network.bytes_received,
        )


def accept_memory(
    offer: OfferMemory,
    tcp: TcpEndpoint,
    store: ParameterStore,
    lock: AbstractContextManager[object],
) -> tuple[SharedMemoryEndpoint | None, MemoryReply]:
    """Opens a worker's mailbox; the reply says where the weights are, or why it declines.

    The caller holds the lock.
    """
    if offer.domain != shm_domain_id():
        return None, MemoryReply(descriptor=None, reason="servers on other machines")
    try:
        mailbox = open_mailbox(
            offer.segment, server=offer.server, servers=offer.servers, lo=offer.lo, hi=offer.hi
        )
    except OSError as error:
        return None, MemoryReply(descriptor=None, reason=f"{error.strerror} at a worker's memory")
    store.allocate(offer.hi - offer.lo)
    shared = store.shared_weights
    if shared is None:
        reason = "no room for a server's weights in shared memory"
        return None, MemoryReply(descriptor=None, reason=reason)
    endpoint = SharedMemoryEndpoint(tcp, mailbox, store, lock)
    return endpoint, MemoryReply(descriptor=shared.descriptor(), reason="")
