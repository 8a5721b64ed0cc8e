"""Copies of a shard: a worker's links to all servers that hold it, and its recovery from one.

Gradients go to every server of a shard, and the coordinator orders the same updates everywhere, so
all of them are equal at each version. Weights and optimizer state are read from the first.
"""

import contextlib
from collections.abc import Sequence

import torch

from paceline.comm.wire import Channel
from paceline.errors import DeadlineExceeded, PeerLost, WireError
from paceline.protocol.server_members import Address
from paceline.protocol.shard import Handle
from paceline.strategies.ps.messages import PushHeader
from paceline.strategies.ps.store import ShardState, Slot
from paceline.strategies.ps.transport import Pulled, TcpTransport, TransportKind
from paceline.strategies.runner import WorkerContext

RECOVERY_S = 30.0
"""Time that a server may be silent during a recovery before another is asked."""


class ReplicatedTransport:
    """A worker's links to the servers of one shard; see `ParameterTransport`."""

    def __init__(self, links: Sequence[TcpTransport]) -> None:
        """The first link is to the server that weights are pulled from."""
        self._first, *self._backups = links
        self._links = list(links)

    @property
    def kind(self) -> TransportKind:
        return self._first.kind

    @property
    def bytes_sent(self) -> int:
        return sum(link.bytes_sent for link in self._links)

    @property
    def bytes_received(self) -> int:
        return sum(link.bytes_received for link in self._links)

    def push(self, header: PushHeader, gradient: torch.Tensor) -> None:
        if not self._first.compresses:
            for link in self._links:
                link.push(header, gradient)
            return
        encoded = self._first.encode(gradient)
        for link in self._links:
            link.push_encoded(header, encoded)

    def request(self, at_least: int, *, after: Handle | None = None, exact: bool = False) -> None:
        self._first.request(at_least, after=after, exact=exact)

    def receive(self, out: torch.Tensor) -> Pulled:
        pulled = self._first.receive(out)
        for backup in self._backups:
            backup.wait_for_consumption()
        return pulled

    def load(self, state: ShardState) -> None:
        for link in self._links:
            link.load(state)

    def request_slots(self, at_least: int) -> None:
        self._first.request_slots(at_least)
        # Orders that are under way must not reach a copy after it has loaded another state.
        for backup in self._backups:
            backup.request_version(at_least)

    def receive_slots(self) -> list[Slot]:
        slots = self._first.receive_slots()
        for backup in self._backups:
            backup.receive_version()
        return slots

    def interrupt(self) -> None:
        for link in self._links:
            link.interrupt()

    def close(self) -> None:
        for link in self._links:
            link.close()


def server_addresses(context: WorkerContext, shard: int) -> list[Address]:
    """Returns the addresses of the servers of a shard; weights are pulled from the first."""
    backups = [(host, port) for s, host, port in context.phase.backups if s == shard]
    return [context.phase.servers[shard], *backups]


def open_channel(context: WorkerContext, shard: int, address: Address) -> Channel:
    """Connects to a server, until the view ends. Raises PeerLost if it does not accept."""
    host, port = address
    channel = Channel.connect(
        *(host, port),
        token=context.token,
        peer=f"server {shard}" if not context.phase.backups else f"server {shard} ({host}:{port})",
        timeout_s=context.timeout_s,
        retry_s=0.0,  # It listens before its address is known.
    )
    context.group.on_abort(channel.shut_down)
    return channel


def recover_shard(
    context: WorkerContext,
    shard: int,
    lost: Sequence[Address],
    version: int,
    out: torch.Tensor,
) -> list[Slot]:
    """Reads weights into `out`, and returns the optimizer state, from a copy that is left.

    Waits until all copies have applied the version. Raises PeerLost if no copy answers.
    """
    slots: list[Slot] | None = None
    problem = ""
    for address in server_addresses(context, shard):
        if address in lost:
            continue
        try:
            with contextlib.closing(_connect_to_recover(context, shard, address)) as link:
                if slots is None:
                    link.request(version, exact=True)
                    link.receive(out)
                    link.request_slots(version)
                    slots = link.receive_slots()
                else:
                    link.request_version(version)
                    link.receive_version()
        except (PeerLost, DeadlineExceeded, WireError) as error:
            problem = str(error)
    if slots is None:
        raise PeerLost(f"no server holds shard {shard} any more: {problem or 'all are lost'}")
    return slots


def _connect_to_recover(context: WorkerContext, shard: int, address: Address) -> TcpTransport:
    timeout_s = min(context.timeout_s, RECOVERY_S)
    channel = Channel.connect(
        *address,
        token=context.token,
        peer=f"server {shard}",
        timeout_s=timeout_s,
        retry_s=0.0,
    )
    return TcpTransport(channel)
