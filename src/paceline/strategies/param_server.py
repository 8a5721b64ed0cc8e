"""ps, the worker's side: pull weights, compute, push gradients; servers hold the optimizer."""

from __future__ import annotations

from typing import Any

import torch

from paceline.comm.shards import ELEMENTWISE, FlatLayout, Shard, as_memory
from paceline.comm.wire import MAX_BODY, Channel
from paceline.errors import PeerLost, UsageError, WireError
from paceline.protocol.messages import Pushed
from paceline.specs.strategy import ParameterServer
from paceline.state import Section, load_weights, persistent_buffers, put_slot, slots_by_parameter
from paceline.strategies.runner import Runner, Surroundings, Work
from paceline.telemetry.phases import COMM


class ParameterServerRunner(Runner):
    """A server that dies ends the run: its shard of weights and optimizer is gone with it."""

    def __init__(self, spec: ParameterServer, around: Surroundings) -> None:
        super().__init__(around)
        self._spec = spec
        optimizer = self.replica.optimizer
        if isinstance(optimizer, torch.optim.LBFGS):
            raise UsageError("LBFGS evaluates the loss several times a step: ps cannot run it")
        self._names = [name for name, _ in self.replica.trained]
        self._parameters = [p for _, p in self.replica.trained]
        self._layout = FlatLayout(
            self._parameters,
            len(around.servers),
            elementwise=type(optimizer).__name__ in ELEMENTWISE,
        )
        self._incoming = self._layout.new_buffer()
        self._outgoing = self._layout.new_buffer()
        self._in_views = self._layout.views(self._incoming)
        self._out_views = self._layout.views(self._outgoing)
        self._piece_owner = [[s.parameter for s in shard.slices] for shard in self._layout.shards]
        self._handle = 0
        self._base = 0
        self._channels = [
            Channel.connect(
                host,
                port,
                token=around.token,
                peer=f"server {index}",
                timeout_s=around.timeout_s,
            )
            for index, (host, port) in enumerate(around.servers)
        ]

    # ---- steps --------------------------------------------------------------------------------

    def begin_step(self, work: Work) -> None:
        if work.lease.samples:
            self.clock.enter(COMM)
            self._pull(work.version)

    def finish_step(self, work: Work) -> None:
        self.clock.enter(COMM)
        self._send(work, samples=work.lease.samples)

    def _send(self, work: Work, *, samples: int) -> None:
        """Push the gradient, if it is made of samples, and tell the coordinator."""
        self._handle += 1
        if samples:
            if self.replica.clip is not None and not self._spec.sync.aggregates:
                torch.nn.utils.clip_grad_norm_(self._parameters, self.replica.clip)
            self._push()
        self.around.control.tell(
            Pushed(
                worker=self.around.rank,
                handle=self._handle,
                lease=work.lease.id,
                samples=work.lease.samples,
                base=self._base if samples else work.version,
                step=work.step,
                measured=work.measured,
            )
        )

    def _pull(self, version: int) -> None:
        for channel in self._channels:
            channel.send({"op": "pull", "at_least": version})
        incoming = as_memory(self._incoming)
        versions = []
        for channel, shard in zip(self._channels, self._layout.shards, strict=True):
            head = _receive(channel, incoming[shard.lo : shard.hi])
            versions.append(int(head["version"]))
        self._base = min(versions)
        self._take_incoming()

    def _take_incoming(self) -> None:
        with torch.no_grad():
            for parameter, view in zip(self._parameters, self._in_views, strict=True):
                parameter.copy_(view)

    def _push(self) -> None:
        missing = set()
        for index, (parameter, view) in enumerate(
            zip(self._parameters, self._out_views, strict=True)
        ):
            if parameter.grad is None:
                missing.add(index)
            elif parameter.grad.is_sparse:
                raise UsageError(
                    f"parameter {self._names[index]} has a sparse gradient: ps needs dense"
                )
            else:
                view.copy_(parameter.grad)
        groups = hyper_parameters(self.replica.optimizer)
        outgoing = as_memory(self._outgoing)
        for channel, shard, owners in zip(
            self._channels, self._layout.shards, self._piece_owner, strict=True
        ):
            head = {
                "op": "push",
                "worker": self.around.rank,
                "handle": self._handle,
                "missing": [i for i, owner in enumerate(owners) if owner in missing],
                "groups": groups,
            }
            channel.send(head, outgoing[shard.lo : shard.hi])

    # ---- state --------------------------------------------------------------------------------

    def import_state(self, state: Section) -> None:
        """Each server's shard is sent by one worker; all hold the same state."""
        load_weights(state, self.replica.model)
        slots = slots_by_parameter(state)
        for index, (channel, shard) in enumerate(
            zip(self._channels, self._layout.shards, strict=True)
        ):
            if index % self.around.size == self.around.rank:
                self._send_shard(channel, shard, slots)
        # The optimizer's slots live on the servers now.
        self.replica.optimizer.state.clear()

    def _send_shard(self, channel: Channel, shard: Shard, slots: dict[str, dict[str, Any]]) -> None:
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
            pieces.append([name, offset, piece.nbytes, dtype, group_of[parameter]])
            for slot, value in slots.get(name, {}).items():
                part = value if isinstance(value, torch.Tensor) else torch.tensor(value)
                if part.shape == parameter.shape and part.dim() > 0:
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
            "groups": hyper_parameters(optimizer),
            "optimizer": f"{cls.__module__}:{cls.__qualname__}",
            "slots": table,
        }
        weights = as_memory(self._outgoing)[shard.lo : shard.hi]
        channel.send(head, weights, *(as_memory(t) for t in tensors))
        _receive(channel, memoryview(b""))

    def settle(self, version: int) -> None:
        self._pull(version)

    def export_state(self) -> Section:
        section = Section()
        for name, parameter in self.replica.model.named_parameters():
            section.tensors[f"weights/{name}"] = parameter.detach()
        for name, buffer in persistent_buffers(self.replica.model).items():
            section.tensors[f"buffers/{name}"] = buffer
        for channel in self._channels:
            channel.send({"op": "export", "at_least": self._base})
        for channel, shard in zip(self._channels, self._layout.shards, strict=True):
            self._receive_slots(channel, shard, section)
        return section

    def _receive_slots(self, channel: Channel, shard: Shard, section: Section) -> None:
        head, size = channel.receive_head(max_body=MAX_BODY)
        _check(head, channel)
        body = torch.empty(size, dtype=torch.uint8)
        if size:
            channel.receive_into(as_memory(body))
        at = 0
        for index, slot, dtype, shape, nbytes in head["slots"]:
            piece = shard.slices[index]
            name, parameter = self.replica.trained[piece.parameter]
            value = body[at : at + nbytes].clone().view(getattr(torch, dtype)).reshape(shape)
            at += nbytes
            if value.numel() == piece.stop - piece.start and value.dim() > 0:
                # A part of a slot as large as its parameter: put it into its place.
                key = f"slots/{name}/{slot}"
                if key not in section.tensors:
                    section.tensors[key] = torch.empty(parameter.shape, dtype=value.dtype)
                section.tensors[key].view(-1)[piece.start : piece.stop] = value.reshape(-1)
            else:
                put_slot(section, name, slot, value)

    @property
    def bytes_sent(self) -> int:
        return sum(channel.bytes_sent for channel in self._channels)

    def close(self) -> None:
        for channel in self._channels:
            channel.close()


def hyper_parameters(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
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


def _receive(channel: Channel, target: memoryview) -> dict[str, Any]:
    head, size = channel.receive_head(max_body=target.nbytes)
    _check(head, channel)
    if size != target.nbytes:
        raise WireError(f"{channel.peer} sent {size} bytes, {target.nbytes} expected")
    if size:
        channel.receive_into(target)
    assert isinstance(head, dict)
    return head
