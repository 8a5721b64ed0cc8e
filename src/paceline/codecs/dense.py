"""Codecs that send every element in fewer bits: fp16, bf16, int8, onebit."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
import torch
from torch import Tensor

from paceline.codecs.base import (
    BLOCK,
    Coder,
    Payload,
    ScratchBuffer,
    Shape,
    check_finite,
    check_payload_count,
)
from paceline.codecs.spec import Bf16, Fp16, Int8, OneBit


class CastCoder(Coder):
    """fp16 and bf16: each number rounded to a shorter one."""

    reduction = "sum"

    def __init__(self, dtype: torch.dtype, short: torch.dtype) -> None:
        super().__init__(dtype)
        self.short = short

    @classmethod
    def from_spec(cls, spec: Fp16 | Bf16, dtype: torch.dtype, shapes: Sequence[Shape]) -> Self:
        return cls(dtype, getattr(torch, spec.short_type))

    def max_payload_bytes(self, numel: int) -> int:
        return numel * self.short.itemsize

    def _encode(self, flat: Tensor) -> Payload:
        check_finite(flat, self.short)
        return [flat.to(self.short, copy=True)]

    def _check(self, payload: Payload, numel: int) -> None:
        check_payload_count(payload, (self.short, (numel,)))

    def _decode(self, payload: Payload, out: Tensor) -> None:
        out.copy_(payload[0])


@dataclass(frozen=True)
class _ChunkRange:
    """Some whole chunks, or the last one that is shorter: elements [start, stop) as rows."""

    start: int
    stop: int
    row: int
    rows: int

    def of(self, flat: Tensor) -> Tensor:
        return flat[self.start : self.stop].view(self.rows, -1)

    def of_rows(self, table: Tensor) -> Tensor:
        return table[self.row : self.row + self.rows]


class ChunkedCoder(Coder):
    """A codec with figures for each chunk of neighbouring elements, worked through in pieces."""

    def __init__(self, dtype: torch.dtype, chunk: int) -> None:
        super().__init__(dtype)
        self.chunk = chunk

    @classmethod
    def from_spec(cls, spec: Int8 | OneBit, dtype: torch.dtype, shapes: Sequence[Shape]) -> Self:
        return cls(dtype, spec.chunk)

    def _chunks(self, numel: int) -> int:
        return -(-numel // self.chunk)

    def _pieces(self, numel: int) -> Iterator[_ChunkRange]:
        step = max(1, BLOCK // self.chunk)
        whole = numel // self.chunk
        for row in range(0, whole, step):
            rows = min(step, whole - row)
            yield _ChunkRange(row * self.chunk, (row + rows) * self.chunk, row, rows)
        if whole * self.chunk < numel:
            yield _ChunkRange(whole * self.chunk, numel, whole, 1)

    def _decode(self, payload: Payload, out: Tensor) -> None:
        for piece in self._pieces(out.numel()):
            self._fill(payload, piece, piece.of(out))

    def add(self, payload: Payload, out: Tensor) -> None:
        self._check(payload, out.numel())
        room = ScratchBuffer(self.dtype)
        for piece in self._pieces(out.numel()):
            target = piece.of(out)
            decoded = room.like(target)
            self._fill(payload, piece, decoded)
            target.add_(decoded)

    @abstractmethod
    def _fill(self, payload: Payload, piece: _ChunkRange, target: Tensor) -> None:
        """Write one piece of what a payload says."""


class Int8Coder(ChunkedCoder):
    """int8: 127 even steps to either side, the outermost at the chunk's largest magnitude."""

    def max_payload_bytes(self, numel: int) -> int:
        return numel + self._chunks(numel) * self.item

    def _encode(self, flat: Tensor) -> Payload:
        scales = torch.empty(self._chunks(flat.numel()), dtype=self.dtype)
        steps = torch.empty(flat.numel(), dtype=torch.int8)
        room = ScratchBuffer(self.dtype)
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
        check_payload_count(payload, (self.dtype, (self._chunks(numel),)), (torch.int8, (numel,)))

    def _fill(self, payload: Payload, piece: _ChunkRange, target: Tensor) -> None:
        target.copy_(piece.of(payload[1])).mul_(piece.of_rows(payload[0]).unsqueeze(1))


class OneBitCoder(ChunkedCoder):
    """onebit: above zero or not, and the mean of either kind; a chunk's sum is kept."""

    def max_payload_bytes(self, numel: int) -> int:
        return -(-numel // 8) + self._chunks(numel) * 2 * self.item

    def _encode(self, flat: Tensor) -> Payload:
        means = torch.empty(self._chunks(flat.numel()), 2, dtype=self.dtype)
        bits = torch.empty(-(-flat.numel() // 8), dtype=torch.uint8)
        room, marks = ScratchBuffer(self.dtype), ScratchBuffer(torch.bool)
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

    def _bits_of(self, bits: Tensor, piece: _ChunkRange) -> Tensor:
        return bits[piece.start // 8 : -(-piece.stop // 8)]

    def _check(self, payload: Payload, numel: int) -> None:
        check_payload_count(
            payload,
            (self.dtype, (self._chunks(numel), 2)),
            (torch.uint8, (-(-numel // 8),)),
        )

    def _fill(self, payload: Payload, piece: _ChunkRange, target: Tensor) -> None:
        packed = self._bits_of(payload[1], piece).numpy()
        loose = np.unpackbits(packed, count=target.numel(), bitorder="little")
        mean = piece.of_rows(payload[0])
        low, high = mean[:, :1], mean[:, 1:]
        # Ten times faster than a choice between the two, and as exact as the sums they come from.
        target.copy_(torch.from_numpy(loose).view_as(target)).mul_(high - low).add_(low)
