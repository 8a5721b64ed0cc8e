"""Cost of all-reduce: the slowest worker, plus the part of the exchange that is not overlapped."""

import statistics
from collections.abc import Sequence

import numpy as np

from paceline.plan.cost_model import (
    Workload,
    encoded_bytes,
    exposed_s,
    exposed_without_layers_s,
    fill_buckets,
)
from paceline.plan.facet import CostFacet, RecordedStep, StepEstimate
from paceline.plan.lockstep import (
    all_reduce_s,
    balanced_shares,
    compute_s,
    even_shares,
    slowest_s,
    update_s,
)
from paceline.plan.pool_arrays import Ints, PoolArrays
from paceline.strategies.allreduce.share_tree import most_held_nodes, worker_shares
from paceline.strategies.allreduce.spec import AllReduce


def exchange_bytes(spec: AllReduce, work: Workload, workers: int) -> float:
    """Bytes of one exchange, as the size of an equivalent all-reduce."""
    if spec.shares:
        # An all-reduce sends one sum and receives one; here a worker sends one per subtree.
        return work.bytes * (most_held_nodes(spec.shares, workers) + 1) / 2
    # Sharding adds an all-gather, which costs half an all-reduce.
    return encoded_bytes(spec.codec, work) * (1.0 if spec.shard == "none" else 1.5)


class AllReduceCost(CostFacet[AllReduce]):
    def step(self, arrays: PoolArrays, hosts: Ints, spec: AllReduce) -> StepEstimate:
        balanced = spec.balance == "auto"
        shares = balanced_shares(arrays, hosts) if balanced else even_shares(arrays, hosts)
        if spec.shares:
            counts = np.diff(worker_shares(spec.shares, len(hosts)))
            shares = arrays.work.batch * counts / spec.shares
        compute = compute_s(arrays, hosts, shares)
        if spec.shares:
            compute = compute + arrays.fixed[hosts] * (counts - 1)
        update = update_s(arrays, hosts)
        if len(hosts) == 1:
            return StepEstimate(float(compute[0]) + update, compute)
        nbytes = exchange_bytes(spec, arrays.work, len(hosts))
        slowest = slowest_s(compute, arrays.cv[hosts])
        buckets = fill_buckets(arrays.work, spec.bucket_bytes)
        if spec.shares:
            exposed = all_reduce_s(arrays, hosts, nbytes)  # After the last share.
        elif buckets:
            each = [
                (b.ready, all_reduce_s(arrays, hosts, b.share * nbytes, spec.message_algorithm))
                for b in buckets
            ]
            exposed = exposed_s(slowest, each)
        else:
            exchange = all_reduce_s(arrays, hosts, nbytes, spec.message_algorithm)
            # Gradients are divided into buckets before they are encoded.
            exposed = exposed_without_layers_s(
                exchange, slowest, arrays.work.bytes, spec.bucket_bytes
            )
        return StepEstimate(slowest + exposed + update, compute)

    def calibrate(
        self, spec: AllReduce, steps: Sequence[Sequence[RecordedStep]], nbytes: float
    ) -> dict[str, float]:
        workers = len(steps)
        # The shortest exchange of a step is the one of the worker that arrived last.
        shortest = [min(s.comm_s for s in same) for same in zip(*steps, strict=False)]
        exposed = max(1e-9, statistics.median(shortest))
        busy = statistics.median(s.busy_s for worker in steps for s in worker)
        seconds = total_exchange_s(exposed, busy, nbytes, spec.bucket_bytes)
        return {"collective_gb_s": 2 * (workers - 1) / workers * nbytes / seconds / 1e9}


def total_exchange_s(exposed: float, busy: float, nbytes: float, bucket: float) -> float:
    """Duration of an exchange of which `exposed` seconds were not hidden by backward."""
    low, high = exposed, exposed + busy
    for _ in range(50):
        middle = (low + high) / 2
        seen = exposed_without_layers_s(middle, busy, nbytes, bucket)
        low, high = (middle, high) if seen < exposed else (low, middle)
    return high
