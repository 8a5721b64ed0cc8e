"""ps, the worker's side: pull weights, compute, push gradients; servers hold the optimizer."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch

from paceline.codecs.compressor import Compressor
from paceline.codecs.payload import from_bytes, to_bytes
from paceline.comm.flat_layout import FlatLayout, ShardLayout, as_memoryview
from paceline.comm.shm.parameters import MailboxSegment, SharedWeightsReader, open_shared_weights
from paceline.comm.shm.segment import shm_domain_id
from paceline.comm.wire import MAX_BODY, Channel, pack
from paceline.errors import DeadlineExceeded, PeerLost, UsageError, WireError
from paceline.protocol.messages import GradientPushed, ProcessFailing
from paceline.state import Section, load_weights, persistent_buffers, set_slot, slots_by_parameter
from paceline.strategies.optimizer_traits import optimizer_traits
from paceline.strategies.ps.spec import ParameterServer
from paceline.strategies.runner import CommReport, Runner, TrainStep, WorkerContext
from paceline.telemetry.phase_clock import COMM, QUEUE


class ParameterServerRunner(Runner):
    """A server that dies ends the run: its shard of weights and optimizer is gone with it."""

    def __init__(self, spec: ParameterServer, around: WorkerContext) -> None:
        super().__init__(around)
        self._spec = spec
        optimizer = self.replica.optimizer
        if isinstance(optimizer, torch.optim.LBFGS):
            raise UsageError("LBFGS evaluates the loss several times a step: ps cannot run it")
        if type(optimizer).__module__ == "__main__":
            raise UsageError(
                f"{type(optimizer).__name__} is defined in the script itself: "
                "put it into a module of its own, so that servers can import it"
            )
        self._names = [name for name, _ in self.replica.trained]
        self._parameters = [p for _, p in self.replica.trained]
        self._traits = optimizer_traits(optimizer)
        self._layout = FlatLayout(
            self._parameters,
            len(around.phase.servers),
            # A part of a matrix is no matrix: powersgd needs them whole.
            elementwise=self._traits.elementwise
            and not (spec.codec is not None and spec.codec.needs_whole_tensors),
        )
        self._compressors = self._make_compressors()
        self._bytes_before = 0
        self._piece_owner = [[s.parameter for s in shard.slices] for shard in self._layout.shards]
        self._hooks: list[Any] = []
        self._in_place = False
        """The model's weights lie where they come in: nobody copies them again."""
        self._handle = 0
        self._pulled_version = 0
        self._model_version = 0
        """The versions of the weights fetched last, and of those in the model."""
        self._background = ThreadPoolExecutor(1) if spec.overlap else None
        self._in_flight: Future[float] | None = None
        self._hidden_us: int | None = 0 if self._background is not None else None
        self._queued_us = 0
        """The longest that a server let the last pull wait for updates under way."""
        self._channels = [
            Channel.connect(
                host,
                port,
                token=around.token,
                peer=f"server {index}",
                timeout_s=around.timeout_s,
            )
            for index, (host, port) in enumerate(around.phase.servers)
        ]
        self._readers: list[SharedWeightsReader | None] = [None] * len(self._channels)
        """Where weights and gradients pass through memory that a server shares."""
        why = "a codec" if self._compressors else ""
        outgoing = None
        if spec.via != "network" and not self._compressors:
            outgoing, why = self._share_memory()
        self._incoming = self._layout.new_buffer()
        self._outgoing = self._layout.new_buffer() if outgoing is None else outgoing
        self._in_views = self._layout.views(self._incoming)
        self._out_views = self._layout.views(self._outgoing)
        shared = [reader is not None for reader in self._readers]
        if spec.via == "shared" and not all(shared):
            raise UsageError(f"ps(via=shared): {why}: leave via out")
        way = "shared" if all(shared) else "partly shared" if any(shared) else "network"
        self._comm_report = CommReport(backend=way, reason=why)
        if self._background is None and not self._compressors:
            # With an exchange behind the computing both buffers are in use during it.
            self._use_buffers_in_place()

    def comm_report(self) -> CommReport:
        return self._comm_report

    def optimizer_path(self) -> str:
        where = "anywhere" if self._traits.elementwise else "only between parameters"
        return f"servers may split the parameters {where}: {self._traits.reason}"

    def _use_buffers_in_place(self) -> None:
        """Gradients go out from where backward leaves them, weights are used where they come in."""
        if self.replica.reduce_in_backward:
            return  # A user's own loop may keep, zero or save weights and gradients as it likes.
        if any(p.device != v.device for p, v in self._parameters_and_views()):
            return
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
                _make_hook(view)
            )
            for parameter, view in zip(self._parameters, self._out_views, strict=True)
        ]
        self._in_place = all(p.is_contiguous() for p in self._parameters)
        if self._in_place:
            with torch.no_grad():
                for parameter, view in self._parameters_and_views():
                    view.copy_(parameter)
                    parameter.data = view

    def _parameters_and_views(self) -> Iterator[tuple[torch.nn.Parameter, torch.Tensor]]:
        return zip(self._parameters, self._in_views, strict=True)

    def _share_memory(self) -> tuple[torch.Tensor | None, str]:
        """The outgoing buffer where servers on this machine reach it; their weights likewise.

        And why some servers are sent gradients all the same; no buffer where all are.
        """
        machine, servers = shm_domain_id(), len(self._channels)
        if machine is None:
            return None, "it needs Linux on x86-64 with /dev/shm"
        try:
            memory = MailboxSegment(servers, self._layout.total_bytes)
        except OSError as error:
            return None, f"{error.strerror} in /dev/shm"
        whys = set()
        try:
            for index, (channel, shard) in enumerate(
                zip(self._channels, self._layout.shards, strict=True)
            ):
                told = {"server": index, "servers": servers, "lo": shard.lo, "hi": shard.hi}
                who = {"worker": self.context.rank, "machine": machine, "name": memory.name}
                channel.send({"op": "share", **who, **told})
                head, _ = channel.receive_head(max_body=0)
                _check(head, channel)
                if head["board"] is None:
                    whys.add(str(head["why"]))
                    continue
                try:
                    board = open_shared_weights(head["board"], shard.hi - shard.lo)
                except OSError as error:
                    whys.add(f"{error.strerror} at the memory of {channel.peer}")
                    continue
                self._readers[index] = SharedWeightsReader(
                    board,
                    memory.mailbox(index, shard.lo, shard.hi),
                    peer=channel.peer,
                    timeout_s=self.context.timeout_s,
                    look=_make_look(channel),
                )
        finally:
            memory.unlink()
        if not any(self._readers):
            return None, ", ".join(sorted(whys))
        return memory.gradient, ", ".join(sorted(whys))

    def _make_compressors(self) -> list[Compressor]:
        """One a shard, if gradients are compressed."""
        if self._spec.codec is None:
            return []
        kinds = {p.dtype for p in self._parameters}
        if len(kinds) > 1:
            raise UsageError("ps(codec=...) needs parameters of one type")
        dtype = kinds.pop()
        layout = self._layout
        return [Compressor(self._spec.codec, layout.shapes_of(s), dtype) for s in layout.shards]

    # ---- steps --------------------------------------------------------------------------------

    def begin_step(self, work: TrainStep) -> None:
        if not work.lease.samples:
            return
        self.clock.enter(COMM)
        # With an exchange under way behind, the weights at hand are those to compute on.
        if self._in_flight is None:
            self._pull(work.version)

    def finish_step(self, work: TrainStep) -> None:
        self.clock.enter(COMM)
        if self._background is None:
            self._send(work, samples=work.lease.samples)
        else:
            self._exchange_in_background(work)

    def _exchange_in_background(self, work: TrainStep) -> None:
        """Push and pull while the next batch is computed, on weights that miss this update."""
        assert self._background is not None
        base = self._model_version
        self._wait_for_exchange()
        self._clip()
        missing = self._gather_gradients()
        # Read now: the loop sets the next step's learning rate while this is under way.
        groups = optimizer_options(self.replica.optimizer)

        def exchange() -> float:
            began = time.perf_counter()
            try:
                self._handle += 1
                self._push(missing, groups)
                self._report_push(work, base)
                # A buffered gradient may wait long for its update: then take what is there.
                mine = None if self._spec.sync.aggregates else (self.context.rank, self._handle)
                self._fetch(0, after=mine)
                return time.perf_counter() - began
            except Exception as error:
                # The loop may be waiting for work and would not notice.
                blame = "peer" if isinstance(error, PeerLost | DeadlineExceeded) else "own"
                who, trace = f"worker-{self.context.rank}", traceback.format_exc()
                self.context.control.send(ProcessFailing(who, str(error), trace, blame))
                raise

        self._in_flight = self._background.submit(exchange)

    def _wait_for_exchange(self) -> None:
        """Wait for the exchange that is under way; its weights are those of the next step."""
        if self._in_flight is not None:
            began = time.perf_counter()
            took_s = self._in_flight.result(self.context.timeout_s)
            exposed_s = time.perf_counter() - began
            self._hidden_us = int(max(0.0, took_s - exposed_s) * 1e6)
            self._in_flight = None
            self._load_pulled_weights()

    def _clip(self) -> None:
        if self.replica.clip is not None and not self._spec.sync.aggregates:
            torch.nn.utils.clip_grad_norm_(self._parameters, self.replica.clip)

    def _send(self, work: TrainStep, *, samples: int) -> None:
        """Push the gradient, if it is made of samples, and tell the coordinator."""
        self._handle += 1
        if samples:
            self._clip()
            self._push(self._gather_gradients(), optimizer_options(self.replica.optimizer))
        self._report_push(work, self._model_version if samples else work.version)

    def _report_push(self, work: TrainStep, base: int) -> None:
        self.context.control.send(
            GradientPushed(
                worker=self.context.rank,
                handle=self._handle,
                lease=work.lease.id,
                samples=work.lease.samples,
                base=base,
                step=work.step,
                measured=work.measured,
            )
        )

    def pop_overlapped_us(self) -> int | None:
        return self._hidden_us

    def _pull(self, version: int, *, exact: bool = False) -> None:
        began = time.perf_counter_ns()
        self._fetch(version, exact=exact)
        if self.clock.current == COMM:
            took_ns = time.perf_counter_ns() - began
            self.clock.reassign(COMM, QUEUE, min(self._queued_us * 1000, took_ns))
        self._load_pulled_weights()

    def _fetch(
        self, version: int, *, exact: bool = False, after: tuple[int, int] | None = None
    ) -> None:
        """The newest weights into the incoming buffer; compressed where the codec suits weights."""
        request = {"op": "pull", "at_least": version, "after": after, "exact": exact}
        asked = [reader is None for reader in self._readers]
        for channel, ask in zip(self._channels, asked, strict=True):
            if ask:
                channel.send(request)
        versions = []
        self._queued_us = 0
        for index, (channel, reader, shard) in enumerate(
            zip(self._channels, self._readers, self._layout.shards, strict=True)
        ):
            if reader is None:
                continue
            found = reader.copy_weights(version, self._incoming[shard.lo : shard.hi])
            if found is None:
                # Updates came in between all the time: let them be sent.
                channel.send(request)
                asked[index] = True
                continue
            channel.bytes_received += shard.hi - shard.lo
            versions.append(found[0])
            self._queued_us = max(self._queued_us, found[1])
        for index, (channel, shard) in enumerate(
            zip(self._channels, self._layout.shards, strict=True)
        ):
            if not asked[index]:
                continue
            head, size = channel.receive_head(max_body=shard.hi - shard.lo)
            _check(head, channel)
            if head["payload"] is None:
                _fill(channel, size, as_memoryview(self._incoming[shard.lo : shard.hi]))
            else:
                body = torch.empty(size, dtype=torch.uint8)
                channel.receive_into(as_memoryview(body))
                payload = from_bytes(head["payload"], body)
                target = self._shard_values(self._incoming, shard)
                self._compressors[index].coder.decode(payload, target)
            versions.append(int(head["version"]))
            self._queued_us = max(self._queued_us, int(head["queued_us"]))
        self._pulled_version = min(versions)

    def _load_pulled_weights(self) -> None:
        self._model_version = self._pulled_version
        with torch.no_grad():
            for parameter, view in self._parameters_and_views():
                if not self._in_place:
                    parameter.copy_(view)
                elif parameter.data_ptr() != view.data_ptr():
                    parameter.data = view  # A layer has put its weights elsewhere meanwhile.

    def _gather_gradients(self) -> set[int]:
        """The gradients into the outgoing buffer; which parameters have none."""
        missing = set()
        if self._compressors:
            # A codec leaves what it meant to send in the buffer, between the parameters too:
            # there it would grow from push to push and drown the gradients beside it.
            self._outgoing.zero_()
        for index, (parameter, view) in enumerate(
            zip(self._parameters, self._out_views, strict=True)
        ):
            if parameter.grad is None:
                missing.add(index)
                view.zero_()  # What an earlier step left there must not be sent again.
            elif parameter.grad.is_sparse:
                raise UsageError(
                    f"parameter {self._names[index]} has a sparse gradient: ps needs dense"
                )
            elif parameter.grad.data_ptr() != view.data_ptr():
                view.copy_(parameter.grad)
        return missing

    def _push(self, missing: set[int], groups: list[dict[str, Any]]) -> None:
        for index, (channel, shard) in enumerate(
            zip(self._channels, self._layout.shards, strict=True)
        ):
            owners = self._piece_owner[index]
            head = {
                "op": "push",
                "worker": self.context.rank,
                "handle": self._handle,
                "missing": [i for i, owner in enumerate(owners) if owner in missing],
                "groups": groups,
                "payload": None,
            }
            self._bytes_before += shard.hi - shard.lo
            if self._compressors and shard.slices:
                flat = self._shard_values(self._outgoing, shard)
                payload = self._compressors[index].encode(flat)
                head["payload"], views = to_bytes(payload)
                channel.send(head, *views)
            elif (reader := self._readers[index]) is not None:
                channel.bytes_sent += shard.hi - shard.lo
                # Nobody touches a gradient in its place before the pull that follows. Where that
                # need not wait for this gradient's update, the server is told to copy it now.
                stays = self._spec.sync.includes_own_update
                if not stays or not reader.lane.post(self._handle, pack(head)):
                    reader.lane.last_handle = self._handle
                    channel.send({**head, "shared": True, "stays": stays})
            else:
                channel.send(head, as_memoryview(self._outgoing[shard.lo : shard.hi]))

    def _shard_values(self, buffer: torch.Tensor, shard: ShardLayout) -> torch.Tensor:
        return buffer[shard.lo : shard.hi].view(self._parameters[0].dtype)

    # ---- state --------------------------------------------------------------------------------

    def import_state(self, state: Section) -> None:
        """Each server's shard is sent by one worker; all hold the same state."""
        load_weights(state, self.replica.model)
        slots = slots_by_parameter(state)
        for index, (channel, shard) in enumerate(
            zip(self._channels, self._layout.shards, strict=True)
        ):
            if index % self.context.size == self.context.rank:
                self._send_shard(channel, shard, slots)
        # The optimizer's slots live on the servers now.
        self.replica.optimizer.state.clear()

    def _send_shard(
        self, channel: Channel, shard: ShardLayout, slots: dict[str, dict[str, Any]]
    ) -> None:
        optimizer = self.replica.optimizer
        group_of = {p: i for i, group in enumerate(optimizer.param_groups) for p in group["params"]}
        with torch.no_grad():
            for view, parameter in zip(self._out_views, self._parameters, strict=True):
                view.copy_(parameter)
        pieces, table, tensors = [], [], []
        for index, piece in enumerate(shard.slices):
            parameter = self._parameters[piece.parameter]
            dtype = _dtype_name(parameter)
            offset = piece.offset - shard.lo
            name = self._names[piece.parameter]
            whole = piece.stop - piece.start == parameter.numel()
            shape = list(parameter.shape) if whole else [piece.stop - piece.start]
            pieces.append([name, offset, piece.nbytes, dtype, group_of[parameter], shape])
            for slot, value in slots.get(name, {}).items():
                part = value if isinstance(value, torch.Tensor) else torch.tensor(value)
                if part.shape == parameter.shape and not whole:
                    part = part.reshape(-1)[piece.start : piece.stop]
                part = part.contiguous()
                size = part.numel() * part.element_size()
                table.append([index, slot, _dtype_name(part), list(part.shape), size])
                tensors.append(part)
        cls = type(optimizer)
        head = {
            "op": "import",
            "nbytes": shard.hi - shard.lo,
            "pieces": pieces,
            "groups": optimizer_options(optimizer),
            "optimizer": f"{cls.__module__}:{cls.__qualname__}",
            "slots": table,
            "codec": str(self._spec.codec) if self._spec.codec is not None else None,
        }
        weights = as_memoryview(self._outgoing)[shard.lo : shard.hi]
        channel.send(head, weights, *(as_memoryview(t) for t in tensors))
        head, _ = channel.receive_head(max_body=0)
        _check(head, channel)

    def sync_weights(self, version: int) -> None:
        self._wait_for_exchange()
        self._pull(version, exact=True)

    def export_local_state(self) -> Section:
        """What the codec has not sent yet, a parameter, so that any strategy can go on with it."""
        own: dict[str, torch.Tensor] = {}
        for index, (compressor, shard) in enumerate(
            zip(self._compressors, self._layout.shards, strict=False)
        ):
            state = compressor.state()
            residual = state.pop("residual", None)
            if residual is not None:
                for piece in shard.slices:
                    name, parameter = self.replica.trained[piece.parameter]
                    key = f"residual/{name}"
                    if key not in own:
                        own[key] = torch.zeros_like(parameter).detach()
                    start = (piece.offset - shard.lo) // parameter.element_size()
                    part = residual[start : start + piece.stop - piece.start]
                    own[key].view(-1)[piece.start : piece.stop] = part
            own.update({f"codec/{index}/{key}": value for key, value in state.items()})
        return Section(own)

    def import_local_state(self, own: Section) -> None:
        for index, (compressor, shard) in enumerate(
            zip(self._compressors, self._layout.shards, strict=False)
        ):
            state = compressor.state()
            for key in state:
                stored = own.tensors.get(f"codec/{index}/{key}")
                if stored is not None and stored.shape == state[key].shape:
                    state[key] = stored
            if "residual" in state:
                for piece in shard.slices:
                    name, parameter = self.replica.trained[piece.parameter]
                    stored = own.tensors.get(f"residual/{name}")
                    if stored is not None:
                        start = (piece.offset - shard.lo) // parameter.element_size()
                        target = state["residual"][start : start + piece.stop - piece.start]
                        target.copy_(stored.reshape(-1)[piece.start : piece.stop])
            compressor.load_state(state)

    def export_state(self) -> Section:
        section = Section()
        for name, parameter in self.replica.model.named_parameters():
            weights = parameter.detach()
            # The state may outlive this runner, which fills the same memory at the next pull.
            section.tensors[f"weights/{name}"] = weights.clone() if self._in_place else weights
        for name, buffer in persistent_buffers(self.replica.model).items():
            section.tensors[f"buffers/{name}"] = buffer
        for channel in self._channels:
            channel.send({"op": "export", "at_least": self._pulled_version})
        for channel, shard in zip(self._channels, self._layout.shards, strict=True):
            self._receive_slots(channel, shard, section)
        return section

    def _receive_slots(self, channel: Channel, shard: ShardLayout, section: Section) -> None:
        head, size = channel.receive_head(max_body=MAX_BODY)
        _check(head, channel)
        body = torch.empty(size, dtype=torch.uint8)
        if size:
            channel.receive_into(as_memoryview(body))
        at = 0
        for index, slot, dtype, shape, nbytes in head["slots"]:
            piece = shard.slices[index]
            name, parameter = self.replica.trained[piece.parameter]
            value = body[at : at + nbytes].clone().view(getattr(torch, dtype)).reshape(shape)
            at += nbytes
            part = piece.stop - piece.start
            if part < parameter.numel() and value.numel() == part and value.dim() > 0:
                # A part of a slot as large as its parameter: put it into its place.
                key = f"slots/{name}/{slot}"
                if key not in section.tensors:
                    section.tensors[key] = torch.empty(parameter.shape, dtype=value.dtype)
                section.tensors[key].view(-1)[piece.start : piece.stop] = value.reshape(-1)
            else:
                set_slot(section, name, slot, value)

    @property
    def uncompressed_bytes(self) -> int:
        return self._bytes_before if self._compressors else self.bytes_sent

    @property
    def bytes_received(self) -> int:
        return sum(channel.bytes_received for channel in self._channels)

    @property
    def bytes_sent(self) -> int:
        return sum(channel.bytes_sent for channel in self._channels)

    def close(self) -> None:
        if self._background is not None:
            self._background.shutdown()
        for hook in self._hooks:
            hook.remove()
        for parameter in self._parameters:
            # Neither should keep the buffers alive, one of which is shared with servers.
            if self._in_place:
                parameter.data = parameter.data.clone()
            if self._hooks:
                parameter.grad = None
        for reader in self._readers:
            if reader is not None:
                reader.lane.clear()
        for channel in self._channels:
            channel.close()


def _make_hook(view: torch.Tensor) -> Callable[[torch.Tensor], None]:
    """A gradient is moved to its place in the outgoing buffer as soon as it is there."""

    def move(parameter: torch.Tensor) -> None:
        gradient = parameter.grad
        assert gradient is not None
        if not gradient.is_sparse and gradient.data_ptr() != view.data_ptr():
            with torch.no_grad():  # a backward pass may itself be recorded
                view.copy_(gradient.detach())
            parameter.grad = view

    return move


def _make_look(channel: Channel) -> Callable[[], None]:
    """For one who waits in memory: a server that ends or fails is heard of here."""

    def look() -> None:
        if channel.has_input():
            head, _ = channel.receive_head(max_body=0)
            _check(head, channel)
            raise WireError(f"{channel.peer} sent what nobody asked for")

    return look


def optimizer_options(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """The plain options of each parameter group, as they are in force now."""
    plain = []
    for group in optimizer.param_groups:
        options = {}
        for key, value in group.items():
            if key == "params" or value is None:
                continue
            if isinstance(value, torch.Tensor):
                value = value.item()
            if not isinstance(value, bool | int | float | str | list | tuple):
                raise UsageError(
                    f"optimizer option {key} is a {type(value).__name__}: "
                    "ps sends plain values only"
                )
            options[key] = value
        plain.append(options)
    return plain


def _dtype_name(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _check(head: Any, channel: Channel) -> None:
    if "error" in head:
        raise PeerLost(f"{channel.peer} reports: {head['error']}")


def _fill(channel: Channel, size: int, target: memoryview) -> None:
    if size != target.nbytes:
        raise WireError(f"{channel.peer} sent {size} bytes, {target.nbytes} expected")
    if size:
        channel.receive_into(target)
