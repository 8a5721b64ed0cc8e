"""Chooses the backend that sums gradients: shared memory of one machine, or torch."""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch
import torch.distributed as dist

from paceline.comm.buckets import NamedParameters, bucket_numel
from paceline.comm.process_group import CollectiveGroup, SharedMemoryGroup
from paceline.comm.shm.allreduce import SharedMemoryAllReduce, aligned_size
from paceline.errors import UsageError

ROUNDS = 4
MAX_BENCHMARK_NUMEL = 1 << 20
"""Number of elements summed in the benchmark; larger models only increase the difference."""


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
    for _ in range(ROUNDS):
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
