"""Cost model: seconds of computation and communication from a workload and a pool.

The formulas are documented in docs/cost-model.md. The twin simulates them step by step with jitter
and queues; the planner sums them up.
"""

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass

from paceline.cluster.gpu_rates import estimate_gpu
from paceline.cluster.pool import Host, Pool, StepCost
from paceline.codecs.spec import Codec
from paceline.specs.collectives import AUTO, all_reduce_steps, candidates

FIXED_S = 0.0005
"""Fixed cost of a step in seconds, if it was not measured."""
FIRST_BUCKET_BYTES = 1 << 20
FORWARD_FRACTION = 1 / 3
"""Fraction of the forward pass in forward and backward."""
BACKWARD_SHARE = 2 / 3


@dataclass(frozen=True)
class Workload:
    """Computation and communication of a job, independent of the machines."""

    model: str
    data: str
    shapes: tuple[tuple[int, ...], ...]
    """Shapes of the trained parameters."""
    item_bytes: int
    flops_per_sample: float
    """Operations of forward and backward per sample."""
    samples: int
    batch: int
    epochs: int
    evaluated: dict[str, int]
    """Samples of val and test, if they exist."""
    slots: int
    """Values that the optimizer stores per parameter element."""
    gradient_ready: tuple[float, ...] = ()
    """Fraction of a step's operations done when the gradient of each shape is ready, if known."""
    input_bytes_per_sample: tuple[float, ...] = ()
    """Bytes per sample that enter the layer of each shape, if known."""
    checkpoints: int = 0
    """Checkpoints that the run writes."""
    uses_gpus: bool = True
    """Workers compute on the GPUs of machines that have them."""

    @property
    def parameters(self) -> int:
        return sum(math.prod(s) for s in self.shapes)

    @property
    def bytes(self) -> int:
        return self.parameters * self.item_bytes

    @property
    def state_bytes(self) -> int:
        """Bytes of the weights and of the optimizer's state."""
        return self.bytes * (1 + self.slots)


def find_measured(host: Host, model: str) -> StepCost | None:
    return host.measured.get(model) or host.measured.get("any")


def with_measured_gradient_size(work: Workload, host: Host) -> Workload:
    """Returns the workload with the pool's gradient size, if it represents another model."""
    measured = find_measured(host, work.model)
    if measured is None or measured.gradient_mb is None:
        return work
    count = round(measured.gradient_mb * 1e6 / work.item_bytes)
    return dataclasses.replace(
        work, shapes=((count,),), gradient_ready=(), input_bytes_per_sample=()
    )


def gpu_gflops(host: Host) -> float:
    """Returns the rate of all GPUs of a host, which work in lockstep: one worker on each."""
    return host.gpu_count * min(g.gflops or estimate_gpu(g.model).gflops for g in host.gpus)


def step_time_on(host: Host, work: Workload, pool: Pool) -> StepCost:
    """Returns the measured step time, or an estimate from floating-point operations."""
    measured = find_measured(host, work.model)
    if measured is None:
        gflops = gpu_gflops(host) if host.gpus and work.uses_gpus else host.gflops
        measured = StepCost(
            fixed_s=FIXED_S,
            per_sample_s=max(work.flops_per_sample, 1.0) / (gflops * 1e9),
            update_s=work.bytes / (pool.apply_gb_s * 1e9),
        )
    seconds = ("fixed_s", "per_sample_s", "update_s")
    return measured.model_copy(update={n: getattr(measured, n) / host.speed for n in seconds})


def allreduce_s(
    pool: Pool, hosts: list[Host], nbytes: float, algorithm: str | None = None
) -> float:
    """Returns the seconds of an all-reduce: the network's part and that of the processes.

    `algorithm` is that of the strategy; None for torch's.
    """
    members = len(hosts)
    if members < 2 or not nbytes:
        return 0.0
    machines = len({h.host for h in hosts})
    processes_per_core = max(1.0, *(h.workers / h.cores for h in hosts))
    endpoint = endpoint_s(pool, members, nbytes) * processes_per_core
    links = [pool.link_of(h) for h in hosts]
    latency_s = max(link.latency_s for link in links) + pool.hop_ms / 1e3
    if machines == 1 and algorithm in (AUTO, None):
        # On one machine nothing crosses a network, but every hop is a context switch.
        return endpoint + 2 * (members - 1) * latency_s
    slowest = min(link.bytes_per_s for link in links)
    return endpoint + network_s(pool, members, machines, nbytes, latency_s, slowest, algorithm)


def network_s(
    pool: Pool,
    members: int,
    machines: int,
    nbytes: float,
    latency_s: float,
    bytes_per_s: float,
    algorithm: str | None = None,
) -> float:
    """Returns the network's part of an all-reduce.

    The pool's algorithm is used where the strategy names none; if it is `auto`, too, the cheapest
    one where the strategy chooses, and otherwise torch's ring.
    """
    name = pool.collective if algorithm in (AUTO, None) else algorithm
    names: tuple[str, ...] = (name or AUTO,)
    if name == AUTO:
        names = ("ring",) if algorithm is None else candidates(members, machines)
    return min(
        all_reduce_steps(each, members, machines, nbytes).seconds(latency_s, bytes_per_s)
        for each in names
    )


def endpoint_s(pool: Pool, members: int, nbytes: float) -> float:
    """Returns the seconds that each process sends, receives and adds in an all-reduce."""
    return 2 * (members - 1) / members * nbytes / (pool.collective_gb_s * 1e9)


@dataclass
class BucketTiming:
    """Timing of one gradient bucket."""

    ready: float = 0.0
    """Fraction of a step's computation that is done when the bucket is ready."""
    share: float = 0.0
    """Fraction of all bytes."""


def fill_buckets(work: Workload, bucket_bytes: float) -> list[BucketTiming]:
    """Returns buckets like those of `comm.buckets.plan_layout`; empty if the layers are unknown."""
    if len(work.gradient_ready) != len(work.shapes):
        return []
    buckets: list[BucketTiming] = []
    room, total = 0.0, float(work.bytes)
    for shape, ready in zip(reversed(work.shapes), reversed(work.gradient_ready), strict=True):
        if room <= 0:
            room = FIRST_BUCKET_BYTES if not buckets else bucket_bytes
            buckets.append(BucketTiming())
        nbytes = math.prod(shape) * work.item_bytes
        buckets[-1].ready = max(buckets[-1].ready, ready)
        buckets[-1].share += nbytes / total
        room -= nbytes
    return buckets


def exposed_s(compute_s: float, exchanges: Sequence[tuple[float, float]]) -> float:
    """Returns the communication that remains after the computation.

    Each exchange (fraction of the computation, seconds) starts when its fraction is done and the
    previous exchange is over.
    """
    ends = 0.0
    for ready, seconds in exchanges:
        ends = max(ends, ready * compute_s) + seconds
    return max(0.0, ends - compute_s)


def exposed_without_layers_s(
    exchange_s: float, compute_s: float, nbytes: float, bucket_bytes: float
) -> float:
    """Like `exposed_s` for unknown layers: all but the last of equal buckets can be hidden."""
    buckets = 1 + math.ceil(max(0.0, nbytes - FIRST_BUCKET_BYTES) / bucket_bytes)
    hidden = min(exchange_s * (buckets - 1) / buckets, BACKWARD_SHARE * compute_s)
    return exchange_s - hidden


def encoded_bytes(codec: Codec | None, work: Workload) -> float:
    """Returns the bytes of one encoded gradient."""
    return work.bytes if codec is None else codec.encoded_bytes(work.shapes, work.item_bytes)
