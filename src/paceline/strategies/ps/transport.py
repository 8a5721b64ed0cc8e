"""Interfaces between the parameter-server strategy and the ways its tensors travel.

`ParameterTransport` is a worker's link to one server shard, `GradientEndpoint` the server's end for
one worker. Both have an implementation for TCP and one for shared memory. A transport that never
blocks lets the same runner work in one process without threads.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple, Protocol

import torch

from paceline.protocol.shard import Handle
from paceline.strategies.ps.messages import PushHeader
from paceline.strategies.runner import CommReport

if TYPE_CHECKING:
    from paceline.strategies.ps.store import PendingGradient, ShardState, Slot


class Pulled(NamedTuple):
    """Version of the weights received, and how long updates in progress delayed them."""

    version: int
    queued_us: int


class EndpointCounters(NamedTuple):
    """Traffic of one worker since the counters were last read."""

    pulls: int
    queued_us: int
    bytes_sent: int
    bytes_received: int


class ParameterTransport(Protocol):
    """One worker's link to one server shard.

    Every wait has a deadline. Raises PeerLost if the server is gone or reports a failure, and
    DeadlineExceeded if it does not answer in time.
    """

    @property
    def kind(self) -> Literal["shared", "network", "simulated"]: ...

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

    def close(self) -> None: ...


class PendingExchange(Protocol):
    """A push and the pull after it, in progress next to the computation."""

    def wait(self, timeout_s: float) -> float:
        """Waits until the weights have arrived; returns the seconds the exchange took."""


class ExchangeScheduler(Protocol):
    """Runs exchanges next to the computation (`overlap=true`), one at a time."""

    def start(self, push: Callable[[], None], pull: Callable[[], None]) -> PendingExchange:
        """Runs `push`, then `pull`. Without threads: `push` at once, `pull` in `wait`."""

    def close(self) -> None: ...


@dataclass(frozen=True, kw_only=True)
class Connected:
    """Links to all shards, in their order."""

    transports: tuple[ParameterTransport, ...]
    send_buffer: torch.Tensor
    """Gradients of all shards; in shared memory if a server reads them there."""
    report: CommReport
    """The reason says why gradients pass through the network; empty if all share memory."""
    exchanges: ExchangeScheduler | None


class GradientEndpoint(Protocol):
    """Receiver of one worker's gradients on this server."""

    def receive(self, push: PushHeader, body_bytes: int) -> PendingGradient:
        """Takes a gradient announced on the connection; raises WireError if it does not fit."""

    def find(self, handle: int) -> PendingGradient | None:
        """Returns a gradient that was announced to the coordinator only, if it has arrived."""

    def consumed(self, handle: int) -> None:
        """The update is applied: the worker may overwrite a gradient that stayed in place."""

    def pop_counters(self) -> EndpointCounters: ...
