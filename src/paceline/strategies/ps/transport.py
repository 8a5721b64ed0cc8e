"""Interfaces between the parameter-server strategy and the ways its tensors travel.

`ParameterTransport` is a worker's link to one server shard; TCP and shared memory implement it. A
transport that never blocks lets the same runner work in one process without threads.
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
    from paceline.strategies.ps.store import ShardState, Slot

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

    def close(self) -> None: ...


class ExchangeScheduler(Protocol):
    """Runs exchanges next to the computation (`overlap=true`), one at a time."""

    def start(self, push: Callable[[], None], pull: Callable[[], None]) -> WaitForExchange:
        """Runs `push`, then `pull`. Without threads: `push` at once, `pull` in the wait."""

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
