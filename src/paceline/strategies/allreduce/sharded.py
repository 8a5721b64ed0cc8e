"""Worker side of allreduce(shard=...): optimizer state, or all state, is sharded.

`optimizer`: each worker updates some parameters, holds only their optimizer state and broadcasts
the new weights. `full`: weights and gradients are sharded, too (torch's FSDP); the weights of a
layer are complete only while it computes.
"""

import copy
import dataclasses
import functools
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

from paceline.errors import UsageError
from paceline.protocol.messages import Lease, StepStats
from paceline.state import (
    RemoteTensor,
    Section,
    checksum,
    is_model_tensor,
    persistent_buffers,
    slots_by_parameter,
    state_from_model,
)
from paceline.strategies.allreduce.spec import AllReduce
from paceline.strategies.allreduce.worker import AllReduceRunner
from paceline.strategies.model_parallel import (
    callable_layers,
    gather_to_all,
    gather_to_rank0,
    reject_unsupported,
    select_state,
)
from paceline.strategies.optimizer_traits import optimizer_traits
from paceline.strategies.runner import (
    Batch,
    LossOf,
    Replica,
    Runner,
    TrainStep,
    WorkerContext,
    clip_parts,
    copy_flat,
    copy_options,
    measure,
    peer_errors,
)
from paceline.telemetry.phase_clock import BACKWARD, COMM, FORWARD, OPTIMIZER

UNIT_BYTES = 1 << 16
"""Layers with fewer bytes are gathered together with their parent."""


def assign_owners(parameters: list[tuple[str, torch.nn.Parameter]], workers: int) -> dict[str, int]:
    """Assigns each parameter to a worker: the largest first, to the least loaded worker."""
    loads = [0] * workers
    owners = {}
    for name, parameter in sorted(parameters, key=lambda item: (-item[1].numel(), item[0])):
        owner = loads.index(min(loads))
        owners[name] = owner
        loads[owner] += parameter.numel()
    return owners


class ShardedOptimizerRunner(AllReduceRunner):
    """Like allreduce, but each parameter is updated by one worker, which broadcasts it."""

    can_share_weights = False

    def __init__(self, spec: AllReduce, context: WorkerContext) -> None:
        super().__init__(spec, context)
        self._owners = assign_owners(self.replica.trained, context.size)

    def optimizer_path(self) -> str:
        return "each parameter is updated by one worker, as a whole"

    def _update(self, work: TrainStep) -> None:
        replica, rank = self.replica, self.context.rank
        if replica.clip is not None:
            torch.nn.utils.clip_grad_norm_([p for _, p in replica.trained], replica.clip)
        for name, parameter in replica.trained:
            if self._owners[name] != rank:
                parameter.grad = None
        replica.apply_gradients()
        self.clock.enter(COMM)
        with peer_errors(f"new weights of step {work.step} did not arrive"):
            self._broadcast_updated()

    def _broadcast_updated(self) -> None:
        for owner in range(self.context.size):
            theirs = [p.detach() for n, p in self.replica.trained if self._owners[n] == owner]
            if not theirs:
                continue
            flat = torch.cat([p.reshape(-1) for p in theirs])
            self.context.group.broadcast(flat, owner)
            if owner == self.context.rank:
                self._sent += flat.nbytes
            else:
                copy_flat(flat, theirs)

    def import_state(self, state: Section) -> None:
        super().import_state(state)
        for name, parameter in self.replica.trained:
            if self._owners[name] != self.context.rank:
                self.replica.optimizer.state.pop(parameter, None)

    def export_state(self) -> Section:
        weights, slots = self._split_state()
        merged = gather_to_all(self.context.group, slots)
        return Section({**weights, **merged.tensors}, merged.plain)

    @contextmanager
    def gather_state(self, *, slots: bool) -> Iterator[tuple[Section, dict[str, RemoteTensor]]]:
        weights, mine = self._split_state()
        if not slots:
            mine = Section()
        if self.context.rank == 0:
            mine.tensors |= weights
        with gather_to_rank0(self.context.group, mine) as handed:
            yield handed

    def _split_state(self) -> tuple[dict[str, torch.Tensor], Section]:
        """Returns weights and buffers, and the slots of the parameters that this worker updates."""
        whole = state_from_model(self.replica.model, self.replica.optimizer)
        weights = {k: t for k, t in whole.tensors.items() if is_model_tensor(k)}
        slots = Section({k: t for k, t in whole.tensors.items() if k not in weights}, whole.plain)
        rank, owners = self.context.rank, self._owners
        return weights, select_state(slots, lambda name: owners.get(name) == rank)

    @property
    def bytes_sent(self) -> int:
        return super().bytes_sent + self._sent


class FullyShardedRunner(Runner):
    """Trains a copy of the model that torch shards; the original model is emptied."""

    def __init__(self, spec: AllReduce, context: WorkerContext) -> None:
        super().__init__(context)
        model = self.replica.model
        reject_unsupported("allreduce(shard=full)", model)
        if self.replica.reduce_in_backward:
            raise UsageError("allreduce(shard=full) does not support custom training loops")
        if hasattr(model, "regularization") or hasattr(model, "save_extra_files"):
            raise UsageError("allreduce(shard=full) does not support Keras models")
        for name, parameter in model.named_parameters():
            if parameter.dim() == 0:
                raise UsageError(
                    f"allreduce(shard=full): parameter {name} is a scalar, which torch "
                    "cannot shard; use the shape (1,)"
                )
        # Both are made from the imported state.
        self._model: torch.nn.Module
        self._optimizer: torch.optim.Optimizer

    def optimizer_path(self) -> str:
        reason = optimizer_traits(self.replica.optimizer).reason
        return f"each worker updates its shard of every parameter: {reason}"

    def import_state(self, state: Section) -> None:
        """Moves the weights into shards and frees the memory of the model."""
        slots = slots_by_parameter(state)
        for name, buffer in persistent_buffers(self.replica.model).items():
            buffer.copy_(state.tensors[f"buffers/{name}"])
        for parameter in self.replica.model.parameters():
            parameter.data = torch.zeros((), dtype=parameter.dtype).expand(parameter.shape)
        self.replica.optimizer.state.clear()
        self._model = fsdp_copy(self.replica.model, self.context.size)
        self._optimizer = copy_optimizer(self.replica, self._model)
        for name, parameter in self._model.named_parameters():
            with torch.no_grad():
                _local(parameter).copy_(self._shard(state.tensors[f"weights/{name}"]))
            if name in slots:
                self._optimizer.state[parameter] = {
                    slot: self._shard_slot(value, parameter) for slot, value in slots[name].items()
                }

    def _shard(self, whole: torch.Tensor) -> torch.Tensor:
        """Returns this worker's rows of a tensor; the last workers may have none."""
        chunks = whole.chunk(self.context.size, dim=0)
        rank = self.context.rank
        return chunks[rank] if rank < len(chunks) else whole[:0]

    def _shard_slot(self, value: Any, parameter: torch.nn.Parameter) -> Any:
        if not isinstance(value, torch.Tensor) or value.shape != parameter.shape:
            return value
        made = torch.zeros_like(parameter)
        _local(made).copy_(self._shard(value))
        return made

    # ---- a step -------------------------------------------------------------------------------

    def rows_for(self, lease: Lease) -> Lease:
        """Returns the lease to read; a worker with an empty share reads one row to take part."""
        if lease.samples or lease.row_ranges:
            return lease
        return dataclasses.replace(lease, lo=lease.start, hi=lease.start + 1)

    def forward_backward(self, work: TrainStep, batch: Batch | None, loss_of: LossOf) -> StepStats:
        # All workers must gather a layer: use a row with weight 0 that leaves no statistics.
        self._model.train(work.lease.samples > 0)
        if batch is None:
            raise UsageError(
                "allreduce(shard=full): a worker has no rows of a batch that is read in blocks; "
                "use --shard sample"
            )
        inputs, targets = batch
        with peer_errors(f"an exchange inside step {work.step} failed", inside_layers=True):
            self.clock.enter(FORWARD)
            output = self._model(inputs)
            loss = loss_of(output, targets)
            self.clock.enter(BACKWARD)
            # FSDP averages over the workers, each with a share of the batch.
            torch.autograd.backward(loss * (work.weight * self.context.size))
        self._sent += 3 * sum(_local(p).nbytes for p in self._model.parameters())
        if not work.lease.samples:
            return StepStats(0, 0, 0.0, 0)
        return measure(work.lease.samples, loss, output, targets)

    def finish_step(self, work: TrainStep) -> None:
        self.clock.enter(COMM)
        mine = [p for group in self._optimizer.param_groups for p in group["params"]]
        gradients = [_local(p.grad) for p in mine if p.grad is not None]
        clip_parts(self.replica.clip, gradients, gradients, self.context.group)
        self.clock.enter(OPTIMIZER)
        copy_options(self._optimizer, self.replica.optimizer.param_groups)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)

    # ---- evaluation and state -----------------------------------------------------------------

    @property
    def eval_shard(self) -> tuple[int, int]:
        """All workers evaluate every row, because all must gather a layer together."""
        return 0, 1

    def predict(self, inputs: torch.Tensor) -> torch.Tensor | None:
        self._model.train(self.replica.model.training)
        with peer_errors("an exchange of an evaluation failed", inside_layers=True):
            output = self._model(inputs)
        return output if self.context.rank == 0 else None

    def checksum(self) -> str:
        mine = checksum(Section({n: _local(p).detach() for n, p in self._model.named_parameters()}))
        gathered = self.context.group.all_gather_sections(Section(plain={"digest": mine}))
        return " ".join(s.plain["digest"] for s in gathered)

    def _state(self) -> Section:
        """Returns the state with sharded tensors."""
        for module in self._model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()  # an evaluation may have left weights gathered
        return state_from_model(self._model, self._optimizer)

    def export_state(self) -> Section:
        section = self._state()
        section.tensors = {k: _whole(t) for k, t in section.tensors.items()}
        return section

    @contextmanager
    def gather_state(self, *, slots: bool) -> Iterator[tuple[Section, dict[str, RemoteTensor]]]:
        section = self._state()
        kept = {k: t for k, t in section.tensors.items() if slots or is_model_tensor(k)}
        distant = {
            key: RemoteTensor(tensor.shape, tensor.dtype, functools.partial(_whole, tensor))
            for key, tensor in kept.items()
            if isinstance(tensor, DTensor)
        }
        here = {k: t for k, t in kept.items() if k not in distant}
        yield Section(here, section.plain if slots else {}), distant
        if self.context.rank:
            for remote in distant.values():  # all workers must gather it
                with peer_errors("worker 0 did not receive the state"):
                    remote.fetch()

    def model_part(self) -> dict[str, object]:
        held = sum(_local(p).nbytes for p in self._model.parameters())
        return {"part": self.context.rank, "parts": self.context.size, "weight_bytes": held}

    def close(self) -> None:
        """Allocates the weights of the model again, for the next strategy."""
        for parameter in self.replica.model.parameters():
            parameter.data = torch.empty(parameter.shape, dtype=parameter.dtype)


def fsdp_copy(model: torch.nn.Module, workers: int) -> torch.nn.Module:
    """Returns a copy of the model with FSDP; buffers are shared with the model."""
    copied = copy.deepcopy(model)
    for mine, theirs in zip(copied.modules(), model.modules(), strict=True):
        mine._buffers.update(theirs._buffers)
    mesh = init_device_mesh(next(model.parameters()).device.type, (workers,))
    for unit in reversed(fsdp_units(copied)):  # the inner ones first
        fully_shard(unit, mesh=mesh)
    fully_shard(copied, mesh=mesh, reshard_after_forward=True)
    return copied


def fsdp_units(model: torch.nn.Module) -> list[torch.nn.Module]:
    """Returns layers that are gathered separately: large enough, with weights not shared."""
    uses = Counter(p for module in model.modules() for p in module.parameters(recurse=False))
    return [
        module
        for _, module, mine in callable_layers(model)
        if module is not model
        and sum(p.nbytes for p in mine) >= UNIT_BYTES
        and all(uses[p] == 1 for p in mine)
    ]


def copy_optimizer(replica: Replica, model: torch.nn.Module) -> torch.optim.Optimizer:
    names = {p: n for n, p in replica.model.named_parameters()}
    there = dict(model.named_parameters())
    groups = [
        {**group, "params": [there[names[p]] for p in group["params"]]}
        for group in replica.optimizer.param_groups
    ]
    kind: Any = type(replica.optimizer)
    try:
        made: torch.optim.Optimizer = kind(groups)
    except TypeError as error:
        why = f"allreduce(shard=full): the optimizer cannot be copied: {error}"
        raise UsageError(why) from None
    return made


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
