"""A parameter server: the process around one shard of `paceline.protocol.shard`.

One thread a worker's connection receives gradients and answers pulls; orders come over the
control connection. Workers of the same machine leave their gradients in memory and read weights
there (`paceline.comm.shm.parameters`): then an order is all that comes. Whatever the shard says is
carried out under one lock, by the thread that received the event. A worker that disconnects ends
its thread, a coordinator the process.
"""

from __future__ import annotations

import importlib
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from paceline.comm.codecs import Coder, from_bytes, make_coder, to_bytes
from paceline.comm.control import ControlConnection
from paceline.comm.flat_layout import as_memoryview
from paceline.comm.shm.parameters import GradientMailbox, SharedWeightsOwner, open_mailbox
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
from paceline.specs.codec import parse_codec
from paceline.strategies.flat_optimizer import FlatOptimizer, FlatSegment
from paceline.telemetry.phase_clock import APPLY, RECEIVE, SEND, ServerClock
from paceline.telemetry.sampler import ServerCounters, StepCounters


@dataclass
class StoredSlice:
    """A slice of a parameter held here: its weights as a parameter of the optimizer.

    Or several that lie side by side, as one.
    """

    name: str
    offset: int
    nbytes: int
    parameter: torch.nn.Parameter
    group: int
    """Of the optimizer."""


@dataclass
class PendingGradient:
    """A gradient that has arrived and waits to be applied."""

    buffer: torch.Tensor
    missing: frozenset[int]
    groups: tuple[dict[str, Any], ...]
    lane: GradientMailbox | None = None
    """Where the buffer is, if it is its worker's, which waits for its update."""


class ParameterStore:
    """The shard's tensors: weights, optimizer, and the gradients that wait."""

    def __init__(self) -> None:
        self.pieces: list[StoredSlice] = []
        self.weights = torch.zeros(0, dtype=torch.uint8)
        self.board: SharedWeightsOwner | None = None
        """The weights' memory, where workers of this machine can read them."""
        self._room: int | None = None
        self.sums = torch.zeros(0, dtype=torch.uint8)
        self.gradients: dict[Handle, PendingGradient] = {}
        self._spare: list[torch.Tensor] = []
        self._copies: list[torch.Tensor] = []
        self.optimizer: torch.optim.Optimizer | None = None
        self._rows: list[StoredSlice] = []
        self._flat: FlatOptimizer | None = None
        """Steps the rows in place of the pieces, as long as every gradient has all pieces."""
        self.coder: Coder | None = None
        self.weight_coder: Coder | None = None

    def allocate(self, nbytes: int) -> None:
        """For so many bytes of weights, unless there is; where others see them, if there can be."""
        if nbytes == self._room:
            return  # also without a board: weights may be there already
        self.close()
        self._room = nbytes
        self.weights = torch.zeros(0, dtype=torch.uint8)
        if shm_domain_id() is not None:
            try:
                self.board = SharedWeightsOwner(nbytes)
            except OSError:
                pass  # no room there
        self.weights = (
            torch.zeros(nbytes, dtype=torch.uint8) if self.board is None else self.board.weights
        )

    def close(self) -> None:
        if self.board is not None:
            self.board.close()
            self.board = None

    def load(self, head: dict[str, Any], body: torch.Tensor) -> None:
        """Take over weights and slots as a worker sends them."""
        nbytes = int(head["nbytes"])
        self.allocate(nbytes)
        self.weights.copy_(body[:nbytes])
        self.sums = torch.zeros(0, dtype=torch.uint8)
        self.gradients = {}
        self._spare, self._copies = [], []
        self.pieces = []
        members: list[list[torch.nn.Parameter]] = [[] for _ in head["groups"]]
        for name, offset, size, dtype, group, shape in head["pieces"]:
            view = self.weights[offset : offset + size].view(getattr(torch, dtype))
            parameter = torch.nn.Parameter(view.view(shape))
            self.pieces.append(StoredSlice(name, offset, size, parameter, group))
            members[group].append(parameter)
        self.optimizer = optimizer_from_reference(head["optimizer"], head["groups"], members)
        self._load_slots(head["slots"], body[nbytes:])
        self._rows, self._flat = [], None
        if head["codec"] is None:  # which leaves something between pieces
            self.flatten()
        self.coder, self.weight_coder = None, None
        if head["codec"] is not None and self.pieces:
            spec, dtype = parse_codec(head["codec"]), self.pieces[0].parameter.dtype
            self.coder = make_coder(spec, dtype)
            # Half precision suits weights too: they are kept whole here. Coarser codes do not.
            self.weight_coder = self.coder if spec.suits_weights else None

    def _load_slots(self, slots: list[list[Any]], body: torch.Tensor) -> None:
        if self.optimizer is None:
            return
        for piece in self.pieces:
            self.optimizer.state.pop(piece.parameter, None)
        at = 0
        for index, slot, dtype, shape, size in slots:
            # A copy of its own: a view would keep the whole message alive.
            value = body[at : at + size].clone().view(getattr(torch, dtype)).reshape(shape)
            self.optimizer.state[self.pieces[index].parameter][slot] = value
            at += size

    def flatten(self) -> None:
        """Pieces that lie side by side are updated as one from now on, where that is the same."""
        if self.optimizer is None:
            return
        runs: list[list[StoredSlice]] = []
        for piece in self.pieces:
            last = runs[-1][-1] if runs else None
            if (
                last is not None
                and last.group == piece.group
                and last.parameter.dtype == piece.parameter.dtype
            ):
                runs[-1].append(piece)
            else:
                runs.append([piece])
        rows, found = [], []
        for run in runs:
            lo, hi = run[0].offset, run[-1].offset + run[-1].nbytes
            dtype = run[0].parameter.dtype
            weights = torch.nn.Parameter(self.weights[lo:hi].view(dtype))
            rows.append(StoredSlice("", lo, hi - lo, weights, run[0].group))
            places = [(p.parameter, (p.offset - lo) // dtype.itemsize) for p in run]
            found.append(FlatSegment(weights, places, run[0].group))
        self._flat = FlatOptimizer.from_optimizer(self.optimizer, found)
        self._rows = rows if self._flat is not None else []

    def sync_slots(self) -> None:
        """The pieces' optimizer knows what the rows' does."""
        if self._flat is not None:
            self._flat.write_back()

    def _update_units(self, gradients: Iterable[PendingGradient]) -> list[StoredSlice]:
        """What is updated: rows, until a gradient lacks a piece, and pieces from then on."""
        if self._flat is not None and any(gradient.missing for gradient in gradients):
            self._flat.write_back()
            self._flat = None
        return self.pieces if self._flat is None else self._rows

    def slots(self) -> tuple[list[list[Any]], list[torch.Tensor]]:
        """Table and tensors of all slots, for a worker that exports the state."""
        self.sync_slots()
        table: list[list[Any]] = []
        tensors = []
        for index, piece in enumerate(self.pieces):
            assert self.optimizer is not None
            for slot, value in self.optimizer.state.get(piece.parameter, {}).items():
                tensor = value if isinstance(value, torch.Tensor) else torch.tensor(value)
                tensor = tensor.detach().contiguous()
                size = tensor.numel() * tensor.element_size()
                dtype = str(tensor.dtype).removeprefix("torch.")
                table.append([index, slot, dtype, list(tensor.shape), size])
                tensors.append(tensor)
        return table, tensors

    def sum_up(self, order: ApplyUpdate) -> float:
        """Weighted sum of the gradients into `sums`; returns its squared norm."""
        if self.sums.numel() != self.weights.numel():
            self.sums = torch.zeros_like(self.weights)
        square = 0.0
        found = [(self.gradients[p.worker, p.handle], p.weight) for p in order.parts]
        for index, piece in enumerate(self._update_units(gradient for gradient, _ in found)):
            target = self._view(self.sums, piece)
            used = False
            for gradient, weight in found:
                if index in gradient.missing:
                    continue
                values = self._view(gradient.buffer, piece)
                if used:
                    target.add_(values, alpha=weight)
                else:
                    torch.mul(values, weight, out=target)
                used = True
            piece.parameter.grad = target if used else None
            if used and order.clip is not None:
                square += float(target.double().square().sum())
        return square

    def use_single_gradient(self, order: ApplyUpdate) -> None:
        """A single gradient needs no sum: the optimizer reads it where it lies."""
        first = order.parts[0]
        gradient = self.gradients[first.worker, first.handle]
        for index, piece in enumerate(self._update_units([gradient])):
            missing = index in gradient.missing
            piece.parameter.grad = None if missing else self._view(gradient.buffer, piece)

    def step(self, order: ApplyUpdate, factor: float) -> None:
        if self.optimizer is None or not self.pieces:
            return
        units = self.pieces if self._flat is None else self._rows
        if factor != 1.0:
            for piece in units:
                if piece.parameter.grad is not None:
                    piece.parameter.grad.mul_(factor)
        given = self.gradients[order.parts[0].worker, order.parts[0].handle].groups
        for group, hyper in zip(self.optimizer.param_groups, given, strict=True):
            group.update(hyper)
            group["lr"] = hyper["lr"] * order.lr_scale
        if self._flat is None:
            self.optimizer.step()
        else:
            self._flat.step([row.parameter.grad for row in units])

    def borrow_buffer(self) -> torch.Tensor:
        """A buffer for a gradient; as many exist as ever waited at the same time."""
        # Zeros: what lies between pieces is never filled, and must not count.
        return self._spare.pop() if self._spare else torch.zeros_like(self.weights)

    def copy_weights(self) -> torch.Tensor:
        """As they are now, to be sent while they change; in memory that is used again and again."""
        copy = self._copies.pop() if self._copies else torch.empty_like(self.weights)
        return copy.copy_(self.weights)

    def return_copy(self, copy: torch.Tensor) -> None:
        if copy.numel() == self.weights.numel():
            self._copies.append(copy)

    def release_gradients(self, order: ApplyUpdate) -> None:
        """The order is applied: its gradients' buffers are free for the next ones."""
        for piece in self.pieces if self._flat is None else self._rows:
            piece.parameter.grad = None
        for part in order.parts:
            gradient = self.gradients.pop((part.worker, part.handle))
            if gradient.lane is None:
                self._spare.append(gradient.buffer)
            else:
                gradient.lane.mark_consumed(part.handle)

    def _view(self, buffer: torch.Tensor, piece: StoredSlice) -> torch.Tensor:
        raw = buffer[piece.offset : piece.offset + piece.nbytes]
        return raw.view(piece.parameter.dtype).view_as(piece.parameter)


def optimizer_from_reference(
    reference: str, groups: list[dict[str, Any]], members: list[list[torch.nn.Parameter]]
) -> torch.optim.Optimizer | None:
    """The optimizer class named by the workers, over this shard's pieces; None for an empty one."""
    filled = [{**hyper, "params": params} for hyper, params in zip(groups, members, strict=True)]
    if not any(group["params"] for group in filled):
        return None
    module, name = reference.split(":")
    cls = getattr(importlib.import_module(module), name)
    if not (isinstance(cls, type) and issubclass(cls, torch.optim.Optimizer)):
        raise WireError(f"{reference} is no optimizer")
    made: Any = cls
    optimizer: torch.optim.Optimizer = made(filled, lr=groups[0]["lr"])
    return optimizer


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
