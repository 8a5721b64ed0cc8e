"""PowerSGD: matrices as products of two low-rank factors."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, Self

import torch
from torch import Tensor

from paceline.codecs.base import (
    BLOCK,
    Coder,
    Payload,
    ScratchBuffer,
    Shape,
    check_finite,
    check_tensor,
    describe_tensor,
)
from paceline.codecs.spec import PowerSgd
from paceline.errors import StateError, UsageError, WireError


@dataclass
class _MatrixFactors:
    """A parameter at `start` of the flat buffer as rows x columns, and its warm start."""

    start: int
    rows: int
    columns: int
    q: Tensor

    def of(self, flat: Tensor) -> Tensor:
        size = self.rows * self.columns
        return flat[self.start : self.start + size].view(self.rows, self.columns)

    def project(self, flat: Tensor) -> Tensor:
        return self.of(flat) @ orthonormal(self.q.t())


class PowerSgdCoder(Coder):
    """powersgd (Vogels et al. 2019): a matrix M is sent as P Q, P = orth(M Qᵀ), Q = Pᵀ M.

    Q starts from that of the step before, which makes one round of the power method enough.
    Parameters of one dimension, and matrices that would not get smaller, are sent as they are.

    `encode` approximates this worker's own gradient. `reduce` approximates the sum over workers,
    whose factors are sums themselves.
    """

    reduction = "low_rank"

    def __init__(self, dtype: torch.dtype, rank: int, shapes: Sequence[Shape]) -> None:
        super().__init__(dtype)
        self.rank = rank
        self._segments: list[_MatrixFactors | tuple[int, int]] = []
        """Matrices, and ranges [start, stop) that are sent uncompressed."""
        self.numel = 0
        for shape in shapes:
            self._append(shape)
        self._matrices = [s for s in self._segments if isinstance(s, _MatrixFactors)]
        self._plain = [s for s in self._segments if not isinstance(s, _MatrixFactors)]

    @classmethod
    def from_spec(cls, spec: PowerSgd, dtype: torch.dtype, shapes: Sequence[Shape]) -> Self:
        return cls(dtype, spec.rank, shapes)

    def _append(self, shape: Shape) -> None:
        size = math.prod(shape)
        start, self.numel = self.numel, self.numel + size
        rows = shape[0] if shape else 1
        columns = size // rows if rows else 0
        rank = min(self.rank, rows, columns)
        if len(shape) > 1 and rank * (rows + columns) < size:
            generator = torch.Generator().manual_seed(len(self._segments))
            q = torch.randn(rank, columns, dtype=self.dtype, generator=generator)
            self._segments.append(_MatrixFactors(start, rows, columns, q))
        elif self._segments and not isinstance(self._segments[-1], _MatrixFactors):
            self._segments[-1] = (self._segments[-1][0], self.numel)
        else:
            self._segments.append((start, self.numel))

    def _check_numel(self, flat: Tensor) -> None:
        if flat.numel() != self.numel:
            raise UsageError(
                f"powersgd was created for {self.numel} elements, got {flat.numel()}; "
                "pass the shapes of the parameters in the buffer"
            )

    def _encode(self, flat: Tensor) -> Payload:
        self._check_numel(flat)
        payload = []
        for segment in self._segments:
            if isinstance(segment, _MatrixFactors):
                matrix = segment.of(flat)
                p = orthonormal(segment.project(flat)).contiguous()
                segment.q = p.t() @ matrix
                payload += [p, segment.q.clone()]
            else:
                payload.append(flat[segment[0] : segment[1]].clone())
        return payload

    def _check(self, payload: Payload, numel: int) -> None:
        """Checks a payload, which marks its factors itself, so the receiver needs no shapes."""
        total, parts = 0, iter(payload)
        for part in parts:
            size = part.numel()
            if part.dim() == 2:
                q = next(parts, part[:0])
                if q.dim() != 2 or q.dtype != self.dtype or q.shape[0] != part.shape[1]:
                    raise WireError(
                        "invalid low-rank gradient: the shapes of its factors do not match"
                    )
                size = part.shape[0] * q.shape[1]
            if part.dtype != self.dtype or part.dim() not in (1, 2):
                raise WireError(
                    f"invalid low-rank gradient: unexpected part {describe_tensor(part)}"
                )
            total += size
        if total != numel:
            raise WireError(f"invalid low-rank gradient: {total} elements, expected {numel}")

    def _decode(self, payload: Payload, out: Tensor) -> None:
        start, parts = 0, iter(payload)
        for part in parts:
            if part.dim() == 1:
                size = part.numel()
                out[start : start + size].copy_(part)
            else:
                q = next(parts)
                size = part.shape[0] * q.shape[1]
                shape = (part.shape[0], q.shape[1])
                deterministic_matmul(part, q, out[start : start + size].view(shape))
            start += size

    def reduce(
        self, flat: Tensor, residual: Tensor | None
    ) -> Iterator[tuple[Literal["sum", "broadcast"], Tensor]]:
        """Replaces the gradient with an approximation of the sum over workers.

        Every yielded tensor must be replaced with its sum over all workers ("sum"), or with that
        of the first worker ("broadcast"), before the generator resumes. The first sum consists of
        all that is sent uncompressed, then every P = M Qᵀ; the second one of every Q = Pᵀ M.
        """
        if residual is not None:
            flat.add_(residual)
        self._check_numel(flat)
        check_finite(flat)
        plain = [flat[start:stop] for start, stop in self._plain]
        projected = [m.project(flat).reshape(-1) for m in self._matrices]
        first = torch.cat([*plain, *projected]) if self._segments else flat.clone()
        yield "sum", first
        if not self._matrices:  # Everything was sent uncompressed: the first sum is complete.
            flat.copy_(first)
            return
        exact, factors = torch.split(first, [sum(map(len, plain)), sum(map(len, projected))])
        ps = self._split(factors, [(m.rows, len(m.q)) for m in self._matrices])
        for p in ps:
            p.copy_(orthonormal(p))
        # Factorizations differ in the last bits between processors and thread counts: all workers
        # take the first one's P, or their sums would drift apart.
        yield "broadcast", factors
        pairs = list(zip(self._matrices, ps, strict=True))
        second = torch.cat([(p.t() @ m.of(flat)).view(-1) for m, p in pairs])
        qs = self._split(second, [tuple(m.q.shape) for m in self._matrices])
        if residual is not None:  # What this worker's part of the sum omits.
            residual.zero_()
            for (matrix, p), q in zip(pairs, qs, strict=True):
                torch.addmm(matrix.of(flat), p, q, alpha=-1, out=matrix.of(residual))
        yield "sum", second
        for target, part in zip(plain, torch.split(exact, [len(t) for t in plain]), strict=True):
            target.copy_(part)
        for (matrix, p), q in zip(pairs, qs, strict=True):
            deterministic_matmul(p, q, matrix.of(flat))
            matrix.q = q.clone()

    @staticmethod
    def _split(flat: Tensor, shapes: list[Shape]) -> list[Tensor]:
        parts = torch.split(flat, [math.prod(shape) for shape in shapes])
        return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]

    def state(self) -> dict[str, Tensor]:
        return {f"q/{i}": m.q.clone() for i, m in enumerate(self._matrices)}

    def load_state(self, state: dict[str, Tensor]) -> None:
        expected = {f"q/{i}": m.q for i, m in enumerate(self._matrices)}
        if sorted(state) != sorted(expected):
            odd = sorted(set(state).symmetric_difference(expected))[0]
            raise StateError(
                f"the powersgd state belongs to another model or rank: {odd} does not match"
            )
        for name, q in expected.items():
            check_tensor(state[name], q, f"powersgd state {name}")
        for index, matrix in enumerate(self._matrices):
            matrix.q = state[f"q/{index}"].clone()


def orthonormal(columns: Tensor) -> Tensor:
    """Returns an orthonormal basis with the same number of columns, also for dependent columns.

    A zero factor becomes unit vectors, so that the power method never gets stuck at zero.
    """
    basis: Tensor = torch.linalg.qr(columns).Q
    return basis


def deterministic_matmul(p: Tensor, q: Tensor, out: Tensor) -> None:
    """Computes P Q with bitwise equal results on all machines, unlike BLAS."""
    if not p.shape[1]:
        out.zero_()
    room = ScratchBuffer(out.dtype)
    step = max(1, BLOCK // max(1, out.shape[1]))
    for start in range(0, out.shape[0], step):
        target = out[start : start + step]
        down = p[start : start + step]
        for k in range(p.shape[1]):
            if k == 0:
                torch.mul(down[:, :1], q[:1], out=target)
            else:
                product = room.like(target)
                torch.mul(down[:, k : k + 1], q[k : k + 1], out=product)
                target.add_(product)
