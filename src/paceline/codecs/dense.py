"""Codecs that send every element in fewer bits: fp16, bf16, int8, onebit."""

import math
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
import torch
from torch import Tensor

from paceline.codecs.base import BLOCK, Coder, Payload, ScratchBuffer, Shape, check_finite
from paceline.codecs.spec import Bf16, Fp16


class CastCoder(Coder):
    """fp16 and bf16: each element rounded to half precision."""

    reduction = "sum"

    def __init__(self, dtype: torch.dtype, short: torch.dtype) -> None:
        super().__init__(dtype)
        self.short = short

    @classmethod
    def from_spec(cls, spec: Fp16 | Bf16, dtype: torch.dtype, shapes: Sequence[Shape]) -> Self:
        return cls(dtype, getattr(torch, spec.short_type))

    def _layout(self, numel: int) -> list[tuple[torch.dtype, Shape]]:
        return [(self.short, (numel,))]

    def _encode(self, flat: Tensor) -> Payload:
        check_finite(flat, self.short)
        return [flat.to(self.short, copy=True)]

    def _decode(self, payload: Payload, out: Tensor) -> None:
        out.copy_(payload[0])


@dataclass(frozen=True)
class _ChunkRange:
    """Several full chunks, or the shorter last one: elements [start, stop) as rows."""

    start: int
    stop: int
    row: int
    rows: int

    def of(self, flat: Tensor) -> Tensor:
        return flat[self.start : self.stop].view(self.rows, -1)

    def of_rows(self, table: Tensor) -> Tensor:
        return table[self.row : self.row + self.rows]


class ChunkedCoder(Coder):
    """A codec with parameters per chunk of adjacent elements, processed block by block."""

    def __init__(self, dtype: torch.dtype, chunk: int) -> None:
        super().__init__(dtype)
        self.chunk = chunk

    def _chunks(self, numel: int) -> int:
        return -(-numel // self.chunk)

    def _new_payload(self, numel: int) -> Payload:
        return [torch.empty(shape, dtype=dtype) for dtype, shape in self._layout(numel)]

    def _blocks(self, numel: int) -> Iterator[_ChunkRange]:
        step = max(1, BLOCK // self.chunk)
        full = numel // self.chunk
        for row in range(0, full, step):
            rows = min(step, full - row)
            yield _ChunkRange(row * self.chunk, (row + rows) * self.chunk, row, rows)
        if full * self.chunk < numel:
            yield _ChunkRange(full * self.chunk, numel, full, 1)

    def _decode(self, payload: Payload, out: Tensor) -> None:
        for block in self._blocks(out.numel()):
            self._fill(payload, block, block.of(out))

    def add(self, payload: Payload, out: Tensor) -> None:
        self._check(payload, out.numel())
        scratch_buffer = ScratchBuffer(self.dtype)
        for block in self._blocks(out.numel()):
            target = block.of(out)
            decoded = scratch_buffer.like(target)
            self._fill(payload, block, decoded)
            target.add_(decoded)

    @abstractmethod
    def _fill(self, payload: Payload, block: _ChunkRange, target: Tensor) -> None:
        """Decodes one block of a payload."""


class Int8Coder(ChunkedCoder):
    """int8: 127 equal steps in each direction, up to the chunk's largest magnitude."""

    def _layout(self, numel: int) -> list[tuple[torch.dtype, Shape]]:
        return [(self.dtype, (self._chunks(numel),)), (torch.int8, (numel,))]

    def _encode(self, flat: Tensor) -> Payload:
        scales, steps = self._new_payload(flat.numel())
        scratch_buffer = ScratchBuffer(self.dtype)
        tiny = torch.finfo(self.dtype).tiny
        for block in self._blocks(flat.numel()):
            rows = block.of(flat)
            scale = block.of_rows(scales)
            torch.maximum(rows.amax(1), rows.amin(1).neg_(), out=scale)
            # Steps too small for full precision are sent as zero; the residual keeps them.
            scale.div_(127).masked_fill_(scale < tiny, 0.0)
            divisor = scale.masked_fill(scale == 0, math.inf).unsqueeze(1)
            block.of(steps).copy_(torch.div(rows, divisor, out=scratch_buffer.like(rows)).round_())
        return [scales, steps]

    def _fill(self, payload: Payload, block: _ChunkRange, target: Tensor) -> None:
        target.copy_(block.of(payload[1])).mul_(block.of_rows(payload[0]).unsqueeze(1))


class OneBitCoder(ChunkedCoder):
    """onebit: the sign of each element and the mean per sign; preserves the sum of a chunk."""

    def _layout(self, numel: int) -> list[tuple[torch.dtype, Shape]]:
        return [(self.dtype, (self._chunks(numel), 2)), (torch.uint8, (-(-numel // 8),))]

    def _encode(self, flat: Tensor) -> Payload:
        means, bits = self._new_payload(flat.numel())
        scratch_buffer, marks = ScratchBuffer(self.dtype), ScratchBuffer(torch.bool)
        for block in self._blocks(flat.numel()):
            rows = block.of(flat)
            above = marks.like(rows)
            # numpy compares and packs several times faster than torch.
            np.greater(rows.numpy(), 0, out=above.numpy())
            packed = np.packbits(above.view(-1).numpy(), bitorder="little")
            self._bits_of(bits, block).copy_(torch.from_numpy(packed))
            scratch = scratch_buffer.like(rows)
            count = scratch.copy_(above.view(torch.uint8)).sum(1)
            mean = block.of_rows(means)
            mean[:, 0] = torch.clamp(rows, max=0, out=scratch).sum(1)
            mean[:, 0].div_((rows.shape[1] - count).clamp_(min=1))
            mean[:, 1] = torch.clamp(rows, min=0, out=scratch).sum(1)
            mean[:, 1].div_(count.clamp_(min=1))
        check_finite(means[:, 1] - means[:, 0])
        return [means, bits]

    def _bits_of(self, bits: Tensor, block: _ChunkRange) -> Tensor:
        return bits[block.start // 8 : -(-block.stop // 8)]

    def _fill(self, payload: Payload, block: _ChunkRange, target: Tensor) -> None:
        packed = self._bits_of(payload[1], block).numpy()
        loose = np.unpackbits(packed, count=target.numel(), bitorder="little")
        mean = block.of_rows(payload[0])
        low, high = mean[:, :1], mean[:, 1:]
        # Ten times faster than torch.where, and as exact as the sums.
        target.copy_(torch.from_numpy(loose).view_as(target)).mul_(high - low).add_(low)
