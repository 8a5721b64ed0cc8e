"""The arithmetic of the codecs: flat gradients to small messages and back, with error feedback.

A *payload* is a short list of plain tensors that own their memory. Decoding uses only operations
that IEEE arithmetic fixes to the last bit (copies, single multiplications and additions), so the
same payload gives the same tensor on every machine, whatever its processor and thread count.
Everything lives in host memory.

NaN and infinite gradients are refused (`NotFinite`): a scale or a selection made from them would
turn a whole chunk, or every later message through the residual, into nonsense without a word.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from paceline.comm.shards import as_memory
from paceline.errors import PacelineError, StateError, UsageError, WireError
from paceline.specs.codec import Bf16, Codec, Fp16, Int8, OneBit, PowerSgd, Threshold, TopK

Payload = list[Tensor]
Shape = tuple[int, ...]

BLOCK = 1 << 16
"""Elements worked on at a time, so that intermediate results stay in the processor's cache."""
SAMPLE = 1 << 15
"""Elements from which topk guesses where its limit lies."""
MAX_INDEX = 2**31 - 1
RESIDUAL = "residual"
"""The name of the residual in exported state; the same for all codecs, so it outlives a change."""


class NotFinite(PacelineError):
    """A gradient that holds NaN or infinity, or is too large for the codec's number format."""


# ---- coders ----------------------------------------------------------------------------------


class Coder(ABC):
    """Makes payloads of flat tensors of one dtype, and tensors of payloads."""

    fixed_size = True
    """The sizes of a payload follow from the number of elements alone."""

    def __init__(self, dtype: torch.dtype) -> None:
        if dtype not in (torch.float32, torch.float64):
            raise UsageError(
                f"gradients of {_dtype_name(dtype)} cannot be compressed: "
                "train in float32 or float64, or leave the codec out"
            )
        self.dtype = dtype
        self.item = dtype.itemsize

    def encode(self, flat: Tensor) -> Payload:
        """The message for a flat contiguous tensor; raises NotFinite for NaN and infinity."""
        if flat.dtype != self.dtype or flat.dim() != 1 or flat.numel() > MAX_INDEX:
            raise UsageError(
                f"a codec for flat {_dtype_name(self.dtype)} tensors of at most {MAX_INDEX} "
                f"elements cannot take {tuple(flat.shape)} of {_dtype_name(flat.dtype)}"
            )
        check_finite(flat)
        return self._encode(flat)

    def decode(self, payload: Payload, out: Tensor) -> None:
        """Write what a payload says into `out`; raises WireError when it does not fit."""
        self._check(payload, out.numel())
        self._decode(payload, out)

    def add(self, payload: Payload, out: Tensor) -> None:
        """Add what a payload says to `out`; raises WireError when it does not fit."""
        decoded = torch.empty_like(out)
        self.decode(payload, decoded)
        out.add_(decoded)

    @abstractmethod
    def max_payload_bytes(self, numel: int) -> int:
        """No payload of so many elements is larger: what a receiver needs to make room for."""

    @abstractmethod
    def _encode(self, flat: Tensor) -> Payload: ...

    @abstractmethod
    def _check(self, payload: Payload, numel: int) -> None: ...

    @abstractmethod
    def _decode(self, payload: Payload, out: Tensor) -> None: ...

    def state(self) -> dict[str, Tensor]:
        """What the coder remembers from one message to the next, beside the residual."""
        return {}

    def load_state(self, state: dict[str, Tensor]) -> None:
        """Take back what `state` gave; raises StateError when it is of another coder."""
        if state:
            raise StateError(f"codec state of another codec: {sorted(state)[0]} is not known here")


def make_coder(spec: Codec, dtype: torch.dtype, shapes: Sequence[Shape] = ()) -> Coder:
    """The coder for a spec; powersgd needs the shapes of what it encodes, to decode none."""
    if isinstance(spec, Fp16):
        return Rounded(dtype, torch.float16)
    if isinstance(spec, Bf16):
        return Rounded(dtype, torch.bfloat16)
    if isinstance(spec, Int8):
        return Steps(dtype, spec.chunk)
    if isinstance(spec, OneBit):
        return Signs(dtype, spec.chunk)
    if isinstance(spec, TopK):
        return Largest(dtype, spec.ratio)
    if isinstance(spec, Threshold):
        return Above(dtype, spec.x)
    if isinstance(spec, PowerSgd):
        return LowRank(dtype, spec.rank, shapes)
    raise UsageError(f"there is no coder for {spec}")


class Rounded(Coder):
    """fp16 and bf16: each number rounded to a shorter one."""

    def __init__(self, dtype: torch.dtype, short: torch.dtype) -> None:
        super().__init__(dtype)
        self.short = short

    def max_payload_bytes(self, numel: int) -> int:
        return numel * self.short.itemsize

    def _encode(self, flat: Tensor) -> Payload:
        check_finite(flat, self.short)
        return [flat.to(self.short, copy=True)]

    def _check(self, payload: Payload, numel: int) -> None:
        _expect(payload, (self.short, (numel,)))

    def _decode(self, payload: Payload, out: Tensor) -> None:
        out.copy_(payload[0])


@dataclass(frozen=True)
class _Piece:
    """Some whole chunks, or the last one that is shorter: elements [start, stop) as rows."""

    start: int
    stop: int
    row: int
    rows: int

    def of(self, flat: Tensor) -> Tensor:
        return flat[self.start : self.stop].view(self.rows, -1)

    def of_rows(self, table: Tensor) -> Tensor:
        return table[self.row : self.row + self.rows]


class Chunked(Coder):
    """A codec with figures for each chunk of neighbouring elements, worked through in pieces."""

    def __init__(self, dtype: torch.dtype, chunk: int) -> None:
        super().__init__(dtype)
        self.chunk = chunk

    def _chunks(self, numel: int) -> int:
        return -(-numel // self.chunk)

    def _pieces(self, numel: int) -> Iterator[_Piece]:
        step = max(1, BLOCK // self.chunk)
        whole = numel // self.chunk
        for row in range(0, whole, step):
            rows = min(step, whole - row)
            yield _Piece(row * self.chunk, (row + rows) * self.chunk, row, rows)
        if whole * self.chunk < numel:
            yield _Piece(whole * self.chunk, numel, whole, 1)

    def _decode(self, payload: Payload, out: Tensor) -> None:
        for piece in self._pieces(out.numel()):
            self._fill(payload, piece, piece.of(out))

    def add(self, payload: Payload, out: Tensor) -> None:
        self._check(payload, out.numel())
        room = _Room(self.dtype)
        for piece in self._pieces(out.numel()):
            target = piece.of(out)
            decoded = room.like(target)
            self._fill(payload, piece, decoded)
            target.add_(decoded)

    @abstractmethod
    def _fill(self, payload: Payload, piece: _Piece, target: Tensor) -> None:
        """Write one piece of what a payload says."""


class Steps(Chunked):
    """int8: 127 even steps to either side, the outermost at the chunk's largest magnitude."""

    def max_payload_bytes(self, numel: int) -> int:
        return numel + self._chunks(numel) * self.item

    def _encode(self, flat: Tensor) -> Payload:
        scales = torch.empty(self._chunks(flat.numel()), dtype=self.dtype)
        steps = torch.empty(flat.numel(), dtype=torch.int8)
        room = _Room(self.dtype)
        tiny = torch.finfo(self.dtype).tiny
        for piece in self._pieces(flat.numel()):
            rows = piece.of(flat)
            scale = piece.of_rows(scales)
            torch.maximum(rows.amax(1), rows.amin(1).neg_(), out=scale)
            # Steps too small for full precision are sent as zero; the residual keeps the rest.
            scale.div_(127).masked_fill_(scale < tiny, 0.0)
            divisor = scale.masked_fill(scale == 0, math.inf).unsqueeze(1)
            piece.of(steps).copy_(torch.div(rows, divisor, out=room.like(rows)).round_())
        return [scales, steps]

    def _check(self, payload: Payload, numel: int) -> None:
        _expect(payload, (self.dtype, (self._chunks(numel),)), (torch.int8, (numel,)))

    def _fill(self, payload: Payload, piece: _Piece, target: Tensor) -> None:
        target.copy_(piece.of(payload[1])).mul_(piece.of_rows(payload[0]).unsqueeze(1))


class Signs(Chunked):
    """onebit: above zero or not, and the mean of either kind; a chunk's sum is kept."""

    def max_payload_bytes(self, numel: int) -> int:
        return -(-numel // 8) + self._chunks(numel) * 2 * self.item

    def _encode(self, flat: Tensor) -> Payload:
        means = torch.empty(self._chunks(flat.numel()), 2, dtype=self.dtype)
        bits = torch.empty(-(-flat.numel() // 8), dtype=torch.uint8)
        room, marks = _Room(self.dtype), _Room(torch.bool)
        for piece in self._pieces(flat.numel()):
            rows = piece.of(flat)
            above = marks.like(rows)
            # numpy compares and packs several times faster than torch does.
            np.greater(rows.numpy(), 0, out=above.numpy())
            packed = np.packbits(above.view(-1).numpy(), bitorder="little")
            self._bits_of(bits, piece).copy_(torch.from_numpy(packed))
            scratch = room.like(rows)
            count = scratch.copy_(above.view(torch.uint8)).sum(1)
            mean = piece.of_rows(means)
            mean[:, 0] = torch.clamp(rows, max=0, out=scratch).sum(1)
            mean[:, 0].div_((rows.shape[1] - count).clamp_(min=1))
            mean[:, 1] = torch.clamp(rows, min=0, out=scratch).sum(1)
            mean[:, 1].div_(count.clamp_(min=1))
        check_finite(means[:, 1] - means[:, 0])
        return [means, bits]

    def _bits_of(self, bits: Tensor, piece: _Piece) -> Tensor:
        return bits[piece.start // 8 : -(-piece.stop // 8)]

    def _check(self, payload: Payload, numel: int) -> None:
        _expect(
            payload,
            (self.dtype, (self._chunks(numel), 2)),
            (torch.uint8, (-(-numel // 8),)),
        )

    def _fill(self, payload: Payload, piece: _Piece, target: Tensor) -> None:
        packed = self._bits_of(payload[1], piece).numpy()
        loose = np.unpackbits(packed, count=target.numel(), bitorder="little")
        mean = piece.of_rows(payload[0])
        low, high = mean[:, :1], mean[:, 1:]
        # Ten times faster than a choice between the two, and as exact as the sums they come from.
        target.copy_(torch.from_numpy(loose).view_as(target)).mul_(high - low).add_(low)


class Sparse(Coder):
    """Some elements as they are, each with its place; the others are zero.

    Where places and values together would be larger than all elements, these are sent, those
    not selected as zero: a payload is never larger than the gradient.
    """

    def max_payload_bytes(self, numel: int) -> int:
        return numel * self.item

    def _pack(self, flat: Tensor, chosen: Tensor) -> Payload:
        values = flat.index_select(0, chosen)
        places = chosen.to(torch.int32)
        if self._is_dense(flat.numel(), chosen.numel()):
            values = torch.zeros_like(flat).index_copy_(0, chosen, values)
            places = places[:0].clone()
        return [values, places]

    def _is_dense(self, numel: int, chosen: int) -> bool:
        return chosen * (self.item + 4) >= numel * self.item

    def _check(self, payload: Payload, numel: int) -> None:
        count = payload[1].numel() if len(payload) == 2 else 0
        dense = count == 0 and payload[0].numel() == numel if payload else False
        _expect(payload, (self.dtype, (numel if dense else count,)), (torch.int32, (count,)))
        if count:
            low, high = torch.aminmax(payload[1])
            if int(low) < 0 or int(high) >= numel:
                raise WireError(f"a sparse gradient with a place outside its {numel} elements")

    def _decode(self, payload: Payload, out: Tensor) -> None:
        values, places = payload
        if values.numel() == out.numel() and not places.numel():
            out.copy_(values)
        else:
            out.zero_().index_add_(0, places, values)

    def add(self, payload: Payload, out: Tensor) -> None:
        self._check(payload, out.numel())
        values, places = payload
        if values.numel() == out.numel() and not places.numel():
            out.add_(values)
        else:
            out.index_add_(0, places, values)


class Largest(Sparse):
    """topk: so many elements of the largest magnitude; of equal ones those that come first."""

    def __init__(self, dtype: torch.dtype, ratio: float) -> None:
        super().__init__(dtype)
        self.ratio = ratio

    def count(self, numel: int) -> int:
        return min(numel, max(1, round(self.ratio * numel)))

    def max_payload_bytes(self, numel: int) -> int:
        return min(numel * self.item, self.count(numel) * (self.item + 4))

    def _encode(self, flat: Tensor) -> Payload:
        return self._pack(flat, find_largest(flat, self.count(flat.numel())))

    def _check(self, payload: Payload, numel: int) -> None:
        super()._check(payload, numel)
        count = self.count(numel)
        expected = 0 if self._is_dense(numel, count) else count
        _expect(payload[1:], (torch.int32, (expected,)))


class Above(Sparse):
    """threshold: every element of at least that magnitude, with its value.

    The values are sent as they are, not as plus or minus the threshold: what stays behind is then
    always below the threshold, for every element, while steps of a fixed size let the residual
    of an element with large gradients grow without bound and arrive long after its time.
    """

    fixed_size = False

    def __init__(self, dtype: torch.dtype, limit: float) -> None:
        super().__init__(dtype)
        self.limit = limit

    def _encode(self, flat: Tensor) -> Payload:
        return self._pack(flat, find_at_least(flat, self.limit))


def find_at_least(flat: Tensor, limit: float) -> Tensor:
    """Places of all elements of at least this magnitude, in order."""
    room = _Room(flat.dtype)
    found = []
    for start in range(0, flat.numel(), BLOCK):
        block = flat[start : start + BLOCK]
        magnitude = torch.abs(block, out=room.like(block)).numpy()
        places = torch.from_numpy(np.flatnonzero(magnitude >= limit))
        found.append(places.add_(start))
    return torch.cat(found) if found else torch.zeros(0, dtype=torch.int64)


def find_largest(flat: Tensor, count: int) -> Tensor:
    """Places of the `count` largest magnitudes, in order; of equal ones the first.

    Sorting out a few candidates is several times faster than partly sorting everything: a sample
    tells above which magnitude they lie. A sample that misleads costs time, not exactness.
    """
    places = _find_candidates(flat, count)
    magnitude = flat.index_select(0, places).abs_() if places is not None else flat.abs()
    if count == 0 or count == magnitude.numel():
        chosen = torch.arange(count)
    else:
        last = magnitude.kthvalue(magnitude.numel() - count + 1).values
        above = magnitude > last
        ties = torch.nonzero(magnitude == last).view(-1)
        above[ties[: count - int(above.count_nonzero())]] = True
        chosen = torch.nonzero(above).view(-1)
    return chosen if places is None else places.index_select(0, chosen)


def _find_candidates(flat: Tensor, count: int) -> Tensor | None:
    if flat.numel() < 4 * SAMPLE:
        return None
    # An odd stride does not keep step with the columns of a matrix.
    sample = flat[:: flat.numel() // SAMPLE | 1].abs()
    expected = count / flat.numel() * sample.numel()
    rank = math.ceil(expected + 4 * math.sqrt(expected) + 8)
    if rank >= sample.numel() // 2:
        return None
    limit = float(sample.kthvalue(sample.numel() - rank + 1).values)
    places = find_at_least(flat, limit)
    return places if places.numel() >= count else None


# ---- PowerSGD --------------------------------------------------------------------------------


@dataclass
class _Matrix:
    """A parameter at `start` of the flat buffer, seen as rows x columns, and its warm start."""

    start: int
    rows: int
    columns: int
    q: Tensor

    def of(self, flat: Tensor) -> Tensor:
        size = self.rows * self.columns
        return flat[self.start : self.start + size].view(self.rows, self.columns)

    def project(self, flat: Tensor) -> Tensor:
        return self.of(flat) @ orthonormal(self.q.t())

    @property
    def p_shape(self) -> Shape:
        return (self.rows, self.q.shape[0])


class LowRank(Coder):
    """powersgd (Vogels et al. 2019): a matrix M is sent as P Q, P = orth(M Qᵀ), Q = Pᵀ M.

    Q starts from that of the step before, which makes one round of the power method enough.
    Parameters of one dimension, and matrices that would not get smaller, are sent as they are.

    `encode` approximates this worker's own gradient. `reduce` approximates the sum over workers,
    whose factors are sums themselves.
    """

    def __init__(self, dtype: torch.dtype, rank: int, shapes: Sequence[Shape]) -> None:
        super().__init__(dtype)
        self.rank = rank
        self._segments: list[_Matrix | tuple[int, int]] = []
        """Matrices, and stretches [start, stop) that are sent as they are."""
        self.numel = 0
        for shape in shapes:
            self._append(shape)
        self._matrices = [s for s in self._segments if isinstance(s, _Matrix)]
        self._plain = [s for s in self._segments if not isinstance(s, _Matrix)]

    def _append(self, shape: Shape) -> None:
        size = math.prod(shape)
        start, self.numel = self.numel, self.numel + size
        rows = shape[0] if shape else 1
        columns = size // rows if rows else 0
        rank = min(self.rank, rows, columns)
        if len(shape) > 1 and rank * (rows + columns) < size:
            generator = torch.Generator().manual_seed(len(self._segments))
            q = torch.randn(rank, columns, dtype=self.dtype, generator=generator)
            self._segments.append(_Matrix(start, rows, columns, q))
        elif self._segments and not isinstance(self._segments[-1], _Matrix):
            self._segments[-1] = (self._segments[-1][0], self.numel)
        else:
            self._segments.append((start, self.numel))

    def max_payload_bytes(self, numel: int) -> int:
        return numel * self.item

    def _check_numel(self, flat: Tensor) -> None:
        if flat.numel() != self.numel:
            raise UsageError(
                f"powersgd was made for {self.numel} elements and got {flat.numel()}: "
                "give it the shapes of the parameters in the buffer"
            )

    def _encode(self, flat: Tensor) -> Payload:
        self._check_numel(flat)
        payload = []
        for segment in self._segments:
            if isinstance(segment, _Matrix):
                matrix = segment.of(flat)
                p = orthonormal(segment.project(flat)).contiguous()
                segment.q = p.t() @ matrix
                payload += [p, segment.q.clone()]
            else:
                payload.append(flat[segment[0] : segment[1]].clone())
        return payload

    def _check(self, payload: Payload, numel: int) -> None:
        """A payload says itself what is a factor: a receiver need not know the shapes."""
        total, parts = 0, iter(payload)
        for part in parts:
            size = part.numel()
            if part.dim() == 2:
                q = next(parts, part[:0])
                if q.dim() != 2 or q.dtype != self.dtype or q.shape[0] != part.shape[1]:
                    raise WireError("a low-rank gradient whose two factors do not fit")
                size = part.shape[0] * q.shape[1]
            if part.dtype != self.dtype or part.dim() not in (1, 2):
                raise WireError(f"a low-rank gradient with a part of {_describe(part)}")
            total += size
        if total != numel:
            raise WireError(f"a low-rank gradient of {total} elements, {numel} expected")

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
                multiply_out(part, q, out[start : start + size].view(shape))
            start += size

    # ---- the sum over workers, in steps so that the first exchange can go on meanwhile ----

    def project(self, flat: Tensor) -> Tensor:
        """What is summed first: all that is sent as it is, then every M Qᵀ."""
        self._check_numel(flat)
        check_finite(flat)
        parts = [flat[start:stop] for start, stop in self._plain]
        parts += [m.project(flat).reshape(-1) for m in self._matrices]
        return torch.cat(parts) if parts else flat.clone()

    def bases(self, first: Tensor) -> Tensor:
        """The part of the first sum that holds every P; `orthogonalize` works on it."""
        return first[sum(stop - start for start, stop in self._plain) :]

    def orthogonalize(self, first: Tensor) -> None:
        for p in self._split(self.bases(first), [m.p_shape for m in self._matrices]):
            p.copy_(orthonormal(p))

    def answer(self, flat: Tensor, first: Tensor) -> Tensor:
        """What is summed second: every Pᵀ M."""
        ps = self._split(self.bases(first), [m.p_shape for m in self._matrices])
        return torch.cat(
            [(p.t() @ m.of(flat)).view(-1) for m, p in zip(self._matrices, ps, strict=True)]
        )

    def leave(self, flat: Tensor, first: Tensor, own: Tensor, residual: Tensor) -> None:
        """What this worker's gradient has beyond what it put into the sum, into `residual`."""
        residual.zero_()
        for matrix, p, q in self._factors(first, own):
            torch.addmm(matrix.of(flat), p, q, alpha=-1, out=matrix.of(residual))

    def rebuild(self, first: Tensor, second: Tensor, out: Tensor) -> None:
        """The sum, from both exchanges; the second one is the next step's start."""
        at = 0
        for start, stop in self._plain:
            out[start:stop].copy_(first[at : at + stop - start])
            at += stop - start
        for matrix, p, q in self._factors(first, second):
            multiply_out(p, q, matrix.of(out))
            matrix.q = q.clone()

    def reduce(
        self,
        flat: Tensor,
        all_sum: Callable[[Tensor], None],
        from_first: Callable[[Tensor], None],
        feedback: Feedback | None = None,
    ) -> None:
        """Sum over workers in place, with two exchanges (and one to agree on P)."""
        if feedback is not None:
            feedback.compensate(flat)
        first = self.project(flat)
        all_sum(first)
        self.finish(flat, first, all_sum, from_first, feedback)

    def finish(
        self,
        flat: Tensor,
        first: Tensor,
        all_sum: Callable[[Tensor], None],
        from_first: Callable[[Tensor], None],
        feedback: Feedback | None,
    ) -> None:
        """What follows the first sum.

        Factorizations differ in the last bits between processors and thread counts: all workers
        take the first one's P, or their sums would drift apart.
        """
        if not self._matrices:  # All was sent as it is, and the first sum is the whole one.
            flat.copy_(first)
            return
        self.orthogonalize(first)
        from_first(self.bases(first))
        second = self.answer(flat, first)
        if feedback is not None:
            self.leave(flat, first, second, feedback.residual)
        all_sum(second)
        self.rebuild(first, second, flat)

    def _factors(self, first: Tensor, second: Tensor) -> list[tuple[_Matrix, Tensor, Tensor]]:
        ps = self._split(self.bases(first), [m.p_shape for m in self._matrices])
        qs = self._split(second, [tuple(m.q.shape) for m in self._matrices])
        return list(zip(self._matrices, ps, qs, strict=True))

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
            raise StateError(f"powersgd state of another model or rank: {odd} fits nothing")
        for name, q in expected.items():
            _check_like(state[name], q, f"powersgd state {name}")
        for index, matrix in enumerate(self._matrices):
            matrix.q = state[f"q/{index}"].clone()


def orthonormal(columns: Tensor) -> Tensor:
    """An orthonormal basis of as many columns, also where the columns depend on each other.

    A factor of zeros becomes unit vectors, so the power method never gets stuck at zero.
    """
    basis: Tensor = torch.linalg.qr(columns).Q
    return basis


def multiply_out(p: Tensor, q: Tensor, out: Tensor) -> None:
    """P Q, bit for bit the same everywhere, which a matrix product of the libraries is not."""
    if not p.shape[1]:
        out.zero_()
    room = _Room(out.dtype)
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


# ---- error feedback --------------------------------------------------------------------------


class Feedback:
    """What the messages of one flat buffer have left out so far."""

    def __init__(self, numel: int, dtype: torch.dtype) -> None:
        self.residual = torch.zeros(numel, dtype=dtype)

    def compensate(self, flat: Tensor) -> None:
        """Add to a gradient what the earlier messages lacked."""
        flat.add_(self.residual)

    def remember(self, flat: Tensor, decoded: Tensor) -> None:
        """Keep the difference between what was meant and what the message says.

        `decoded` may be the residual itself, which is then overwritten.
        """
        torch.sub(flat, decoded, out=self.residual)

    def export(self) -> Tensor:
        return self.residual.clone()

    def load(self, residual: Tensor) -> None:
        """Take back an exported residual; raises StateError when it is of another buffer."""
        _check_like(residual, self.residual, "the residual")
        self.residual.copy_(residual)


class Compressor:
    """A coder with the error feedback that its codec needs: what a sender keeps for a buffer."""

    def __init__(self, spec: Codec, shapes: Sequence[Shape], dtype: torch.dtype) -> None:
        self.numel = sum(math.prod(shape) for shape in shapes)
        self.coder = make_coder(spec, dtype, shapes)
        self.feedback = Feedback(self.numel, dtype) if spec.feedback else None

    def encode(self, flat: Tensor) -> Payload:
        """The message for a gradient, which becomes what was meant to be sent (gradient and
        residual). Raises NotFinite, and then leaves the residual as it was."""
        if self.feedback is None:
            return self.coder.encode(flat)
        self.feedback.compensate(flat)
        payload = self.coder.encode(flat)
        residual = self.feedback.residual
        self.coder.decode(payload, residual)
        self.feedback.remember(flat, residual)
        return payload

    def state(self) -> dict[str, Tensor]:
        """Named tensors (copies) with which another compressor goes on bit for bit."""
        kept = self.coder.state()
        if self.feedback is not None:
            kept[RESIDUAL] = self.feedback.export()
        return kept

    def load_state(self, state: dict[str, Tensor]) -> None:
        """Take back `state()`; raises StateError for that of another model or codec."""
        rest = dict(state)
        if self.feedback is not None:
            if RESIDUAL not in rest:
                raise StateError("codec state without a residual")
            self.feedback.load(rest.pop(RESIDUAL))
        self.coder.load_state(rest)


# ---- payloads as bytes -----------------------------------------------------------------------

WIRE_TYPES = {
    _name: getattr(torch, _name)
    for _name in ("float16", "bfloat16", "float32", "float64", "int8", "uint8", "int32")
}
MAX_DIMS = 2


def to_bytes(payload: Payload) -> tuple[list[list[Any]], list[memoryview]]:
    """A table of type, shape and size for a message's head, and the memory for its body."""
    table = [[_dtype_name(t.dtype), list(t.shape), t.numel() * t.element_size()] for t in payload]
    return table, [as_memory(t) for t in payload]


def from_bytes(table: Any, body: Tensor) -> Payload:
    """The payload in a message: views into its body where these lie evenly.

    Raises WireError unless the table is well formed and describes exactly the body's bytes.
    """
    if not isinstance(table, list | tuple):
        raise WireError("a payload whose table is not a list")
    described = [_read_entry(entry) for entry in table]
    total = sum(size for _, _, size in described)
    if total != body.numel():
        raise WireError(f"a payload of {total} bytes in a message of {body.numel()}")
    payload, at = [], 0
    for dtype, shape, size in described:
        part = body[at : at + size]
        if part.data_ptr() % dtype.itemsize or part.storage_offset() % dtype.itemsize:
            part = part.clone()
        payload.append(part.view(dtype).view(shape))
        at += size
    return payload


def _read_entry(entry: Any) -> tuple[torch.dtype, Shape, int]:
    if not isinstance(entry, list | tuple) or len(entry) != 3:
        raise WireError("a payload with an entry that is not type, shape, size")
    name, shape, size = entry
    if not isinstance(name, str) or name not in WIRE_TYPES:
        raise WireError(f"a payload of type {str(name)[:40]!r}")
    if not isinstance(shape, list | tuple) or len(shape) > MAX_DIMS:
        raise WireError(f"a payload tensor whose shape is not 0 to {MAX_DIMS} sizes")
    if not all(type(n) is int and n >= 0 for n in (*shape, size)):
        raise WireError("a payload tensor with a size that is not a whole number from 0")
    dtype: torch.dtype = WIRE_TYPES[name]
    if math.prod(shape) * dtype.itemsize != size:
        raise WireError(f"a payload tensor of {tuple(shape)} {name} in {size} bytes")
    return dtype, tuple(shape), size


# ---- helpers ---------------------------------------------------------------------------------


class _Room:
    """Memory for intermediate results, taken once and used for every block."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._flat = torch.empty(0, dtype=dtype)

    def like(self, target: Tensor) -> Tensor:
        if self._flat.numel() < target.numel():
            self._flat = torch.empty(target.numel(), dtype=self._flat.dtype)
        return self._flat[: target.numel()].view(target.shape)


def check_finite(flat: Tensor, short: torch.dtype | None = None) -> None:
    """Raise NotFinite for NaN, infinity, and what the shorter type cannot hold."""
    if not flat.numel():
        return
    low, high = (float(x) for x in torch.aminmax(flat))
    if not (math.isfinite(low) and math.isfinite(high)):
        raise NotFinite(
            "the gradient holds NaN or infinity, which no codec sends: "
            "lower the learning rate, or clip the gradients"
        )
    if short is not None and max(-low, high) > torch.finfo(short).max:
        raise NotFinite(
            f"the gradient reaches {max(-low, high):g}, {_dtype_name(short)} ends at "
            f"{torch.finfo(short).max:g}: use bf16 or another codec, or scale the loss down"
        )


def _expect(payload: Payload, *wanted: tuple[torch.dtype, Shape]) -> None:
    if [(t.dtype, tuple(t.shape)) for t in payload] != list(wanted):
        found = ", ".join(_describe(t) for t in payload) or "nothing"
        needed = ", ".join(f"{_dtype_name(d)} {s}" for d, s in wanted)
        raise WireError(f"a payload of {found[:200]}; {needed} expected")


def _check_like(given: Tensor, wanted: Tensor, what: str) -> None:
    if given.shape != wanted.shape or given.dtype != wanted.dtype:
        raise StateError(f"{what} is {_describe(given)}, {_describe(wanted)} expected")


def _describe(tensor: Tensor) -> str:
    return f"{_dtype_name(tensor.dtype)} {tuple(tensor.shape)}"


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
