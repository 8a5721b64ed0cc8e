"""Gradients grouped into buckets, each summed over all workers while backward continues.

The layout is fixed from the first step (and stored in checkpoints), because another grouping adds
the same numbers in another order and differs in the last bits. So does another backend (shared
memory of one machine, or torch), which is chosen once.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate

import torch
import torch.distributed as dist

from paceline.codecs.compressor import Compressor, ResidualSlice
from paceline.codecs.spec import Codec
from paceline.comm.compressed_allreduce import CompressedAllReduce
from paceline.comm.message_collectives import BackgroundAllReduce, PendingSum
from paceline.comm.process_group import CollectiveGroup, SharedMemoryGroup
from paceline.comm.shm.allreduce import SharedMemoryAllReduce, aligned_size
from paceline.errors import StateError, UsageError

FIRST_BUCKET_BYTES = 1 << 20
"""A small first bucket, so that the exchange starts early in the backward pass."""
RING = "ring"
"""The algorithm of torch's all-reduce."""
BENCHMARK_ROUNDS = 4
MAX_BENCHMARK_NUMEL = 1 << 20
"""Number of elements summed in the benchmark; larger models only increase the difference."""

NamedParameters = list[tuple[str, torch.nn.Parameter]]


def plan_layout(parameters: NamedParameters, bucket_bytes: int) -> list[list[str]]:
    """Returns the parameter names of each bucket, in the likely order of the backward pass."""
    layout: list[list[str]] = []
    room, dtype = 0, None
    for name, parameter in reversed(parameters):
        # The parameter that exceeds the size of a bucket is still added to it, because one larger
        # exchange is cheaper than an additional small one.
        if room <= 0 or parameter.dtype != dtype:
            room = FIRST_BUCKET_BYTES if not layout else bucket_bytes
            layout.append([])
            dtype = parameter.dtype
        layout[-1].append(name)
        room -= parameter.nbytes
    return layout


def bucket_numel(parameters: NamedParameters) -> int:
    """Returns the number of elements in a bucket of these parameters."""
    return sum(p.numel() for _, p in parameters) + len(parameters)


class GradientBucket:
    """A flat buffer with the gradients of its parameters, then one flag per parameter.

    The flags are summed along with the gradients, so that a parameter that no worker used has no
    gradient and is skipped by the optimizer, as in single-process training.
    """

    def __init__(self, parameters: NamedParameters, flat: torch.Tensor | None = None) -> None:
        self.parameters = parameters
        first = parameters[0][1]
        if flat is None:
            flat = torch.zeros(bucket_numel(parameters), dtype=first.dtype, device=first.device)
        self.flat = flat
        sizes = [p.numel() for _, p in parameters]
        self.values, self.flags = torch.split(flat, [sum(sizes), len(sizes)])
        parts = torch.split(self.values, sizes)
        self.views = [part.view_as(p) for part, (_, p) in zip(parts, parameters, strict=True)]
        self.reset()

    def reset(self) -> None:
        self.filled = [False] * len(self.parameters)
        self.left = len(self.parameters)

    def fill(self, index: int, weight: float) -> None:
        parameter = self.parameters[index][1]
        gradient = parameter.grad
        assert gradient is not None
        if gradient.is_sparse:
            raise UsageError(
                f"parameter {self.parameters[index][0]} has a sparse gradient, which allreduce "
                "does not support; use Embedding(sparse=False)"
            )
        torch.mul(gradient, weight, out=self.views[index])
        # The optimizer and the user read the sum from here; the local gradient is released.
        parameter.grad = self.views[index]
        self.filled[index] = True
        self.left -= 1

    def finalize(self) -> None:
        """Marks missing gradients as zero; called when no more gradients will be added."""
        if self.left == 0:
            self.flags.fill_(1)
            return
        for index, filled in enumerate(self.filled):
            self.flags[index] = 1 if filled else 0
            if not filled:
                self.views[index].zero_()

    def assign_gradients(self) -> None:
        """Gives every parameter that any worker used its summed gradient."""
        if self.left == 0:
            return
        used = self.flags.tolist()
        for index, (_, parameter) in enumerate(self.parameters):
            if not self.filled[index]:
                parameter.grad = self.views[index] if used[index] > 0 else None


def overlapped_ns(spans: list[list[int]], until: int) -> int:
    """Returns the length of the union of spans before `until`; open spans extend beyond it."""
    total = reached = 0
    for began, *ended in sorted(spans):
        stop = min(ended[0] if ended else until, until)
        total += max(0, stop - max(began, reached))
        reached = max(reached, stop)
    return total


class GradientExchange:
    """Sums weighted gradients over a group, bucket by bucket, overlapped with backward."""

    def __init__(
        self,
        parameters: NamedParameters,
        group: CollectiveGroup,
        layout: list[list[str]],
        *,
        in_backward: bool,
        codec: Codec | None = None,
        on_bucket_ready: Callable[[], None] | None = None,
        shared: SharedMemoryGroup | None = None,
        own_pieces: bool = False,
        algorithms: Sequence[str] = (),
    ) -> None:
        """With `own_pieces`, workers receive the sums of their slices only; no `grad` is a sum.

        `algorithms` are those of the buckets, by default torch's ring.
        """
        by_name = dict(parameters)
        if sorted(by_name) != sorted(name for names in layout for name in names):
            raise StateError("the stored bucket layout belongs to another model")
        self._group = group
        self._on_bucket_ready = on_bucket_ready
        named = [[(n, by_name[n]) for n in names] for names in layout]
        self.shared: SharedMemoryAllReduce | None = None
        if shared is not None:
            dtypes = [part[0][1].dtype for part in named]
            flags = [len(part) for part in named] if own_pieces else None
            self.shared = SharedMemoryAllReduce(
                shared, [bucket_numel(part) for part in named], dtypes, flags
            )
        self._reduce_scatter = own_pieces
        self.buckets = [
            GradientBucket(part, self.shared.local_bucket(index) if self.shared else None)
            for index, part in enumerate(named)
        ]
        self._compressed = [
            CompressedAllReduce(codec, [v.shape for v in b.views], b.flat.dtype, group)
            for b in self.buckets
            if codec is not None
        ]
        self._algorithms = list(algorithms) or [RING] * len(self.buckets)
        others = set(self._algorithms) - {RING}
        self._background = BackgroundAllReduce(group, others) if others else None
        self._in_backward = in_backward
        self._armed = False
        self.overlapped_us: int | None = None
        """Exchange of the last step that overlapped with backward; None if it was not timed."""
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
                partial(self._on_gradient, bucket, index)
            )
            for bucket in self.buckets
            for index, (_, parameter) in enumerate(bucket.parameters)
        ]
        self.uncompressed_bytes = 0

    def begin(self, weight: float, *, measure: bool = False, timed: bool = False) -> None:
        """Starts a step; `measure` enables `grad_sq_norms`, and `timed` `overlapped_us`."""
        self._timed = timed
        self._spans: list[list[int]] = []
        self._armed = True
        self._measuring = measure
        self.local_grad_sq_norm = 0.0
        self._weight = weight
        self._launched = 0
        self._works: list[dist.Work | PendingSum | None] = []
        self._callback_queued = False
        for bucket in self.buckets:
            bucket.reset()

    def _on_gradient(self, bucket: GradientBucket, index: int, parameter: torch.Tensor) -> None:
        if not self._armed:
            return
        if bucket.filled[index]:
            raise UsageError(
                "two backward passes in one step; call optimizer.step() once per batch, "
                "and use a larger batch instead of gradient accumulation"
            )
        if self._measuring:
            assert parameter.grad is not None
            self.local_grad_sq_norm += float(parameter.grad.square().sum())
        bucket.fill(index, self._weight)
        # All workers must start collectives in the same order, that of the layout.
        while self._launched < len(self.buckets) and self.buckets[self._launched].left == 0:
            self._launch_next()
        if self._in_backward and not self._callback_queued:
            self._callback_queued = True
            engine = torch.autograd.Variable._execution_engine
            engine.queue_callback(self.finish)

    def _launch_next(self) -> None:
        bucket = self.buckets[self._launched]
        bucket.finalize()
        if self._on_bucket_ready is not None:
            self._on_bucket_ready()
        self.uncompressed_bytes += bucket.flat.nbytes
        work: dist.Work | PendingSum | None = None
        algorithm = self._algorithms[self._launched]
        if self.shared is not None:
            self.shared.mark_filled()
        elif self._compressed:
            # The flags must be exact, unlike the encoded gradients.
            work = self._group.all_reduce_async(bucket.flags)
            self._compressed[self._launched].begin(bucket.values)
        elif algorithm == RING:
            work = self._group.all_reduce_async(bucket.flat)
        else:
            assert self._background is not None
            work = self._background.start(bucket.flat, algorithm)
        self._works.append(work)
        if self._timed and work is not None:
            span = [time.perf_counter_ns()]  # Its end is added when the exchange is complete.
            self._spans.append(span)
            work.get_future().add_done_callback(lambda _: span.append(time.perf_counter_ns()))
        self._launched += 1

    def finish(self) -> None:
        """Waits for all sums; afterwards every parameter's `grad` is the weighted sum."""
        if not self._armed:
            return
        self._armed = False
        waits_from = time.perf_counter_ns()
        while self._launched < len(self.buckets):
            self._launch_next()
        if self.shared is not None:
            self.shared.finish()
        for index, (bucket, work) in enumerate(zip(self.buckets, self._works, strict=True)):
            if work is not None:
                work.wait()
            if self._compressed:
                self._compressed[index].finish()
            if not self._reduce_scatter:
                bucket.assign_gradients()
        self.overlapped_us = overlapped_ns(self._spans, waits_from) // 1000 if self._timed else None

    def grad_sq_norms(self) -> tuple[float, float]:
        """Returns the squared norms of the local gradient and of the sum of a measured step."""
        whole = sum(float(v.square().sum()) for bucket in self.buckets for v in bucket.views)
        return self.local_grad_sq_norm, whole

    @property
    def bytes_sent(self) -> int:
        """Payload bytes passed to the collectives (their traffic depends on the algorithm)."""
        if not self._compressed:
            return self.uncompressed_bytes
        return sum(c.bytes_sent for c in self._compressed)

    def codec_buffers(self) -> Iterator[tuple[Compressor, list[ResidualSlice]]]:
        """Yields the compressor of each bucket, and the parameters in its residual."""
        for bucket, exchange in zip(self.buckets, self._compressed, strict=False):
            offsets = accumulate((p.numel() for _, p in bucket.parameters), initial=0)
            yield (
                exchange.compressor,
                [
                    ResidualSlice(name, p.shape, 0, p.numel(), offset)
                    for (name, p), offset in zip(bucket.parameters, offsets, strict=False)
                ],
            )

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()
        if self._background is not None:
            self._background.close()


@dataclass(frozen=True)
class BackendChoice:
    """The chosen backend and the reason."""

    shared: SharedMemoryGroup | None
    reason: str

    @property
    def name(self) -> str:
        return "network" if self.shared is None else "shared"


def choose_backend(
    wanted: str,
    before: str | None,
    parameters: NamedParameters,
    layout: list[list[str]],
    group: CollectiveGroup,
) -> BackendChoice:
    """`wanted` is `auto`, `shared` or `network`; `before` what was chosen in this run, if anything.

    The way once chosen is kept, because another one adds in another order and differs in the last
    bits; if it is no longer available, the other one is used and the reason reported.
    """
    if group.size == 1 or wanted == "network":
        return BackendChoice(None, "")
    if wanted == "auto" and before == "network":
        return BackendChoice(None, "it was chosen before")
    by_name = dict(parameters)
    named = [[(n, by_name[n]) for n in names] for names in layout]
    counts = [bucket_numel(part) for part in named]
    dtypes = [part[0][1].dtype for part in named]
    shared: SharedMemoryGroup | str
    if any(p.device.type != "cpu" for p in by_name.values()):
        shared = "the model is not in the processor's memory"
    else:
        nbytes = aligned_size([c * d.itemsize for c, d in zip(counts, dtypes, strict=True)])
        shared = group.shared_memory(nbytes)
    if isinstance(shared, str):
        if wanted == "shared":
            raise UsageError(f"allreduce: via=shared is not available ({shared}); remove via")
        return BackendChoice(None, shared)
    if wanted == "shared" or before == "shared":
        return BackendChoice(shared, "" if wanted == "shared" else "it was chosen before")
    return benchmark_backends(shared, counts, dtypes, group)


def benchmark_backends(
    shared: SharedMemoryGroup, counts: list[int], dtypes: list[torch.dtype], group: CollectiveGroup
) -> BackendChoice:
    """Benchmarks both backends on buckets of these sizes; worker 0's timings decide."""
    sums = SharedMemoryAllReduce(shared, [min(c, MAX_BENCHMARK_NUMEL) for c in counts], dtypes)
    plain = [
        torch.zeros(min(c, MAX_BENCHMARK_NUMEL), dtype=d)
        for c, d in zip(counts, dtypes, strict=True)
    ]
    times: dict[str, list[float]] = {"shared": [], "network": []}
    for _ in range(BENCHMARK_ROUNDS):
        group.barrier()
        began = time.perf_counter()
        for _ in counts:
            sums.mark_filled()
        sums.finish()
        times["shared"].append(time.perf_counter() - began)
        group.barrier()
        began = time.perf_counter()
        for work in [group.all_reduce_async(tensor) for tensor in plain]:
            assert isinstance(work, dist.Work)
            work.wait()
        times["network"].append(time.perf_counter() - began)
    best = torch.tensor([min(times["shared"]), min(times["network"])], dtype=torch.float64)
    group.broadcast(best)
    ours, theirs = best.tolist()
    why = f"{1e3 * ours:.2f} ms against {1e3 * theirs:.2f} ms by torch's collectives"
    return BackendChoice(shared if ours < theirs else None, why)
