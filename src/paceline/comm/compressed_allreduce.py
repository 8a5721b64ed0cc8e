"""All-reduce of gradients that are compressed by a codec.

torch's communication hooks (torch.distributed.algorithms.ddp_comm_hooks) are not used: they require
DistributedDataParallel, average with equal weights although shares may differ in size, and keep
residuals inside the hook, where checkpoints cannot save them.
"""

from collections.abc import Iterator, Sequence
from itertools import chain

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.codecs.base import Shape, check_finite, split_body
from paceline.codecs.compressor import Compressor
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
        self.compressor = Compressor(spec, shapes, dtype)
        """Its state may be read and loaded between two sums."""
        self._group = group
        reductions = {
            "sum": self._reduce_sum,
            "gather": self._reduce_gather,
            "low_rank": self._reduce_low_rank,
        }
        self._reduce = reductions[self.compressor.coder.reduction]
        self._pending: Iterator[dist.Work | None] | None = None
        self.bytes_sent = 0
        """Bytes that this worker passed to the collectives (their traffic depends on the group)."""

    def begin(self, flat: Tensor) -> None:
        """Compresses and starts sending. Raises NonFiniteGradient before anything is sent."""
        numel = self.compressor.numel
        if flat.shape != (numel,) or not flat.is_contiguous():
            raise UsageError(
                f"compressed all-reduce: expected {numel} elements, got shape {tuple(flat.shape)}"
            )
        if self._pending is not None:
            raise UsageError("compressed all-reduce: begin() was called twice; call finish() first")
        works = self._reduce(flat)
        self._pending = chain([next(works)], works)

    def finish(self) -> None:
        """Waits for the other workers and writes the sum. Raises RuntimeError if one is lost."""
        if self._pending is None:
            raise UsageError("compressed all-reduce: finish() was called before begin()")
        works, self._pending = self._pending, None
        for work in works:
            if work is not None:
                work.wait()

    # ---- reductions: each starts a collective, yields until it is complete, and so on --------

    def _reduce_sum(self, flat: Tensor) -> Iterator[dist.Work | None]:
        """Half-precision numbers, added by the all-reduce itself (Gloo supports fp16 and bf16)."""
        (short,) = self.compressor.encode(flat)
        yield self._start_sum(short)
        flat.copy_(short)
        # The sum may exceed fp16's range although no part did; all workers detect it equally.
        check_finite(flat)

    def _reduce_gather(self, flat: Tensor) -> Iterator[dist.Work | None]:
        """All workers receive every payload, and add them in the order of the ranks."""
        coder = self.compressor.coder
        payload = self.compressor.encode(flat)
        dtypes = [t.dtype for t in payload]
        shapes: list[list[Shape]] = [[tuple(t.shape) for t in payload]] * self._group.size
        body = [as_byte_tensor(t) for t in payload]
        if not coder.fixed_size:
            # The sizes come first; all workers then send as much as the largest payload.
            counts, work = self._start_gather(torch.tensor([t.numel() for t in payload]))
            yield work
            shapes = [[(n,) for n in one.tolist()] for one in counts]
            items = torch.tensor([dtype.itemsize for dtype in dtypes])
            largest = max(int((one * items).sum()) for one in counts)
            body.append(torch.zeros(largest - sum(map(len, body)), dtype=torch.uint8))
        bodies, work = self._start_gather(torch.cat(body))
        yield work
        for rank, (theirs, sizes) in enumerate(zip(bodies, shapes, strict=True)):
            parts = split_body(theirs, zip(dtypes, sizes, strict=True))
            if rank == 0:
                coder.decode(parts, flat)
            else:
                coder.add(parts, flat)

    def _reduce_low_rank(self, flat: Tensor) -> Iterator[dist.Work | None]:
        """PowerSGD: two sums of low-rank factors."""
        coder = self.compressor.coder
        assert isinstance(coder, PowerSgdCoder)
        for collective, tensor in coder.reduce(flat, self.compressor.residual):
            if collective == "sum":
                yield self._start_sum(tensor)
                continue
            if self._group.rank == 0 and self._group.size > 1:
                self.bytes_sent += tensor.nbytes
            self._group.broadcast(tensor)

    def _start_sum(self, tensor: Tensor) -> dist.Work | None:
        self.bytes_sent += tensor.nbytes
        return self._group.all_reduce_async(tensor)

    def _start_gather(self, mine: Tensor) -> tuple[list[Tensor], dist.Work | None]:
        """Returns the tensors of all workers, all of one size; complete after `wait()`."""
        self.bytes_sent += mine.nbytes
        if self._group.size == 1:
            return [mine], None
        theirs = [torch.empty_like(mine) for _ in range(self._group.size)]
        return theirs, dist.all_gather(theirs, mine, async_op=True)
