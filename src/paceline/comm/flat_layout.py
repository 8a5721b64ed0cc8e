"""Layout of a model's parameters in one flat buffer, and its division among servers.

An element-wise optimizer lets a parameter be split between any two elements; otherwise shards
begin and end between parameters. The caller decides which (`strategies/optimizer_traits.py`).
"""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate

import torch

ALIGN_BYTES = 64


@dataclass(frozen=True)
class ParameterSlice:
    """Elements [start, stop) of a parameter, at byte `offset` of the buffer."""

    parameter: int
    start: int
    stop: int
    offset: int
    nbytes: int


@dataclass(frozen=True)
class ShardLayout:
    """Bytes [lo, hi) of the buffer, consisting of these slices."""

    lo: int
    hi: int
    slices: tuple[ParameterSlice, ...]


def as_byte_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a view of a contiguous tensor as bytes."""
    return tensor.detach().reshape(-1).view(torch.uint8)


def as_memoryview(tensor: torch.Tensor) -> memoryview:
    return as_byte_tensor(tensor).numpy().data


class FlatLayout:
    """The offset of each parameter in the flat buffer, and the bytes of each shard."""

    def __init__(
        self,
        parameters: list[torch.nn.Parameter],
        servers: int,
        *,
        elementwise: bool,
        shards_of: Callable[[int], int] | None = None,
    ) -> None:
        """`shards_of` returns the number of shards of a buffer of this size, at most `servers`."""
        self.parameters = parameters
        sizes = [-(-p.nbytes // ALIGN_BYTES) * ALIGN_BYTES for p in parameters]
        *self.offsets, self.total_bytes = accumulate(sizes, initial=0)
        used = servers if shards_of is None else shards_of(self.total_bytes)
        self.shards = self._cut(servers, used, elementwise)

    def _cut(self, servers: int, used: int, elementwise: bool) -> list[ShardLayout]:
        goal = self.total_bytes / used
        pieces: list[list[ParameterSlice]] = [[] for _ in range(servers)]
        for index, parameter in enumerate(self.parameters):
            item, count = parameter.element_size(), parameter.numel()
            offset, start = self.offsets[index], 0
            while start < count:
                shard = min(used - 1, int((offset + start * item) / goal))
                stop = count
                while elementwise and shard < used - 1:
                    until = int(((shard + 1) * goal - offset) / item) // ALIGN_BYTES * ALIGN_BYTES
                    if until > start:
                        stop = min(count, until)
                        break
                    shard += 1  # Less than a cache line is left in this shard.
                pieces[shard].append(
                    ParameterSlice(index, start, stop, offset + start * item, (stop - start) * item)
                )
                start = stop
        return [
            ShardLayout(s[0].offset, s[-1].offset + s[-1].nbytes, tuple(s))
            if s
            else ShardLayout(0, 0, ())
            for s in pieces
        ]

    def shapes_of(self, shard: ShardLayout) -> list[tuple[int, ...]]:
        """Shapes that cover a shard's bytes from end to end, the padding between them included.

        A parameter that is entirely in the shard keeps its shape; a part of one is flat.
        """
        shapes: list[tuple[int, ...]] = []
        ends = [*(after.offset for after in shard.slices[1:]), shard.hi]
        for piece, end in zip(shard.slices, ends, strict=False):
            parameter = self.parameters[piece.parameter]
            whole = piece.stop - piece.start == parameter.numel()
            shapes.append(tuple(parameter.shape) if whole else (piece.stop - piece.start,))
            gap = (end - piece.offset - piece.nbytes) // parameter.element_size()
            if gap:
                shapes.append((gap,))
        return shapes

    def new_buffer(self) -> torch.Tensor:
        return torch.zeros(self.total_bytes, dtype=torch.uint8)

    def views(self, buffer: torch.Tensor) -> list[torch.Tensor]:
        """Views of a buffer, one per parameter, with its dtype and shape."""
        return [
            buffer[offset : offset + p.nbytes].view(p.dtype).view_as(p)
            for p, offset in zip(self.parameters, self.offsets, strict=True)
        ]
