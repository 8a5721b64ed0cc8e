"""What strategies share that split a model: workers in replicas, each worker a part of one.

Worker r is part r % parts of replica r // parts. All parts of a replica compute on the same rows;
one of them has those rows in the ledger, the others' shares are empty.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Iterator

import torch

from paceline.comm.process_group import CollectiveGroup
from paceline.comm.state_exchange import all_gather_sections
from paceline.errors import UsageError
from paceline.protocol.messages import Lease, split_batch
from paceline.specs.model_parallel import ModelParallel
from paceline.state import Section, checksum, persistent_buffers
from paceline.strategies.runner import Runner, WorkerContext, average_running_stats, scale_to_norm


class ModelParallelRunner(Runner):
    """Replicas sum the gradients of each part among the workers that hold it, its twins."""

    def __init__(self, spec: ModelParallel, around: WorkerContext) -> None:
        super().__init__(around)
        model = self.replica.model
        reject_non_cpu(spec.name, model)
        if self.replica.reduce_in_backward:
            raise UsageError(f"{spec.name} splits the model: a loop of your own needs it whole")
        if hasattr(model, "regularization") or hasattr(model, "save_extra_files"):
            raise UsageError(
                f"{spec.name} splits plain torch models: a Keras model has to stay whole"
            )
        reject_compiled(spec.name, model)
        self._word = spec.name
        self._parts = spec.model_parts
        self._part = around.rank % spec.model_parts
        self._replica = around.rank // spec.model_parts
        self._replicas = around.size // spec.model_parts
        self._first = around.rank - self._part
        """The rank of this replica's first part."""
        self._loss_part = spec.loss_part
        self._shares = spec.batch_weights(around.size)
        self._data_parallel_group = around.group.new_subgroup(
            tuple(
                tuple(range(part, around.size, spec.model_parts))
                for part in range(spec.model_parts)
            )
        )

    def rows_for(self, lease: Lease) -> Lease:
        """All parts of a replica read the rows that one of them answers for."""
        if lease.row_ranges:
            raise UsageError(
                f"{self._word}: all parts of a model read the same rows, and data that is dealt in "
                "blocks is read by one worker: use --shard sample"
            )
        cuts = split_batch(lease.stop - lease.start, self.context.size, self._shares)
        one = self._first + self._loss_part
        return dataclasses.replace(
            lease, lo=lease.start + cuts[one], hi=lease.start + cuts[one + 1]
        )

    @property
    def eval_shard(self) -> tuple[int, int]:
        return self._replica, self._replicas

    def owned_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Weights and buffers that this part has, each named by one part of a replica alone or,
        where all have it whole, by the first."""
        raise NotImplementedError

    def average_buffers(self, samples: int) -> None:
        """Statistics of a part are averaged over its twins."""
        # Only one part of a replica counts samples; the others saw as many.
        counts = torch.zeros(self._replicas, dtype=torch.int64)
        counts[self._replica] = samples
        self.context.group.all_reduce(counts)
        names = {name for name, _ in self.owned_tensors()}
        buffers = persistent_buffers(self.replica.model)
        mine = {name: b for name, b in buffers.items() if name in names}
        average_running_stats(mine, self._data_parallel_group, int(counts[self._replica]))

    def checksum(self) -> str:
        """Of the parts of this replica together: every worker tells that of a whole model."""
        mine = checksum(Section({name: t.detach() for name, t in self.owned_tensors()}))
        told = all_gather_sections(Section(plain={"digest": mine}), self.context.group)
        parts = [s.plain["digest"] for s in told[self._first : self._first + self._parts]]
        return hashlib.sha256("".join(parts).encode()).hexdigest()[:16]

    def clip(self, owned: list[torch.nn.Parameter], here: list[torch.nn.Parameter]) -> None:
        """By the norm over all parts, each parameter counted once; replicas agree by now."""
        limit = self.replica.clip
        if limit is None:
            return
        square = torch.zeros(1, dtype=torch.float64)
        if self._replica == 0:
            for parameter in owned:
                if parameter.grad is not None:
                    square += parameter.grad.double().square().sum()
        self.context.group.all_reduce(square)
        scale_to_norm(limit, float(square), (p.grad for p in here if p.grad is not None))


def reject_compiled(word: str, model: torch.nn.Module) -> None:
    """What is computed is made of the model's parts, which nobody has compiled."""
    if model._compiled_call_impl is not None:
        raise UsageError(f"{word} takes the model apart: leave compile out")


def reject_non_cpu(word: str, model: torch.nn.Module) -> None:
    if any(p.device.type != "cpu" for p in model.parameters()):
        raise UsageError(f"{word}: parts of a model exchange in the processor's memory: device cpu")


def all_reduce_gradients(
    parameters: list[torch.nn.Parameter], group: CollectiveGroup | None
) -> int:
    """Over the workers of a group, in place, those without one giving zeros; bytes handed over."""
    if group is None or group.size == 1 or not parameters:
        return 0
    used = torch.tensor([float(p.grad is not None) for p in parameters]).to(parameters[0])
    parts = [(torch.zeros_like(p) if p.grad is None else p.grad).reshape(-1) for p in parameters]
    flat = torch.cat([*parts, used])
    group.all_reduce(flat)
    sizes = [p.numel() for p in parameters]
    *sums, used = torch.split(flat, [*sizes, len(parameters)])
    for parameter, part, anybody in zip(parameters, sums, used.tolist(), strict=True):
        # What nobody used keeps no gradient: the optimizer then leaves it alone.
        parameter.grad = part.view_as(parameter) if anybody else None
    return flat.nbytes
