"""Worker side of the parameter server: pulls weights, computes, pushes gradients."""

import contextlib
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from paceline.codecs.compressor import Compressor, ResidualSlice, export_residuals, import_residuals
from paceline.comm.flat_layout import FlatLayout, ShardLayout
from paceline.errors import DeadlineExceeded, PeerLost, UsageError
from paceline.protocol.messages import ExchangeFailed, GradientPushed, ProcessFailing
from paceline.protocol.shard import Handle
from paceline.state import Section, load_weights, persistent_buffers, set_slot, slots_by_parameter
from paceline.strategies.optimizer_traits import optimizer_traits
from paceline.strategies.ps.connect import Connect, connect
from paceline.strategies.ps.messages import Options, PushHeader, SliceEntry
from paceline.strategies.ps.spec import ParameterServer
from paceline.strategies.ps.store import ShardState, Slot, optimizer_options
from paceline.strategies.ps.transport import ParameterTransport, WaitForExchange
from paceline.strategies.runner import Runner, TrainStep, WorkerContext
from paceline.telemetry.phase_clock import COMM, QUEUE


class ParameterServerRunner(Runner):
    """Trains with weights and optimizer state on servers."""

    def __init__(
        self, spec: ParameterServer, context: WorkerContext, connect: Connect = connect
    ) -> None:
        """`connect` makes the links to the servers; a simulation passes its own."""
        super().__init__(context)
        self._spec = spec
        optimizer = self.replica.optimizer
        if isinstance(optimizer, torch.optim.LBFGS):
            raise UsageError(
                "ps does not support LBFGS, which evaluates the loss several times per step"
            )
        if type(optimizer).__module__ == "__main__":
            raise UsageError(
                f"{type(optimizer).__name__} is defined in the script itself; "
                "move it to a separate module, so that servers can import it"
            )
        self._parameters = [p for _, p in self.replica.trained]
        self._traits = optimizer_traits(optimizer)
        self._layout = FlatLayout(
            self._parameters,
            len(context.phase.servers),
            # A part of a matrix is not a matrix: powersgd needs whole tensors.
            elementwise=self._traits.elementwise
            and not (spec.codec is not None and spec.codec.needs_whole_tensors),
            shards_of=spec.shards_of,
        )
        self._compressors = self._make_compressors()
        self._uncompressed_bytes = 0
        shards = self._layout.shards
        self._slice_parameters = [[s.parameter for s in shard.slices] for shard in shards]
        self._hooks: list[Any] = []
        self._in_place = False
        """Parameters are views of the receive buffer, so pulled weights are not copied again."""
        self._handle = 0
        self._pulled_version = 0
        self._model_version = 0
        """Versions of the weights pulled last, and of those in the model."""
        self._queued_us = 0
        """Longest time that the last pull waited for updates in progress, over the servers."""
        connected = connect(spec, context, self._layout, self._compressors)
        self._transports = connected.transports
        self._exchanges, self._recover_shard = connected.exchanges, connected.recover
        self._pending: WaitForExchange | None = None
        self._overlapped_us: int | None = 0 if self._exchanges is not None else None
        self._incoming = self._layout.new_buffer()
        self._outgoing = connected.send_buffer
        self._in_views = self._layout.views(self._incoming)
        self._out_views = self._layout.views(self._outgoing)
        self._comm_report = connected.report
        if self._exchanges is None and not self._compressors:
            # An exchange next to the computation uses both buffers during it.
            self._use_buffers_in_place()

    def optimizer_path(self) -> str:
        where = "anywhere" if self._traits.elementwise else "only between parameters"
        return f"servers may split the parameters {where}: {self._traits.reason}"

    def _use_buffers_in_place(self) -> None:
        """Sends gradients from where backward leaves them; uses weights where they arrive."""
        if self.replica.reduce_in_backward or not self.replica.exclusive:
            return  # Others may keep, clear or overwrite weights and gradients at any time.
        if any(p.device != v.device for p, v in self._parameters_and_views()):
            return
        for parameter, view in zip(self._parameters, self._out_views, strict=True):
            register: Callable[..., Any] = parameter.register_post_accumulate_grad_hook
            self._hooks.append(register(_make_hook(view)))
        self._in_place = all(p.is_contiguous() for p in self._parameters)
        if self._in_place:
            with torch.no_grad():
                for parameter, view in self._parameters_and_views():
                    view.copy_(parameter)
                    parameter.data = view

    def _parameters_and_views(self) -> Iterator[tuple[torch.nn.Parameter, torch.Tensor]]:
        return zip(self._parameters, self._in_views, strict=True)

    def _make_compressors(self) -> list[Compressor]:
        """Creates one compressor per shard, if gradients are compressed."""
        if self._spec.codec is None:
            return []
        dtype, *others = {p.dtype for p in self._parameters}
        if others:
            raise UsageError("ps(codec=...) requires parameters of one dtype")
        layout = self._layout
        return [Compressor(self._spec.codec, layout.shapes_of(s), dtype) for s in layout.shards]

    # ---- steps --------------------------------------------------------------------------------

    def begin_step(self, work: TrainStep) -> None:
        if not work.lease.samples:
            return
        self.clock.enter(COMM)
        if self._pending is None:
            self._pull(work.version)
        elif not self.replica.exclusive:
            self._load_pulled_weights()  # The model was used for other weights meanwhile.

    def finish_step(self, work: TrainStep) -> None:
        self.clock.enter(COMM)
        if self._exchanges is None:
            self._send(work, samples=work.lease.samples)
        else:
            self._exchange_in_background(work)

    def _exchange_in_background(self, work: TrainStep) -> None:
        """Pushes and pulls while the next batch is computed, on weights without this update."""
        assert self._exchanges is not None
        base = self._model_version
        self._wait_for_exchange()
        self._clip()
        missing = self._gather_gradients()
        # Read now: the loop sets the next step's learning rate during the exchange.
        options = optimizer_options(self.replica.optimizer)

        def push() -> None:
            with self._reporting_failure(work.step):
                self._handle += 1
                self._push(missing, options)
                self._report_push(work, base)

        def pull() -> None:
            with self._reporting_failure(work.step):
                # A buffered gradient may wait long for its update: then any version will do.
                aggregates = self._spec.sync.aggregates
                self._fetch(0, after=None if aggregates else (self.context.rank, self._handle))

        self._pending = self._exchanges.start(push, pull)

    @contextlib.contextmanager
    def _reporting_failure(self, step: int) -> Iterator[None]:
        """Reports an error at once: the loop may be waiting for work and would not notice."""
        try:
            yield
        except Exception as error:
            blame = "peer" if isinstance(error, PeerLost | DeadlineExceeded) else "own"
            if blame == "peer" and self.context.is_elastic:
                self.context.control.send(ExchangeFailed(self.context.rank, step, str(error)))
                raise
            who, trace = f"worker-{self.context.rank}", traceback.format_exc()
            self.context.control.send(ProcessFailing(who, str(error), trace, blame))
            raise

    def _wait_for_exchange(self) -> None:
        """Waits for the exchange in progress; its weights are those of the next step."""
        if self._pending is not None:
            start = time.perf_counter()
            took_s = self._pending(self.context.timeout_s)
            exposed_s = time.perf_counter() - start
            self._overlapped_us = int(max(0.0, took_s - exposed_s) * 1e6)
            self._pending = None
            self._load_pulled_weights()

    def _clip(self) -> None:
        if self.replica.clip is not None and not self._spec.sync.aggregates:
            torch.nn.utils.clip_grad_norm_(self._parameters, self.replica.clip)

    def _send(self, work: TrainStep, *, samples: int) -> None:
        """Pushes the gradient, unless it covers no samples, and reports it to the coordinator."""
        self._handle += 1
        if samples:
            self._clip()
            missing = self._gather_gradients()
            self._push(missing, optimizer_options(self.replica.optimizer))
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
        return self._overlapped_us

    def _pull(self, version: int, *, exact: bool = False) -> None:
        start = time.perf_counter_ns()
        self._fetch(version, exact=exact)
        if self.clock.current == COMM:
            took_ns = time.perf_counter_ns() - start
            self.clock.reassign(COMM, QUEUE, min(self._queued_us * 1000, took_ns))
        self._load_pulled_weights()

    def _fetch(self, version: int, *, exact: bool = False, after: Handle | None = None) -> None:
        """Pulls at least this version into the receive buffer, from all servers at once."""
        for transport in self._transports:
            transport.request(version, after=after, exact=exact)
        pulled = [
            transport.receive(self._incoming[shard.lo : shard.hi])
            for transport, shard in self._transports_and_shards()
        ]
        self._pulled_version = min(version for version, _ in pulled)
        self._queued_us = max(queued_us for _, queued_us in pulled)

    def _transports_and_shards(self) -> Iterator[tuple[ParameterTransport, ShardLayout]]:
        return zip(self._transports, self._layout.shards, strict=True)

    def _load_pulled_weights(self) -> None:
        self._model_version = self._pulled_version
        with torch.no_grad():
            for parameter, view in self._parameters_and_views():
                if not self._in_place:
                    parameter.copy_(view)
                elif parameter.data_ptr() != view.data_ptr():
                    parameter.data = view  # A layer has replaced its weights meanwhile.

    def _gather_gradients(self) -> set[int]:
        """Fills the send buffer; returns the parameters without a gradient."""
        missing = set()
        if self._compressors:
            # A codec leaves gradient plus residual in the buffer, also in the padding between
            # parameters, where it would grow from push to push and distort the codec's scales.
            self._outgoing.zero_()
        for index, (parameter, view) in enumerate(
            zip(self._parameters, self._out_views, strict=True)
        ):
            if parameter.grad is None:
                missing.add(index)
                view.zero_()  # Do not send an earlier step's gradient again.
            elif parameter.grad.is_sparse:
                raise UsageError(
                    f"parameter {self.replica.trained[index][0]} has a sparse gradient, which ps "
                    "does not support; use Embedding(sparse=False)"
                )
            elif parameter.grad.data_ptr() != view.data_ptr():
                view.copy_(parameter.grad)
        return missing

    def _push(self, missing: set[int], options: Sequence[Options]) -> None:
        self._uncompressed_bytes += sum(shard.hi - shard.lo for shard in self._layout.shards)
        for (transport, shard), owners in zip(
            self._transports_and_shards(), self._slice_parameters, strict=True
        ):
            absent = tuple(i for i, p in enumerate(owners) if p in missing) if missing else ()
            header = PushHeader(
                self.context.rank, self.context.view, self._handle, absent, tuple(options)
            )
            transport.push(header, self._outgoing[shard.lo : shard.hi])

    # ---- state --------------------------------------------------------------------------------

    def import_state(self, state: Section) -> None:
        """Loads the servers: each shard is sent by one worker, because all hold the same state."""
        load_weights(state, self.replica.model)
        slots = slots_by_parameter(state)
        for index, (transport, shard) in enumerate(self._transports_and_shards()):
            if index % self.context.size == self.context.rank:
                transport.load(self._shard_state(shard, slots))
        # The servers hold the optimizer state from now on.
        self.replica.optimizer.state.clear()

    def _shard_state(self, shard: ShardLayout, slots: dict[str, dict[str, Any]]) -> ShardState:
        optimizer = self.replica.optimizer
        group_of = {p: i for i, group in enumerate(optimizer.param_groups) for p in group["params"]}
        with torch.no_grad():
            for view, parameter in zip(self._out_views, self._parameters, strict=True):
                view.copy_(parameter)
        slices, parts = [], []
        for index, piece in enumerate(shard.slices):
            name, parameter = self.replica.trained[piece.parameter]
            whole = piece.stop - piece.start == parameter.numel()
            shape = tuple(parameter.shape) if whole else (piece.stop - piece.start,)
            dtype, offset = str(parameter.dtype).removeprefix("torch."), piece.offset - shard.lo
            slices.append(SliceEntry(name, offset, piece.nbytes, dtype, group_of[parameter], shape))
            for slot, value in slots.get(name, {}).items():
                part = value if isinstance(value, torch.Tensor) else torch.tensor(value)
                if part.shape == parameter.shape and not whole:
                    part = part.reshape(-1)[piece.start : piece.stop]
                parts.append(Slot(index, slot, part.contiguous()))
        cls = type(optimizer)
        return ShardState(
            view=self.context.view,
            slices=tuple(slices),
            options=tuple(optimizer_options(optimizer)),
            optimizer=f"{cls.__module__}:{cls.__qualname__}",
            codec=str(self._spec.codec) if self._spec.codec is not None else None,
            weights=self._outgoing[shard.lo : shard.hi],
            slots=tuple(parts),
        )

    def sync_weights(self, version: int) -> None:
        self._wait_for_exchange()
        self._pull(version, exact=True)

    def export_local_state(self) -> Section:
        """Returns the codec's residuals by parameter, so that any strategy can continue with it."""
        return Section(export_residuals(self._codec_buffers()))

    def import_local_state(self, own: Section) -> None:
        import_residuals(self._codec_buffers(), own.tensors)

    def _codec_buffers(self) -> Iterator[tuple[Compressor, list[ResidualSlice]]]:
        for compressor, shard in zip(self._compressors, self._layout.shards, strict=False):
            slices = []
            for piece in shard.slices:
                name, parameter = self.replica.trained[piece.parameter]
                offset = (piece.offset - shard.lo) // parameter.element_size()
                slices.append(ResidualSlice(name, parameter.shape, piece.start, piece.stop, offset))
            yield compressor, slices

    def recover_state(self, version: int, lost_servers: Sequence[tuple[str, int]] = ()) -> Section:
        if self._recover_shard is None:
            self.sync_weights(version)
            return self.export_state()
        # A pull may wait for a gradient that will never be part of an update.
        for transport in self._transports:
            transport.interrupt()
        with contextlib.suppress(PeerLost, DeadlineExceeded):
            self._wait_for_exchange()
        self._pending = None
        slots = [
            self._recover_shard(index, lost_servers, version, self._incoming[shard.lo : shard.hi])
            for index, shard in enumerate(self._layout.shards)
        ]
        self._load_pulled_weights()
        return self._make_section(slots)

    def export_state(self) -> Section:
        for transport in self._transports:
            transport.request_slots(self._pulled_version)
        return self._make_section([transport.receive_slots() for transport in self._transports])

    def _make_section(self, slots: Sequence[Sequence[Slot]]) -> Section:
        """Returns the state with the weights of the model and these slots of each shard."""
        section = Section()
        for name, parameter in self.replica.model.named_parameters():
            weights = parameter.detach()
            # The state may outlive this runner, which fills the same memory at the next pull.
            section.tensors[f"weights/{name}"] = weights.clone() if self._in_place else weights
        for name, buffer in persistent_buffers(self.replica.model).items():
            section.tensors[f"buffers/{name}"] = buffer
        for shard, found in zip(self._layout.shards, slots, strict=True):
            for slot in found:
                self._set_slot(section, shard, slot)
        return section

    def _set_slot(self, section: Section, shard: ShardLayout, slot: Slot) -> None:
        """Puts a slot, or this shard's part of it, into the state."""
        piece = shard.slices[slot.slice_index]
        name, parameter = self.replica.trained[piece.parameter]
        part, value = piece.stop - piece.start, slot.value
        if part < parameter.numel() and value.numel() == part and value.dim() > 0:
            key = f"slots/{name}/{slot.name}"
            if key not in section.tensors:
                section.tensors[key] = torch.empty(parameter.shape, dtype=value.dtype)
            section.tensors[key].view(-1)[piece.start : piece.stop] = value.reshape(-1)
        else:
            set_slot(section, name, slot.name, value)

    @property
    def uncompressed_bytes(self) -> int:
        return self._uncompressed_bytes if self._compressors else self.bytes_sent

    @property
    def bytes_received(self) -> int:
        return sum(transport.bytes_received for transport in self._transports)

    @property
    def bytes_sent(self) -> int:
        return sum(transport.bytes_sent for transport in self._transports)

    def close(self) -> None:
        if self._exchanges is not None:
            self._exchanges.close()
        for hook in self._hooks:
            hook.remove()
        for parameter in self._parameters:
            # Neither should keep the buffers alive, one of which is shared with servers.
            if self._in_place:
                parameter.data = parameter.data.clone()
            if self._hooks:
                parameter.grad = None
        for transport in self._transports:
            transport.close()


def _make_hook(view: torch.Tensor) -> Callable[[torch.Tensor], None]:
    """Moves a gradient into the send buffer as soon as it is computed."""

    def move(parameter: torch.Tensor) -> None:
        gradient = parameter.grad
        assert gradient is not None
        if not gradient.is_sparse and gradient.data_ptr() != view.data_ptr():
            with torch.no_grad():  # a backward pass may itself be recorded
                view.copy_(gradient.detach())
            parameter.grad = view

    return move
