"""Connects a worker to its servers; the only place that chooses shared memory or the network."""

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from paceline.codecs.compressor import Compressor
from paceline.comm.flat_layout import FlatLayout
from paceline.comm.shm.parameters import MailboxSegment, open_shared_weights
from paceline.comm.shm.segment import shm_domain_id
from paceline.errors import UsageError
from paceline.strategies.ps.messages import MemoryReply, OfferMemory
from paceline.strategies.ps.replicated import (
    ReplicatedTransport,
    open_channel,
    recover_shard,
    server_addresses,
)
from paceline.strategies.ps.spec import ParameterServer
from paceline.strategies.ps.transport import (
    Connected,
    DeferredExchanges,
    ParameterTransport,
    TcpTransport,
    WaitForExchange,
)
from paceline.strategies.ps.transport_shm import SharedMemoryTransport
from paceline.strategies.runner import CommReport, WorkerContext

Connect = Callable[[ParameterServer, WorkerContext, FlatLayout, Sequence[Compressor]], Connected]
"""Links a worker to its servers; the layout has one shard per server."""


def connect(
    spec: ParameterServer,
    context: WorkerContext,
    layout: FlatLayout,
    compressors: Sequence[Compressor],
) -> Connected:
    """Connects to all servers, through shared memory where `via` and the hosts allow it.

    There is one compressor per shard, or none without a codec; the worker saves their state.
    Raises PeerLost if a server does not accept, and UsageError if `via=shared` is impossible.
    """
    # With the shard of each; the first of a shard compresses for all.
    links: list[tuple[int, TcpTransport]] = []
    for shard in range(len(context.phase.servers)):
        for place, address in enumerate(server_addresses(context, shard)):
            compressor = compressors[shard] if compressors and place == 0 else None
            links.append((shard, TcpTransport(open_channel(context, shard, address), compressor)))
    memory, reasons = None, set()
    if compressors:
        reasons.add("a codec")
    elif spec.via != "network":
        memory, reasons = _offer_memory(spec, context, layout, links)
    shared = [link.kind == "shared" for _, link in links]
    transports: list[ParameterTransport] = []
    for shard in range(len(context.phase.servers)):
        copies = [link for s, link in links if s == shard]
        transports.append(copies[0] if len(copies) == 1 else ReplicatedTransport(copies))
    reason = ", ".join(sorted(reasons))
    if spec.via == "shared" and not all(shared):
        raise UsageError(f"ps: via=shared is not available ({reason}); remove via")
    backend = "shared" if all(shared) else "partly shared" if any(shared) else "network"
    return Connected(
        transports=tuple(transports),
        send_buffer=layout.new_buffer() if memory is None else memory.gradient,
        report=CommReport(backend=backend, reason=reason),
        exchanges=ThreadedExchanges() if spec.overlap else None,
        recover=partial(recover_shard, context),
    )


def _offer_memory(
    spec: ParameterServer,
    context: WorkerContext,
    layout: FlatLayout,
    links: list[tuple[int, TcpTransport]],
) -> tuple[MailboxSegment | None, set[str]]:
    """Replaces the links to servers that accept this worker's shared memory.

    Returns the memory, unless no server accepts, and the reasons of those that do not.
    """
    domain = shm_domain_id()
    if domain is None:
        return None, {"it needs Linux on x86-64 with /dev/shm"}
    try:
        memory = MailboxSegment(len(links), layout.total_bytes)
    except OSError as error:
        return None, {f"{error.strerror} in /dev/shm"}
    reasons = set()
    try:
        for index, (number, tcp) in enumerate(links):
            shard = layout.shards[number]
            place = (index, len(links), shard.lo, shard.hi)
            tcp.send(OfferMemory(context.rank, domain, memory.name, *place))
            reply, _ = tcp.receive_message(MemoryReply)
            if reply.descriptor is None:
                reasons.add(reply.reason)
                continue
            try:
                weights = open_shared_weights(reply.descriptor, shard.hi - shard.lo)
            except OSError as error:
                reasons.add(f"{error.strerror} at the memory of {tcp.peer}")
                continue
            shared = SharedMemoryTransport(
                tcp.channel,
                weights,
                memory.mailbox(index, shard.lo, shard.hi),
                in_place=spec.sync.includes_own_update,
                timeout_s=context.timeout_s,
            )
            links[index] = (number, shared)
    finally:
        memory.unlink()
    return (memory if any(link.kind == "shared" for _, link in links) else None), reasons


class ThreadedExchanges(DeferredExchanges):
    """Runs exchanges in a thread, next to the computation."""

    def __init__(self) -> None:
        self._executor = ThreadPoolExecutor(1)

    def start(self, push: Callable[[], None], pull: Callable[[], None]) -> WaitForExchange:
        def exchange() -> float:
            start = time.perf_counter()
            push()
            pull()
            return time.perf_counter() - start

        return self._executor.submit(exchange).result

    def close(self) -> None:
        self._executor.shutdown()
