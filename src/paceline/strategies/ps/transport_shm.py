"""Weights and gradients through shared memory, for workers and servers on the same host.

The worker posts its gradient in a `GradientMailbox` and copies weights from the server's
`SharedWeights`. The coordinator's order is the server's only notification. The TCP connection
remains for the state, for gradients the server must copy at once, and for weights that changed
during every attempt to copy them.
"""

import torch

from paceline.comm.shm.parameters import (
    GradientMailbox,
    SharedWeights,
    SharedWeightsReader,
    open_mailbox,
)
from paceline.comm.shm.segment import shm_domain_id
from paceline.comm.wire import Channel, pack, unpack_head
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
from paceline.strategies.ps.store import PendingGradient
from paceline.strategies.ps.transport import (
    EndpointCounters,
    Pulled,
    TcpEndpoint,
    TcpTransport,
    TransportKind,
)


class SharedMemoryTransport(TcpTransport):
    """A worker's link to a server on the same host; see `ParameterTransport`."""

    kind: TransportKind = "shared"

    def __init__(
        self,
        channel: Channel,
        weights: SharedWeights,
        mailbox: GradientMailbox,
        *,
        in_place: bool,
        timeout_s: float,
    ) -> None:
        """`in_place`: the pull after a push waits for its update, so the gradient may stay."""
        super().__init__(channel)
        self._mailbox = mailbox
        self._in_place = in_place
        self._reader = SharedWeightsReader(
            weights, mailbox, peer=self.peer, timeout_s=timeout_s, check_peer=self.check_peer
        )
        self._request: tuple[int, Handle | None, bool] = (0, None, False)
        self._bytes_pushed = self._bytes_copied = 0

    @property
    def bytes_sent(self) -> int:
        return self._bytes_pushed + super().bytes_sent

    @property
    def bytes_received(self) -> int:
        return self._bytes_copied + super().bytes_received

    def push(self, header: PushHeader, gradient: torch.Tensor) -> None:
        """The gradient is in the mailbox already: `gradient` is the mailbox's memory."""
        self._bytes_pushed += gradient.numel()
        # Nothing overwrites a gradient before the next pull. If that pull does not wait for the
        # update, the server must copy the gradient now.
        handle = header.handle
        if self._in_place and self._mailbox.post(handle, pack(data_to_wire(header))):
            return
        self._mailbox.last_handle = handle
        place, (missing, options) = (header.worker, header.view), (header.missing, header.options)
        self.send(PushShared(*place, handle, missing, options, self._in_place))

    def wait_for_consumption(self) -> None:
        self._reader.wait_for(0)

    def request(self, at_least: int, *, after: Handle | None = None, exact: bool = False) -> None:
        self._request = (at_least, after, exact)

    def receive(self, out: torch.Tensor) -> Pulled:
        at_least, after, exact = self._request
        copied = self._reader.copy_weights(at_least, out)
        if copied is None:  # Updates changed the weights during every attempt.
            super().request(at_least, after=after, exact=exact)
            return super().receive(out)
        self._bytes_copied += out.numel()
        return Pulled(*copied)

    def close(self) -> None:
        self._mailbox.handle = 0  # Handles start again with the next connection.
        super().close()


class SharedMemoryEndpoint(TcpEndpoint):
    """The server's end of a worker on the same host.

    The caller holds the lock of the store in all methods except `receive`.
    """

    def __init__(self, tcp: TcpEndpoint, mailbox: GradientMailbox) -> None:
        super().__init__(tcp.channel, tcp.store, tcp.lock)
        self.mailbox = mailbox
        self._gradients = 0
        self._counted = self._totals()

    def receive(self, push: PushHeader, body_bytes: int) -> PendingGradient:
        if not isinstance(push, PushShared):
            return super().receive(push, body_bytes)
        with self.lock:
            gradient = self._pending(push)
            if push.in_place:
                return gradient
            shared = self.store.shared_weights
            assert shared is not None
            copy = self.store.borrow_buffer().copy_(gradient.buffer)
            self.mailbox.consumed = push.handle
            shared.notify()
            return PendingGradient(copy, gradient.missing, gradient.options)

    def find(self, handle: int) -> PendingGradient | None:
        """Returns a gradient that was announced to the coordinator only, if it has arrived."""
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
        return PendingGradient(self.mailbox.gradient, missing, header.options, self.mailbox)

    def _totals(self) -> EndpointCounters:
        """Returns the worker's copies of weights as pulls, next to what passed the connection."""
        network, size = super()._totals(), self.mailbox.gradient.numel()
        reads = self.mailbox.reads
        return EndpointCounters(
            reads,
            self.mailbox.queued_us,
            reads * size + network.bytes_sent,
            self._gradients * size + network.bytes_received,
        )


def accept_memory(
    offer: OfferMemory, tcp: TcpEndpoint
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
    tcp.store.allocate(offer.hi - offer.lo)
    shared = tcp.store.shared_weights
    if shared is None:
        reason = "no room for a server's weights in shared memory"
        return None, MemoryReply(descriptor=None, reason=reason)
    reply = MemoryReply(descriptor=shared.descriptor(), reason="")
    return SharedMemoryEndpoint(tcp, mailbox), reply
