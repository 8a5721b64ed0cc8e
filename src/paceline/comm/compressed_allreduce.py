"""All-reduce of gradients that are compressed by a codec.

torch's communication hooks (torch.distributed.algorithms.ddp_comm_hooks) are not used: they require
DistributedDataParallel, average with equal weights although shares may differ in size, and keep
residuals inside the hook, where checkpoints cannot save them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.codecs.base import Payload, Shape, check_finite
from paceline.codecs.compressor import Compressor
from paceline.codecs.payload import from_bytes, to_bytes
from paceline.codecs.powersgd import PowerSgdCoder
from paceline.codecs.spec import Codec
from paceline.comm.flat_layout import as_byte_tensor
from paceline.comm.process_group import CollectiveGroup
from paceline.errors import UsageError


class CompressedAllReduce:
    """Sums the flat gradients of one bucket over a group, also compressing in a group of one.

    The result is bitwise equal on all workers. `begin` starts the exchange and `finish` completes
    it; the buffer must not be used in between. All workers must begin and finish their buckets in
    the same order. A worker that raises (NonFiniteGradient) must exit, so that the others notice
    its closed connections.
    """

    def __init__(
        self, spec: Codec, shapes: Sequence[Shape], dtype: torch.dtype, group: CollectiveGroup
    ) -> None:
        self._compressor = Compressor(spec, shapes, dtype)
        self._flat: Tensor | None = None
        reduction = _REDUCTIONS[self._compressor.coder.reduction]
        self._reduction = reduction(self._compressor, group)
        self.bytes_before = 0
        """Bytes that this worker would have passed to the collectives without a codec."""

    @property
    def bytes_sent(self) -> int:
        """Bytes that this worker passed to the collectives (their traffic depends on the group)."""
        return self._reduction.bytes_sent

    def run(self, flat: Tensor) -> None:
        """Replaces this worker's weighted gradient with the sum over all workers."""
        self.begin(flat)
        self.finish()

    def begin(self, flat: Tensor) -> None:
        """Compresses and starts sending. Raises NonFiniteGradient before anything is sent."""
        numel = self._compressor.numel
        if flat.shape != (numel,) or not flat.is_contiguous():
            raise UsageError(
                f"compressed all-reduce: expected {numel} elements, got shape {tuple(flat.shape)}"
            )
        if self._flat is not None:
            raise UsageError("compressed all-reduce: begin() was called twice; call finish() first")
        self._reduction.begin(flat)
        self._flat = flat
        self.bytes_before += flat.numel() * flat.element_size()

    def finish(self) -> None:
        """Waits for the other workers and writes the sum. Raises RuntimeError if one is lost."""
        if self._flat is None:
            raise UsageError("compressed all-reduce: finish() was called before begin()")
        flat, self._flat = self._flat, None
        self._reduction.finish(flat)

    def state(self) -> dict[str, Tensor]:
        """Returns copies of residual and warm start; must be called between two sums."""
        return self._compressor.state()

    def load_state(self, state: dict[str, Tensor]) -> None:
        """Continues from `state()` bit for bit; raises StateError for that of another model."""
        self._compressor.load_state(state)


class _Reduction(ABC):
    """Algorithm that sums payloads over a group."""

    def __init__(self, compressor: Compressor, group: CollectiveGroup) -> None:
        self.compressor = compressor
        self.group = group
        self.bytes_sent = 0
        self._work: dist.Work | None = None

    @abstractmethod
    def begin(self, flat: Tensor) -> None: ...

    @abstractmethod
    def finish(self, flat: Tensor) -> None: ...

    def _sum(self, tensor: Tensor) -> None:
        self._count(tensor)
        self.group.all_reduce(tensor)

    def _begin_sum(self, tensor: Tensor) -> None:
        self._count(tensor)
        self._work = self.group.all_reduce_async(tensor)

    def _begin_gather(self, mine: Tensor) -> list[Tensor]:
        """The tensors of all workers, all of one size; complete only after `_wait`."""
        self._count(mine)
        if self.group.size == 1:
            return [mine]
        theirs = [torch.empty_like(mine) for _ in range(self.group.size)]
        self._work = dist.all_gather(theirs, mine, async_op=True)
        return theirs

    def _wait(self) -> None:
        if self._work is not None:
            self._work.wait()
            self._work = None

    def _count(self, tensor: Tensor) -> None:
        self.bytes_sent += tensor.numel() * tensor.element_size()


class _SumReduction(_Reduction):
    """Half-precision numbers, added by the all-reduce itself (Gloo supports fp16 and bf16)."""

    def __init__(self, compressor: Compressor, group: CollectiveGroup) -> None:
        super().__init__(compressor, group)
        self._short = torch.empty(0)

    def begin(self, flat: Tensor) -> None:
        (self._short,) = self.compressor.encode(flat)
        self._begin_sum(self._short)

    def finish(self, flat: Tensor) -> None:
        self._wait()
        flat.copy_(self._short)
        # The sum may exceed fp16's range although no part did; all workers detect it equally.
        check_finite(flat)


class _GatherReduction(_Reduction):
    """All workers receive every payload, and add them in the order of the ranks."""

    def __init__(self, compressor: Compressor, group: CollectiveGroup) -> None:
        super().__init__(compressor, group)
        self._payload: Payload = []
        self._gathered: list[Tensor] = []

    def begin(self, flat: Tensor) -> None:
        self._payload = self.compressor.encode(flat)
        if self.compressor.coder.fixed_size:
            self._gathered = self._begin_gather(_join(self._payload))
        else:
            counts = [t.numel() for t in self._payload]
            self._gathered = self._begin_gather(torch.tensor(counts))

    def finish(self, flat: Tensor) -> None:
        coder = self.compressor.coder
        payloads = self._receive()
        coder.decode(payloads[0], flat)
        for payload in payloads[1:]:
            coder.add(payload, flat)
        self._payload, self._gathered = [], []

    def _receive(self) -> list[Payload]:
        self._wait()
        table, _ = to_bytes(self._payload)
        if self.compressor.coder.fixed_size:
            return [from_bytes(table, body) for body in self._gathered]
        # The sizes came first; all workers now send as much as the largest payload.
        tables = [_resize(table, counts.tolist()) for counts in self._gathered]
        sizes = [sum(size for _, _, size in one) for one in tables]
        padded = torch.zeros(max(sizes), dtype=torch.uint8)
        mine = _join(self._payload)
        padded[: mine.numel()] = mine
        bodies = self._begin_gather(padded)
        self._wait()
        return [
            from_bytes(table, body[:size])
            for table, body, size in zip(tables, bodies, sizes, strict=True)
        ]


class _LowRankReduction(_Reduction):
    """PowerSGD: two sums of low-rank factors."""

    def __init__(self, compressor: Compressor, group: CollectiveGroup) -> None:
        super().__init__(compressor, group)
        assert isinstance(compressor.coder, PowerSgdCoder)
        self._coder = compressor.coder
        self._first = torch.empty(0)

    def begin(self, flat: Tensor) -> None:
        if self.compressor.feedback is not None:
            self.compressor.feedback.compensate(flat)
        self._first = self._coder.compute_p(flat)
        self._begin_sum(self._first)

    def finish(self, flat: Tensor) -> None:
        self._wait()
        self._coder.finish(flat, self._first, self._sum, self._from_first, self.compressor.feedback)

    def _from_first(self, tensor: Tensor) -> None:
        if self.group.rank == 0 and self.group.size > 1:
            self._count(tensor)
        self.group.broadcast(tensor)


_REDUCTIONS: dict[str, type[_Reduction]] = {
    "sum": _SumReduction,
    "gather": _GatherReduction,
    "low_rank": _LowRankReduction,
}


def _join(payload: Payload) -> Tensor:
    return torch.cat([as_byte_tensor(t) for t in payload])


def _resize(table: list[list[object]], counts: list[int]) -> list[tuple[str, list[int], int]]:
    """Returns the table of a payload with the same types and other lengths."""
    sized = []
    for (name, _, _), count in zip(table, counts, strict=True):
        item = getattr(torch, str(name)).itemsize
        sized.append((str(name), [count], count * item))
    return sized
