"""Base class of strategies that split a model: each worker holds a part of a replica.

Worker r is part r % parts of replica r // parts. All parts of a replica compute on the same rows;
one of them holds those rows in the ledger, and the shares of the others are empty. State that is
distributed over workers is gathered tensor by tensor.
"""

import dataclasses
import hashlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from paceline.comm.process_group import CollectiveGroup
from paceline.errors import UsageError
from paceline.protocol.balance import split_batch
from paceline.protocol.messages import Lease
from paceline.specs.strategy import ModelParallel
from paceline.state import RemoteTensor, Section, checksum, persistent_buffers
from paceline.strategies.runner import (
    Runner,
    WorkerContext,
    average_running_stats,
    clip_parts,
    peer_errors,
)

TAG = 1 << 24
"""First tag of state transfers, above all tags of activations."""


class ModelParallelRunner(Runner):
    """Sums the gradients of each part in its data-parallel group."""

    def __init__(self, spec: ModelParallel, context: WorkerContext) -> None:
        super().__init__(context)
        model = self.replica.model
        reject_unsupported(spec.name, model)
        if self.replica.reduce_in_backward:
            raise UsageError(
                f"{spec.name} splits the model and does not support custom training loops"
            )
        if hasattr(model, "regularization") or hasattr(model, "save_extra_files"):
            raise UsageError(f"{spec.name} splits torch models and does not support Keras models")
        self._spec = spec
        self._parts = spec.model_parts
        self._part = context.rank % spec.model_parts
        self._replica = context.rank // spec.model_parts
        self._replicas = context.size // spec.model_parts
        self._first = context.rank - self._part
        """Rank of this replica's first part."""
        self._computes_loss = self._part == spec.loss_part
        groups = [tuple(range(p, context.size, self._parts)) for p in range(self._parts)]
        self._data_parallel_group = context.group.new_subgroup(tuple(groups))

    def rows_for(self, lease: Lease) -> Lease:
        """Returns the rows of the part that holds the lease; all parts of a replica read them."""
        if lease.row_ranges:
            raise UsageError(
                f"{self._spec.name}: all parts of a model read the same rows, but data that is "
                "read in blocks is assigned to single workers; use --shard sample"
            )
        spec, size = self._spec, self.context.size
        cuts = split_batch(lease.stop - lease.start, size, spec.batch_weights(size))
        one = self._first + spec.loss_part
        lo, hi = (lease.start + cut for cut in cuts[one : one + 2])
        return dataclasses.replace(lease, lo=lo, hi=hi)

    @property
    def eval_shard(self) -> tuple[int, int]:
        return self._replica, self._replicas

    def owned_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yields weights and buffers that this part holds."""
        model = self.replica.model
        for name, tensor in [*model.named_parameters(), *persistent_buffers(model).items()]:
            if self._holds(name):
                yield name, tensor

    def _holds(self, name: str) -> bool:
        """Returns whether this part holds a parameter or buffer, or a slice of it."""
        return True

    def average_buffers(self, samples: int) -> None:
        """Averages the statistics of a part over its data-parallel group."""
        # Only one part of a replica counts samples; the others processed the same number.
        counts = torch.zeros(self._replicas, dtype=torch.int64)
        counts[self._replica] = samples
        self.context.group.all_reduce(counts)
        names = {name for name, _ in self.owned_tensors()}
        buffers = persistent_buffers(self.replica.model)
        mine = {name: b for name, b in buffers.items() if name in names}
        average_running_stats(mine, self._data_parallel_group, int(counts[self._replica]))

    def checksum(self) -> str:
        """Returns the checksum of a whole replica, from the checksums of its parts."""
        mine = checksum(Section({name: t.detach() for name, t in self.owned_tensors()}))
        gathered = self.context.group.all_gather_sections(Section(plain={"digest": mine}))
        parts = [s.plain["digest"] for s in gathered[self._first : self._first + self._parts]]
        return hashlib.sha256("".join(parts).encode()).hexdigest()[:16]

    def clip(self, owned: list[torch.nn.Parameter], here: list[torch.nn.Parameter]) -> None:
        """Clips by the norm over all parts, with each parameter counted once."""
        counted = [p.grad for p in owned if p.grad is not None and self._replica == 0]
        gradients = [p.grad for p in here if p.grad is not None]
        clip_parts(self.replica.clip, counted, gradients, self.context.group)


def reject_unsupported(word: str, model: torch.nn.Module) -> None:
    """Raises UsageError for settings that a split model does not support."""
    if any(p.device.type != "cpu" for p in model.parameters()):
        raise UsageError(f"{word} exchanges parts of a model in CPU memory; use --device cpu")
    if model._compiled_call_impl is not None:
        raise UsageError(f"{word} splits the model and does not support compile; remove it")


def callable_layers(
    model: torch.nn.Module,
) -> Iterator[tuple[str, torch.nn.Module, list[torch.nn.Parameter]]]:
    """Yields modules with their names and the parameters that they use directly.

    Attention is yielded as a whole, because it uses the weights of its parts and never calls them.
    """
    inside: set[torch.nn.Module] = set()
    for name, module in model.named_modules():
        if module not in inside:
            whole = isinstance(module, torch.nn.MultiheadAttention)
            if whole:
                inside.update(module.modules())
            yield name, module, list(module.parameters(recurse=whole))


def all_reduce_gradients(
    parameters: list[torch.nn.Parameter], group: CollectiveGroup | None
) -> int:
    """Sums gradients in place over a group; missing ones count as zero. Returns the bytes sent."""
    if group is None or group.size == 1 or not parameters:
        return 0
    used = torch.tensor([float(p.grad is not None) for p in parameters]).to(parameters[0])
    parts = [(torch.zeros_like(p) if p.grad is None else p.grad).reshape(-1) for p in parameters]
    flat = torch.cat([*parts, used])
    group.all_reduce(flat)
    sizes = [p.numel() for p in parameters]
    *sums, used = torch.split(flat, [*sizes, len(parameters)])
    for parameter, part, is_used in zip(parameters, sums, used.tolist(), strict=True):
        # A parameter that no worker used has no gradient, and the optimizer skips it.
        parameter.grad = part.view_as(parameter) if is_used else None
    return flat.nbytes


def parameter_of_key(key: str) -> str:
    """Returns the parameter or buffer that a tensor of the state belongs to."""
    kind, _, name = key.partition("/")
    return name.rpartition("/")[0] if kind == "slots" else name


def select_state(whole: Section, is_selected: Callable[[str], bool]) -> Section:
    """Returns the state of the selected parameters and buffers."""
    slots = {n: v for n, v in whole.plain.get("slots", {}).items() if is_selected(n)}
    tensors = {k: t for k, t in whole.tensors.items() if is_selected(parameter_of_key(k))}
    return Section(tensors, {"slots": slots})


@contextmanager
def gather_to_rank0(
    group: CollectiveGroup, mine: Section
) -> Iterator[tuple[Section, dict[str, RemoteTensor]]]:
    """Yields this worker's state and the remote state; no name occurs on two workers.

    All workers call it. Worker 0 fetches remote tensors inside the context, in order; the others
    send on exit. Slots that are not tensors are sent at once.
    """
    forms = {
        k: [list(t.shape), str(t.dtype).removeprefix("torch.")] for k, t in mine.tensors.items()
    }
    gathered = group.all_gather_sections(Section(plain={**mine.plain, "forms": forms}))
    distant: dict[str, RemoteTensor] = {}
    for rank, section in enumerate(gathered[1:], 1):
        for key, (shape, dtype) in section.plain["forms"].items():
            distant[key] = _distant(group, shape, dtype, rank, TAG + len(distant))
    yield Section(mine.tensors, _merge_plain(gathered)), distant
    if group.rank == 0:
        return
    for place, key in enumerate(distant):
        if key in mine.tensors:
            with peer_errors(f"worker 0 did not receive {key}"):
                value = mine.tensors[key].detach().contiguous().reshape(-1)
                group.isend(value, 0, TAG + place).wait()


def _distant(
    group: CollectiveGroup, shape: list[int], dtype: str, rank: int, tag: int
) -> RemoteTensor:
    kind = getattr(torch, dtype)

    def fetch() -> torch.Tensor:
        value = torch.empty(torch.Size(shape).numel(), dtype=kind)
        with peer_errors(f"worker {rank} did not send its state"):
            group.irecv(value, rank, tag).wait()
        return value.view(shape)

    return RemoteTensor(torch.Size(shape), kind, fetch)


def gather_to_all(group: CollectiveGroup, mine: Section) -> Section:
    """Gathers the whole state on all workers, for a strategy that continues with all of it."""
    gathered = group.all_gather_sections(mine)
    tensors = {k: t for section in gathered for k, t in section.tensors.items()}
    return Section(tensors, _merge_plain(gathered))


def _merge_plain(sections: Iterable[Section]) -> dict[str, Any]:
    slots: dict[str, Any] = {}
    for section in sections:
        for name, values in section.plain.get("slots", {}).items():
            slots.setdefault(name, {}).update(values)
    return {"slots": slots} if slots else {}
