"""Weights of exact strategies: one model, one optimizer step on the weighted mean gradient.

"Exact" means equal to one process on the global batch, so this is the definition of what those
strategies compute, not a copy of their code. With a codec, gradients are summed as
the workers would sum them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from paceline.codecs.compressor import Compressor, reference_sum
from paceline.codecs.spec import Codec
from paceline.comm.buckets import plan_layout
from paceline.protocol.messages import Lease
from paceline.state import Section
from paceline.strategies.runner import NORMS_EVERY, step_optimizer
from paceline.twin.updates import EMPTY, StepOutcome, WeightUpdates

if TYPE_CHECKING:
    from paceline.twin.gradient_backend import GradientBackend


class ExactUpdate(WeightUpdates):
    """All workers compute on the same weights; their weighted sum is one update."""

    uses_leases = True

    def __init__(
        self, backend: GradientBackend, *, codec: Codec | None = None, bucket_bytes: int = 0
    ) -> None:
        self._backend = backend
        self._replica = backend.replica
        self._steps = 0
        self._coded: _CompressedSum | None = None
        if codec is not None:
            self._coded = _CompressedSum(codec, backend, bucket_bytes)

    def step(self, leases: Sequence[Lease]) -> list[StepOutcome]:
        backend, parameters = self._backend, [p for _, p in self._replica.trained]
        backend.set_lr(leases[0])
        measure = self._steps % NORMS_EVERY == 0 and len(leases) > 1
        squares: list[float] = []
        outcomes: list[StepOutcome] = []
        sums: list[torch.Tensor | None] = [None] * len(parameters)
        for worker, lease in enumerate(leases):
            if not lease.samples:
                outcomes.append(EMPTY)
                squares.append(0.0)
                continue
            outcomes.append(backend.forward_backward(worker, lease))
            if measure:
                squares.append(_sq_norm(parameters))
            weight = lease.samples / lease.batch
            if self._coded is not None:
                self._coded.add(worker, weight)
            elif lease.samples < lease.batch:
                _accumulate(sums, parameters, weight)
            else:
                sums = [p.grad for p in parameters]
        if self._coded is not None:
            self._coded.finish()
        else:
            for parameter, total in zip(parameters, sums, strict=True):
                parameter.grad = total
        if measure:
            whole = _sq_norm(parameters)
            for worker, (lease, square) in enumerate(zip(leases, squares, strict=True)):
                if lease.samples:
                    norms = (lease.samples, square, lease.batch, whole)
                    outcomes[worker] = dataclasses.replace(outcomes[worker], norms=norms)
        step_optimizer(self._replica)
        self._steps += 1
        return outcomes

    def recover_state(self) -> Section:
        return self._backend.copy_state()

    def keep_local_state(self) -> None:
        if self._coded is not None:
            self._coded.store_residuals()

    def export(self) -> None:
        self.keep_local_state()


def _sq_norm(parameters: list[torch.nn.Parameter]) -> float:
    return sum(float(p.grad.square().sum()) for p in parameters if p.grad is not None)


def _accumulate(
    sums: list[torch.Tensor | None], parameters: list[torch.nn.Parameter], weight: float
) -> None:
    for index, parameter in enumerate(parameters):
        if parameter.grad is not None:
            before = sums[index]
            if before is None:
                sums[index] = parameter.grad * weight
            else:
                before.add_(parameter.grad, alpha=weight)


class _CompressedSum:
    """Compresses and sums every worker's gradients, in the buckets of a real exchange."""

    def __init__(self, codec: Codec, backend: GradientBackend, bucket_bytes: int) -> None:
        by_name = dict(backend.replica.trained)
        layout = plan_layout(backend.replica.trained, bucket_bytes)
        self._buckets = [[by_name[name] for name in names] for names in layout]
        self._compressors = [
            [
                Compressor(codec, [p.shape for p in bucket], bucket[0].dtype)
                for bucket in self._buckets
            ]
            for _ in backend.residuals
        ]
        self._flats: list[list[tuple[Compressor, torch.Tensor]]] = [[] for _ in self._buckets]
        self._names = [[f"residual/{name}" for name in names] for names in layout]
        self._residuals = backend.residuals
        for compressors, kept in zip(self._compressors, self._residuals, strict=True):
            for compressor, names in zip(compressors, self._names, strict=True):
                if compressor.residual is not None and all(n in kept for n in names):
                    flat = [kept[n].reshape(-1) for n in names]
                    compressor.load_residual(torch.cat(flat).to(compressor.residual.dtype))

    def store_residuals(self) -> None:
        """Writes the unsent values back, for the next strategy."""
        for compressors, kept in zip(self._compressors, self._residuals, strict=True):
            for compressor, names, bucket in zip(
                compressors, self._names, self._buckets, strict=True
            ):
                if compressor.residual is not None:
                    parts = torch.split(compressor.residual, [p.numel() for p in bucket])
                    for name, parameter, part in zip(names, bucket, parts, strict=True):
                        kept[name] = part.view_as(parameter).clone()

    def add(self, worker: int, weight: float) -> None:
        for index, bucket in enumerate(self._buckets):
            parts = [
                torch.zeros(p.numel(), dtype=p.dtype) if p.grad is None else p.grad.reshape(-1)
                for p in bucket
            ]
            flat = torch.cat(parts).mul_(weight)
            self._flats[index].append((self._compressors[worker][index], flat))

    def finish(self) -> None:
        for index, bucket in enumerate(self._buckets):
            inputs, self._flats[index] = self._flats[index], []
            total = reference_sum(inputs)
            parts = torch.split(total, [p.numel() for p in bucket])
            for parameter, part in zip(bucket, parts, strict=True):
                parameter.grad = part.view_as(parameter).clone()
