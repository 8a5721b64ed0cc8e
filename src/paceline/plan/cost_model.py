"""Seconds of computing and of exchanging, from a workload and a pool; no clocks, no events.

The formulas are those of docs/cost-model.md. The twin plays them step by step with jitter and
queues; the planner adds them up.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass

from paceline.cluster.pool import Host, Pool, StepCost
from paceline.codecs.spec import Codec

FIXED_S = 0.0005
"""A step's cost that does not grow with its samples, where it was not measured."""
FIRST_BUCKET_BYTES = 1 << 20
FORWARD_FRACTION = 1 / 3
"""Forward alone, beside forward and backward."""
BACKWARD_SHARE = 2 / 3


@dataclass(frozen=True)
class Workload:
    """What has to be computed and sent, whoever does it."""

    model: str
    data: str
    shapes: tuple[tuple[int, ...], ...]
    """Of the trained parameters."""
    item_bytes: int
    flops_per_sample: float
    """Forward and backward."""
    samples: int
    batch: int
    epochs: int
    evaluated: dict[str, int]
    """Samples of val and test, where there are such."""
    slots: int
    """Numbers that the optimizer keeps for each parameter."""
    gradient_ready: tuple[float, ...] = ()
    """For each shape the share of a step's operations done when its gradient is there, if known."""
    input_bytes_per_sample: tuple[float, ...] = ()
    """For each shape the bytes of a sample that enter its layer, if known."""

    @property
    def parameters(self) -> int:
        return sum(math.prod(s) for s in self.shapes)

    @property
    def bytes(self) -> int:
        return self.parameters * self.item_bytes


@dataclass(frozen=True)
class StepTime:
    """Seconds on one machine for this workload, its speed counted in."""

    fixed_s: float
    per_sample_s: float
    update_s: float

    def step_s(self, samples: float) -> float:
        return self.fixed_s + samples * self.per_sample_s if samples else 0.0


def find_measured(host: Host, model: str) -> StepCost | None:
    return host.measured.get(model) or host.measured.get("any")


def with_measured_gradient_size(work: Workload, host: Host) -> Workload:
    """The workload as the pool's figures have it, where they stand for another model."""
    measured = find_measured(host, work.model)
    if measured is None or measured.gradient_mb is None:
        return work
    count = round(measured.gradient_mb * 1e6 / work.item_bytes)
    return dataclasses.replace(
        work, shapes=((count,),), gradient_ready=(), input_bytes_per_sample=()
    )


def step_time_on(host: Host, work: Workload, pool: Pool) -> StepTime:
    """Measured where it was measured, else by floating-point operations."""
    measured = find_measured(host, work.model)
    if measured is None:
        measured = StepCost(
            fixed_s=FIXED_S,
            per_sample_s=max(work.flops_per_sample, 1.0) / (host.gflops * 1e9),
            update_s=work.bytes / (pool.apply_gb_s * 1e9),
        )
    return StepTime(
        measured.fixed_s / host.speed,
        measured.per_sample_s / host.speed,
        measured.update_s / host.speed,
    )


def ring_s(members: int, nbytes: float, latency_s: float, bytes_per_s: float) -> float:
    if members < 2:
        return 0.0
    return 2 * (members - 1) * (latency_s + nbytes / (members * bytes_per_s))


def tree_s(members: int, nbytes: float, latency_s: float, bytes_per_s: float) -> float:
    """Reduce to a root and broadcast from it, a level at a time."""
    if members < 2:
        return 0.0
    return 2 * math.ceil(math.log2(members)) * (latency_s + nbytes / bytes_per_s)


def allreduce_s(pool: Pool, hosts: list[Host], nbytes: float) -> float:
    """One all-reduce among these workers' machines: the network's part and the processes' own."""
    members = len(hosts)
    if members < 2 or not nbytes:
        return 0.0
    names = {h.host for h in hosts}
    crowd = max(_crowding(h) for h in hosts)
    own = endpoint_s(pool, members, nbytes) * crowd
    links = [pool.link_of(h) for h in hosts]
    latency_s = max(link.latency_s for link in links) + pool.hop_ms / 1e3
    if len(names) == 1:
        # All on one machine: nothing crosses a network, but every hop is a hand-over.
        return own + 2 * (members - 1) * latency_s
    slowest = min(link.bytes_per_s for link in links)
    return network_s(pool, members, nbytes, latency_s, slowest) + own


def network_s(
    pool: Pool, members: int, nbytes: float, latency_s: float, bytes_per_s: float
) -> float:
    """The network's part of an all-reduce, by the way that the pool names."""
    ring = ring_s(members, nbytes, latency_s, bytes_per_s)
    tree = tree_s(members, nbytes, latency_s, bytes_per_s)
    return {"ring": ring, "tree": tree, "auto": min(ring, tree)}[pool.collective]


def endpoint_s(pool: Pool, members: int, nbytes: float) -> float:
    """What each process sends, receives and adds itself in an all-reduce."""
    return 2 * (members - 1) / members * nbytes / (pool.collective_gb_s * 1e9)


def _crowding(host: Host) -> float:
    """Processes for each core, where there are more than cores."""
    return max(1.0, host.workers / host.cores)


@dataclass(frozen=True)
class BucketTiming:
    """Gradients that are exchanged together."""

    ready: float
    """The share of a step's computing that is done when they are there."""
    share: float
    """Of all bytes."""


def fill_buckets(work: Workload, bucket_bytes: float) -> list[BucketTiming]:
    """Filled as `comm.buckets.plan_layout` fills them: from the last layer on, a small first one,
    and what tips one over still goes in. Empty where the layers are not known."""
    if len(work.gradient_ready) != len(work.shapes):
        return []
    buckets: list[BucketTiming] = []
    room, total = 0.0, float(work.bytes)
    for shape, ready in zip(reversed(work.shapes), reversed(work.gradient_ready), strict=True):
        if room <= 0:
            room = FIRST_BUCKET_BYTES if not buckets else bucket_bytes
            buckets.append(BucketTiming(0.0, 0.0))
        nbytes = math.prod(shape) * work.item_bytes
        last = buckets.pop()
        buckets.append(BucketTiming(max(last.ready, ready), last.share + nbytes / total))
        room -= nbytes
    return buckets


def exposed_s(compute_s: float, exchanges: Sequence[tuple[float, float]]) -> float:
    """What goes on after computing, if each exchange of so many seconds begins when its share of
    computing is done, and the one before it is over."""
    ends = 0.0
    for ready, seconds in exchanges:
        ends = max(ends, ready * compute_s) + seconds
    return max(0.0, ends - compute_s)


def exposed_without_layers_s(
    exchange_s: float, compute_s: float, nbytes: float, bucket_bytes: float
) -> float:
    """The same where the layers are not known: all but the last of equal buckets can be hidden."""
    buckets = 1 + math.ceil(max(0.0, nbytes - FIRST_BUCKET_BYTES) / bucket_bytes)
    hidden = min(exchange_s * (buckets - 1) / buckets, BACKWARD_SHARE * compute_s)
    return exchange_s - hidden


def encoded_bytes(codec: Codec | None, work: Workload) -> float:
    """Bytes of one gradient after its codec."""
    if codec is None:
        return work.bytes
    return codec.encoded_bytes(work.shapes, work.item_bytes)
