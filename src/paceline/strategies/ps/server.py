"""A parameter server: the process around one shard of `paceline.protocol.shard`.

One thread a worker's connection receives gradients and answers pulls; orders come over the
control connection. Workers of the same machine leave their gradients in memory and read weights
there (`paceline.comm.shm.parameters`): then an order is all that comes. Whatever the shard says is
carried out under one lock, by the thread that received the event. A worker that disconnects ends
its thread, a coordinator the process.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from paceline.codecs.payload import from_bytes, to_bytes
from paceline.comm.control import ControlConnection
from paceline.comm.flat_layout import as_memoryview
from paceline.comm.shm.parameters import GradientMailbox, open_mailbox
from paceline.comm.shm.segment import shm_domain_id
from paceline.comm.wire import MAX_BODY, Channel, unpack_head
from paceline.errors import DeadlineExceeded, PacelineError, PeerLost, WireError
from paceline.protocol.messages import (
    ApplyUpdate,
    ClipFactor,
    Message,
    ServerReady,
    ShardSqNorm,
    StopServer,
)
from paceline.protocol.shard import (
    Handle,
    SendWeights,
    ServerShard,
    ShardAction,
    StepOptimizer,
    SumGradients,
)
from paceline.strategies.ps.store import ParameterStore, PendingGradient
from paceline.telemetry.phase_clock import APPLY, RECEIVE, SEND, ServerClock
from paceline.telemetry.sampler import ServerCounters, StepCounters


def warm_up_torch() -> None:
    """Take a step of nothing: torch imports much on the first one, which would count as pause."""
    parameter = torch.nn.Parameter(torch.zeros(1))
    parameter.grad = torch.zeros(1)
    torch.optim.SGD([parameter], lr=0.1).step()


class ParameterServerProcess:
    """Listens, greets, and turns messages into events of the shard."""

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
        self._lanes: dict[int, GradientMailbox] = {}
        """By worker: its gradient, where it shares memory with this process."""
        self._shared_by: dict[Channel, tuple[int, GradientMailbox]] = {}
        self._counted: dict[GradientMailbox, tuple[int, int]] = {}
        """What its worker had read by when last asked."""
        self._held_up_us: dict[Channel, int] = {}
        """By connection: how long its pull has waited behind its own push's update."""
        self._apply_ns = 0
        self._apply_began_ns: int | None = None
        self.bytes_sent = self.bytes_received = 0
        self.before_close: Callable[[], None] = lambda: None
        """Called before a connection is closed: its bytes are counted up to then."""
        self._token = token
        self._control = control
        self._timeout_s = timeout_s
        self._shard = ServerShard()
        self._store = ParameterStore()
        self._changed = threading.Condition()
        self._answered: set[int] = set()
        self._next_ticket = 0
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.create_server((host, 0), family=family)

    def run(self) -> None:
        """Serve until the coordinator says stop; raises what went wrong otherwise."""
        host, port = self._listener.getsockname()[:2]
        threading.Thread(target=self._accept, daemon=True).start()
        self._clock.start_idle()
        self._control.send(ServerReady(self._index, host, port))
        while True:
            message = self._control.receive()
            if isinstance(message, StopServer):
                # shutdown wakes the accepting thread; close alone would leave it waiting.
                self._listener.shutdown(socket.SHUT_RDWR)
                self._listener.close()
                with self._changed:
                    for lane in self._counted:
                        self._count_reads(lane)
                    self._store.close()
                return
            self._on_order(message)

    def _on_order(self, message: Message) -> None:
        with self._changed:
            if isinstance(message, ApplyUpdate):
                if self._lanes:
                    self._find_gradients(message)
                self._execute(self._shard.on_apply(message))
            elif isinstance(message, ClipFactor):
                self._execute(self._shard.on_clip(message.version, message.factor))
            else:
                raise WireError(f"a server cannot take a {type(message).__name__} message")

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
        """One worker's connection, until it closes."""
        try:
            while True:
                sent, received = channel.bytes_sent, channel.bytes_received
                head, body_bytes = channel.receive_head(max_body=MAX_BODY, patient=True)
                self._answer(channel, head, body_bytes)
                with self._changed:
                    self.bytes_received += channel.bytes_received - received
                    self.bytes_sent += channel.bytes_sent - sent
        except (PeerLost, DeadlineExceeded):
            self._forget_lane(channel)
            self.before_close()
            channel.close()
        except Exception as error:
            # The worker must not wait for its deadline to learn of it.
            self._forget_lane(channel)
            try:
                channel.send({"error": f"server {self._index}: {type(error).__name__}: {error}"})
            finally:
                channel.close()

    def _answer(self, channel: Channel, head: dict[str, Any], body_bytes: int) -> None:
        operation = head["op"]
        if operation == "share":
            channel.send(self._share(channel, head))
        elif operation == "push":
            with self._in_phase(RECEIVE):
                self._take_gradient(channel, head, body_bytes)
        elif operation == "pull":
            after = tuple(head["after"]) if head["after"] is not None else None
            queued_us = self._held_up_us.pop(channel, 0) + self._wait_for(head["at_least"], after)
            with self._in_phase(SEND):
                with self._changed:
                    self._serving.pulls += 1
                    self._serving.queued_us += queued_us
                    version = self._shard.version
                    weights = self._store.copy_weights()
                exact = bool(head["exact"])
                self._send_weights(channel, version, weights, exact=exact, queued_us=queued_us)
                with self._changed:
                    self._store.return_copy(weights)
        elif operation == "export":
            self._wait_for(head["at_least"])
            with self._in_phase(SEND), self._changed:
                table, tensors = self._store.slots()
                channel.send({"slots": table}, *(as_memoryview(t) for t in tensors))
        elif operation == "import":
            with self._in_phase(RECEIVE):
                body = torch.empty(body_bytes, dtype=torch.uint8)
                channel.receive_into(as_memoryview(body))
                with self._changed:
                    self._store.load(head, body)
                    self._shard.reset()
                    if self._store.board is not None:
                        self._store.board.reset()
            channel.send({"ok": True})
        else:
            raise WireError(f"a server cannot do {operation!r}")

    @contextmanager
    def _in_phase(self, phase: int) -> Iterator[None]:
        self._clock.begin(phase)
        try:
            yield
        finally:
            self._clock.end(phase)

    def _applied_ns(self) -> int:
        """Time spent on updates so far, the one under way included."""
        began = self._apply_began_ns
        return self._apply_ns + (time.perf_counter_ns() - began if began is not None else 0)

    def _take_gradient(self, channel: Channel, head: dict[str, Any], body_bytes: int) -> None:
        worker, handle = int(head["worker"]), int(head["handle"])
        if head.get("shared"):
            self._take_shared(worker, head)
            return
        with self._changed:
            buffer = self._store.borrow_buffer()
        self._receive_gradient(channel, head["payload"], body_bytes, buffer)
        arrived, applied = time.perf_counter_ns(), self._applied_ns()
        with self._changed:
            self._add_pending(worker, head, buffer)
            self._execute(self._shard.on_gradient(worker, handle))
        if channel.has_input():
            # The worker's pull has come meanwhile: it waits behind updates from here on already.
            held = min(time.perf_counter_ns() - arrived, self._applied_ns() - applied)
            self._held_up_us[channel] = held // 1000

    def _add_pending(
        self,
        worker: int,
        head: dict[str, Any],
        buffer: torch.Tensor,
        lane: GradientMailbox | None = None,
    ) -> None:
        gradients, serving = self._store.gradients, self._serving
        missing, groups = frozenset(head["missing"]), tuple(head["groups"])
        gradients[worker, int(head["handle"])] = PendingGradient(buffer, missing, groups, lane)
        serving.pushes += 1
        serving.waiting = max(serving.waiting, len(gradients))

    # ---- workers of this machine ----------------------------------------------------------------

    def _share(self, channel: Channel, head: dict[str, Any]) -> dict[str, Any]:
        """Open the worker's gradient, and say where it finds the weights; or why not."""
        if head["machine"] != shm_domain_id():
            return {"board": None, "why": "servers on other machines"}
        lo, hi, worker = int(head["lo"]), int(head["hi"]), int(head["worker"])
        place = {"server": int(head["server"]), "servers": int(head["servers"])}
        try:
            lane = open_mailbox(str(head["name"]), **place, lo=lo, hi=hi)
        except OSError as error:
            return {"board": None, "why": f"{error.strerror} at a worker's memory"}
        with self._changed:
            self._store.allocate(hi - lo)
            board = self._store.board
            if board is None:
                return {"board": None, "why": "no room for a server's weights in shared memory"}
            self._lanes[worker] = lane
            self._shared_by[channel] = worker, lane
            self._counted[lane] = 0, 0
            return {"board": board.descriptor(), "why": ""}

    def _take_shared(self, worker: int, head: dict[str, Any]) -> None:
        """A gradient that lies in memory, told of by its worker itself."""
        handle = int(head["handle"])
        with self._changed:
            lane, board = self._lanes[worker], self._store.board
            assert board is not None
            if head["stays"]:
                self._add_pending(worker, head, lane.gradient, lane)
            else:
                self._add_pending(worker, head, self._store.borrow_buffer().copy_(lane.gradient))
                lane.mark_consumed(handle)
                board.notify()
            self._count_shared(lane)
            self._execute(self._shard.on_gradient(worker, handle))

    def _find_gradients(self, order: ApplyUpdate) -> None:
        """Those of workers that left them in memory and told only the coordinator."""
        if order.version <= self._shard.version:
            return
        for part in order.parts:
            lane = self._lanes.get(part.worker)
            told = lane.header_of(part.handle) if lane is not None else None
            if lane is None or told is None:
                continue
            if (part.worker, part.handle) in self._store.gradients:
                continue  # the order was said twice
            self._add_pending(part.worker, unpack_head(told), lane.gradient, lane)
            self._count_shared(lane)
            self._execute(self._shard.on_gradient(part.worker, part.handle))

    def _count_shared(self, lane: GradientMailbox) -> None:
        """A gradient of it has come, after reads of weights."""
        self.bytes_received += lane.gradient.numel()
        self._count_reads(lane)

    def _count_reads(self, lane: GradientMailbox) -> None:
        """The worker's reads since it was last asked are pulls like any other."""
        reads, queued_us = lane.reads, lane.queued_us
        before = self._counted[lane]
        self._counted[lane] = reads, queued_us
        self._serving.pulls += reads - before[0]
        self._serving.queued_us += queued_us - before[1]
        self.bytes_sent += (reads - before[0]) * lane.gradient.numel()

    def _forget_lane(self, channel: Channel) -> None:
        with self._changed:
            self._held_up_us.pop(channel, None)
            if channel in self._shared_by:
                worker, lane = self._shared_by.pop(channel)
                self._count_reads(lane)
                del self._counted[lane]
                if self._lanes.get(worker) is lane:  # and not that of its next connection
                    del self._lanes[worker]

    def _receive_gradient(
        self, channel: Channel, table: Any, body_bytes: int, buffer: torch.Tensor
    ) -> None:
        expected = buffer.numel()
        coder = self._store.coder
        if table is None or coder is None:
            if body_bytes != expected or table is not None:
                raise WireError(f"a gradient of {body_bytes} bytes, {expected} expected")
            if expected:
                channel.receive_into(as_memoryview(buffer))
            return
        values = buffer.view(self._store.pieces[0].parameter.dtype)
        most = coder.max_payload_bytes(values.numel())
        if body_bytes > most:
            raise WireError(f"a compressed gradient of {body_bytes} bytes, {most} at most expected")
        body = torch.empty(body_bytes, dtype=torch.uint8)
        channel.receive_into(as_memoryview(body))
        coder.decode(from_bytes(table, body), values)

    def _send_weights(
        self,
        channel: Channel,
        version: int,
        weights: torch.Tensor,
        *,
        exact: bool,
        queued_us: int,
    ) -> None:
        coder = self._store.weight_coder
        if exact or coder is None:
            head = {"version": version, "payload": None, "queued_us": queued_us}
            channel.send(head, as_memoryview(weights))
            return
        values = weights.view(self._store.pieces[0].parameter.dtype)
        table, views = to_bytes(coder.encode(values))
        channel.send({"version": version, "payload": table, "queued_us": queued_us}, *views)

    def _wait_for(self, at_least: int, after: Handle | None = None) -> int:
        """Until that version is there; returns for how long updates were under way meanwhile (us).

        What is left of the wait was for a gradient or an order still on its way.
        """
        asked, applied = time.perf_counter_ns(), self._applied_ns()
        with self._changed:
            ticket = self._next_ticket
            self._next_ticket += 1
            self._execute(self._shard.on_pull(ticket, at_least, after))
            if not self._changed.wait_for(lambda: ticket in self._answered, self._timeout_s):
                raise DeadlineExceeded(
                    f"version {at_least} did not come within {self._timeout_s:g} s "
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
                self._control.send(ShardSqNorm(self._index, action.order.version, square))
            elif isinstance(action, StepOptimizer):
                board = self._store.board
                if board is not None:
                    board.begin_update(self._lanes.values())
                before_us = self._serving.apply_us
                with self._applying():
                    self._update(action)
                if board is not None:
                    took_us = self._serving.apply_us - before_us
                    board.end_update(action.order.version, took_us)
                self._counters.steps += 1
            elif isinstance(action, SendWeights):
                self._answered.add(action.ticket)
        if actions:
            self._changed.notify_all()

    @contextmanager
    def _applying(self) -> Iterator[None]:
        began = self._apply_began_ns = time.perf_counter_ns()
        with self._in_phase(APPLY):
            yield
        took = time.perf_counter_ns() - began
        self._apply_ns, self._apply_began_ns = self._apply_ns + took, None
        self._serving.apply_us += took // 1000

    def _update(self, action: StepOptimizer) -> None:
        order = action.order
        if not action.summed:
            if len(order.parts) == 1 and order.parts[0].weight == 1.0:
                self._store.use_single_gradient(order)
            else:
                self._store.sum_up(order)
        self._store.step(order, action.factor)
        self._store.release_gradients(order)
