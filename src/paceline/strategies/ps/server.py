"""A parameter-server process: threads and connections around one `protocol.shard.ServerShard`.

One thread per connection receives a worker's messages; orders arrive on the control connection.
The thread that received an event carries out the shard's actions, under one lock. Gradients arrive
at a `GradientEndpoint` per worker. A thread ends when its worker disconnects; the process ends when
the coordinator does.
"""

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from paceline.comm.wire import MAX_BODY, Channel, ControlConnection
from paceline.errors import DeadlineExceeded, PacelineError, PeerLost, WireError
from paceline.protocol.messages import (
    ApplyUpdate,
    ClipFactor,
    Message,
    ServerHeartbeat,
    ServerReady,
    ShardSqNorm,
    StopServer,
)
from paceline.protocol.shard import Handle, ServerShard, ShardAction, StepOptimizer, SumGradients
from paceline.strategies.ps.messages import (
    AwaitVersion,
    ExportSlots,
    Failed,
    Loaded,
    LoadShard,
    OfferMemory,
    Pull,
    PushGradient,
    PushHeader,
    VersionApplied,
    data_from_wire,
)
from paceline.strategies.ps.store import ParameterStore, PendingGradient
from paceline.strategies.ps.transport import TcpEndpoint
from paceline.strategies.ps.transport_shm import SharedMemoryEndpoint, accept_memory
from paceline.telemetry.phase_clock import APPLY, RECEIVE, SEND, ServerClock
from paceline.telemetry.sampler import ServerCounters, StepCounters

HEARTBEAT_S = 1.0


@dataclass(eq=False)
class WorkerLink:
    """One worker's connection."""

    endpoint: TcpEndpoint
    """Replaced if the worker offers shared memory."""
    held_up_us: int = 0
    """Time that its next pull has waited for the update of its push."""


def warm_up_torch() -> None:
    """Runs an empty optimizer step: torch imports modules at the first, which takes seconds."""
    parameter = torch.nn.Parameter(torch.zeros(1))
    parameter.grad = torch.zeros(1)
    torch.optim.SGD([parameter], lr=0.1).step()


class ParameterServerProcess:
    """Accepts workers, and turns their messages and the orders into events of the shard."""

    def __init__(
        self,
        *,
        index: int,
        host: str,
        token: str,
        control: ControlConnection,
        timeout_s: float,
        clock: ServerClock | None = None,
        counters: StepCounters | None = None,
        serving: ServerCounters | None = None,
    ) -> None:
        self._index = index
        self._clock = clock or ServerClock(time.time())
        self._counters = counters or StepCounters()
        self._serving = serving or ServerCounters()
        self._links: set[WorkerLink] = set()
        self._shared: dict[int, SharedMemoryEndpoint] = {}
        """By worker: endpoints whose gradients only the coordinator announces."""
        self._left_behind: dict[int, SharedMemoryEndpoint] = {}
        """The same of workers that are gone: their last gradients may still be ordered."""
        self._view = 0
        self._apply_ns = 0
        self._apply_began_ns: int | None = None
        self.bytes_sent = self.bytes_received = 0
        self.before_close: Callable[[], None] = lambda: None
        """Called before a connection is closed, to sample its socket a last time."""
        self._token = token
        self._control = control
        self._timeout_s = timeout_s
        self._shard = ServerShard()
        self._store = ParameterStore()
        self._changed = threading.Condition()
        self._stopping = threading.Event()
        self._answered: set[int] = set()
        self._next_ticket = 0
        self._norm: ShardSqNorm | None = None
        """The last norm that was reported; a coordinator that is lost may not have answered."""
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.create_server((host, 0), family=family)

    def run(self) -> None:
        """Serves until the coordinator sends StopServer; raises PeerLost if it is gone."""
        host, port = self._listener.getsockname()[:2]
        threading.Thread(target=self._accept, daemon=True).start()
        self._clock.start_idle()
        self._control.greeting = lambda: self._greet(host, port)
        self._control.send(ServerReady(self._index, host, port))
        threading.Thread(target=self._send_heartbeats, daemon=True).start()
        while not isinstance(message := self._control.receive(), StopServer):
            if not isinstance(message, ApplyUpdate | ClipFactor):
                raise WireError(f"unexpected {type(message).__name__} message to a server")
            with self._changed:
                if message.view != self._view:
                    continue  # Repeated by another coordinator, after the next import of state.
                if isinstance(message, ApplyUpdate):
                    if self._shared:
                        self._find_gradients(message)
                    self._execute(self._shard.on_apply(message))
                else:
                    self._execute(self._shard.on_clip(message.version, message.factor))
        self._stopping.set()
        # shutdown wakes the accepting thread; close alone would leave it waiting.
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        with self._changed:
            for link in self._links:
                self._count(link.endpoint)
            self._store.close()

    def _greet(self, host: str, port: int) -> list[Message]:
        """Returns what another coordinator must know."""
        with self._changed:
            # What was reported to the coordinator that is lost may never be ordered.
            self._execute(self._shard.forget_pushes())
            ready = ServerReady(self._index, host, port, self._shard.version)
            return [ready] if self._norm is None else [ready, self._norm]

    def _send_heartbeats(self) -> None:
        """Until the connection is closed, which ends the process elsewhere."""
        with contextlib.suppress(PacelineError):
            while not self._stopping.wait(HEARTBEAT_S):
                self._control.send(ServerHeartbeat(self._index))

    def _accept(self) -> None:
        while True:
            try:
                sock, address = self._listener.accept()
            except OSError:
                return  # The listener was closed: the run is over.
            threading.Thread(target=self._handshake, args=(sock, address), daemon=True).start()

    def _handshake(self, sock: socket.socket, address: Any) -> None:
        try:
            channel = Channel.accept(
                sock, token=self._token, peer=f"{address[0]}", timeout_s=self._timeout_s
            )
        except PacelineError as error:
            print(f"server {self._index}: refused a connection from {address[0]}: {error}")
            sock.close()
            return
        self._serve(channel)

    def _serve(self, channel: Channel) -> None:
        """Answers one worker until its connection closes."""
        link = WorkerLink(TcpEndpoint(channel, self._store, self._changed))
        with self._changed:
            self._links.add(link)
        try:
            while True:
                head, body_bytes = channel.receive_head(max_body=MAX_BODY, patient=True)
                self._answer(link, head, body_bytes)
                with self._changed:
                    self._count(link.endpoint)
        except (PeerLost, DeadlineExceeded):
            self._remove_link(link)
            self.before_close()
            channel.close()
        except Exception as error:
            # Without an answer the worker would wait until its deadline.
            self._remove_link(link)
            try:
                failure = f"server {self._index}: {type(error).__name__}: {error}"
                link.endpoint.send(Failed(failure))
            finally:
                channel.close()

    def _answer(self, link: WorkerLink, head: object, body_bytes: int) -> None:
        message = data_from_wire(head)
        if isinstance(message, PushHeader):
            with self._in_phase(RECEIVE):
                self._take_gradient(link, message, body_bytes)
        elif isinstance(message, Pull):
            self._answer_pull(link, message)
        elif isinstance(message, LoadShard):
            with self._in_phase(RECEIVE):
                state = link.endpoint.receive_state(message, body_bytes)
                with self._changed:
                    if state.view < self._view:
                        raise WireError(f"state of view {state.view} in view {self._view}")
                    self._store.load(state)
                    self._view = self._control.view = state.view
                    self._left_behind.clear()
                    self._shard.reset()
                    self._norm = None
                    if self._store.shared_weights is not None:
                        self._store.shared_weights.reset()
            link.endpoint.send(Loaded())
        elif isinstance(message, ExportSlots):
            self._wait_for(message.at_least)
            with self._in_phase(SEND), self._changed:
                link.endpoint.send_slots(self._store.slots())
        elif isinstance(message, AwaitVersion):
            self._wait_for(message.at_least)
            link.endpoint.send(VersionApplied())
        elif isinstance(message, OfferMemory):
            self._accept_memory(link, message)
        else:
            raise WireError(f"unexpected {type(message).__name__} message to a server")

    def _answer_pull(self, link: WorkerLink, pull: Pull) -> None:
        held_up_us, link.held_up_us = link.held_up_us, 0
        queued_us = held_up_us + self._wait_for(pull.at_least, pull.after)
        with self._in_phase(SEND):
            with self._changed:
                self._serving.pulls += 1
                self._serving.queued_us += queued_us
                version = self._shard.version
                weights = self._store.copy_weights()
            link.endpoint.send_weights(version, weights, exact=pull.exact, queued_us=queued_us)
            with self._changed:
                self._store.return_copy(weights)

    def _accept_memory(self, link: WorkerLink, offer: OfferMemory) -> None:
        with self._changed:
            endpoint, reply = accept_memory(offer, link.endpoint)
            if endpoint is not None:
                self._count(link.endpoint)
                link.endpoint = self._shared[offer.worker] = endpoint
        link.endpoint.send(reply)

    def _remove_link(self, link: WorkerLink) -> None:
        with self._changed:
            self._count(link.endpoint)
            self._links.discard(link)
            # A worker may have connected again meanwhile: keep its new endpoint.
            for worker, endpoint in list(self._shared.items()):
                if endpoint is link.endpoint:
                    self._left_behind[worker] = self._shared.pop(worker)

    def _count(self, endpoint: TcpEndpoint) -> None:
        """Adds a worker's traffic since the last call; the caller holds the lock."""
        counters = endpoint.pop_counters()
        self._serving.pulls += counters.pulls
        self._serving.queued_us += counters.queued_us
        self.bytes_sent += counters.bytes_sent
        self.bytes_received += counters.bytes_received

    @contextlib.contextmanager
    def _in_phase(self, phase: int) -> Iterator[None]:
        self._clock.begin(phase)
        try:
            yield
        finally:
            self._clock.end(phase)

    def _applied_ns(self) -> int:
        """Returns the time spent on updates so far, including the one in progress."""
        began = self._apply_began_ns
        return self._apply_ns + (time.perf_counter_ns() - began if began is not None else 0)

    # ---- gradients ----------------------------------------------------------------------------

    def _take_gradient(self, link: WorkerLink, push: PushHeader, body_bytes: int) -> None:
        gradient = link.endpoint.receive(push, body_bytes)
        arrived, applied = time.perf_counter_ns(), self._applied_ns()
        if push.view != self._view:
            return  # Its sender was cut off, and the others continue without it.
        with self._changed:
            self._add_pending((push.worker, push.handle), gradient)
        if isinstance(push, PushGradient) and link.endpoint.channel.has_input():
            # The worker's pull has arrived meanwhile: it has waited behind updates since.
            held = min(time.perf_counter_ns() - arrived, self._applied_ns() - applied)
            link.held_up_us = held // 1000

    def _find_gradients(self, order: ApplyUpdate) -> None:
        """Takes gradients that their workers announced to the coordinator only."""
        if order.version <= self._shard.version:
            return
        for part in order.parts:
            endpoint = self._shared.get(part.worker) or self._left_behind.get(part.worker)
            # The gradient has arrived before: it was announced, or the order was repeated.
            if endpoint is None or (part.worker, part.handle) in self._store.gradients:
                continue
            gradient = endpoint.find(part.handle)
            if gradient is not None:
                self._add_pending((part.worker, part.handle), gradient)
                self._count(endpoint)

    def _add_pending(self, handle: Handle, gradient: PendingGradient) -> None:
        gradients, serving = self._store.gradients, self._serving
        gradients[handle] = gradient
        serving.pushes += 1
        serving.waiting = max(serving.waiting, len(gradients))
        self._execute(self._shard.on_gradient(*handle))

    def _wait_for(self, at_least: int, after: Handle | None = None) -> int:
        """Waits for a version; returns how long updates were in progress meanwhile (us).

        The rest of the wait was for a gradient or an order that had not arrived.
        """
        asked, applied = time.perf_counter_ns(), self._applied_ns()
        with self._changed:
            ticket = self._next_ticket
            self._next_ticket += 1
            self._execute(self._shard.on_pull(ticket, at_least, after))
            if not self._changed.wait_for(lambda: ticket in self._answered, self._timeout_s):
                raise DeadlineExceeded(
                    f"version {at_least} was not available within {self._timeout_s:g} s "
                    f"(now {self._shard.version})"
                )
            self._answered.discard(ticket)
            waited = time.perf_counter_ns() - asked
            return min(waited, self._applied_ns() - applied) // 1000

    def _execute(self, actions: list[ShardAction]) -> None:
        for action in actions:
            if isinstance(action, SumGradients):
                with self._applying():
                    square = self._store.sum_up(action.order)
                self._norm = ShardSqNorm(self._index, action.order.version, square)
                self._control.send(self._norm)
            elif isinstance(action, StepOptimizer):
                shared = self._store.shared_weights
                if shared is not None:
                    shared.begin_update(endpoint.mailbox for endpoint in self._shared.values())
                before_us = self._serving.apply_us
                with self._applying():
                    if not action.summed:
                        self._store.gather_gradient(action.order)
                    self._store.step(action.order, action.factor)
                    self._store.release_gradients(action.order)
                if shared is not None:
                    took_us = self._serving.apply_us - before_us
                    shared.end_update(action.order.version, took_us)
                self._counters.steps += 1
            else:
                self._answered.add(action.ticket)
        if actions:
            self._changed.notify_all()

    @contextlib.contextmanager
    def _applying(self) -> Iterator[None]:
        began = self._apply_began_ns = time.perf_counter_ns()
        with self._in_phase(APPLY):
            yield
        took = time.perf_counter_ns() - began
        self._apply_ns, self._apply_began_ns = self._apply_ns + took, None
        self._serving.apply_us += took // 1000
