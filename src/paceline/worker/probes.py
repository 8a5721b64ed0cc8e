"""Short measurements before training: the speed of a worker, and exchanges among all of them."""

import copy
import statistics
import time
from collections.abc import Callable

import torch

from paceline.comm.buckets import NamedParameters, bucket_numel
from paceline.comm.process_group import CollectiveGroup
from paceline.comm.shm.allreduce import SharedMemoryAllReduce, aligned_size
from paceline.protocol.exchange_probe import ExchangeProbe
from paceline.protocol.messages import Lease
from paceline.strategies.runner import LossOf
from paceline.worker.batch_loader import BatchLoader

ROUNDS = 3
"""The first round warms up; the fastest one counts, because noise only adds time."""
MAX_PROBE_NUMEL = 1 << 16
"""Longer gradients are extrapolated, so that the probe is short on slow links, too."""
PROBE_PASSES = 5
"""The first one warms up."""
PROBE_SHARE = 4
"""A pass takes this fraction of a worker's share of a batch: slow workers are slow here, too."""
MIN_PROBE_SAMPLES = 8
PING, PONG = 7001, 7002
"""Tags of the messages of a round trip."""


def probe_speed(
    model: torch.nn.Module, loss_of: LossOf, feed: BatchLoader, samples: int
) -> tuple[float, float]:
    """Returns samples per second and the variation of a few passes on a copy.

    The model and its generator do not change.
    """
    generator = torch.get_rng_state()
    copied = copy.deepcopy(model).train()
    count = min(probed_samples(samples), feed.samples)
    inputs, targets = feed.batch(Lease(0, 0, 0, count, 0, count))
    times_s = []
    for _ in range(PROBE_PASSES):
        began = time.perf_counter()
        loss_of(copied(inputs), targets).backward()  # type: ignore[no-untyped-call]
        times_s.append(time.perf_counter() - began)
    torch.set_rng_state(generator)
    # The first pass allocates and warms up; the fastest one is the speed of the machine.
    steady_s = times_s[1:]
    return count / min(times_s), statistics.stdev(steady_s) / statistics.fmean(steady_s)


def probed_samples(share: int) -> int:
    """Returns how many samples of a share a pass of the probe takes."""
    return max(share // PROBE_SHARE, min(share, MIN_PROBE_SAMPLES))


def probe_exchange(group: CollectiveGroup, parameters: NamedParameters) -> ExchangeProbe | None:
    """Measures exchanges of these gradients; a collective operation, equal on all workers.

    Returns None in a group of one. A sum takes as long as on the worker that arrives last.
    """
    if group.size == 1:
        return None
    count = bucket_numel(parameters)
    item_bytes = parameters[0][1].element_size()
    probed = min(count, MAX_PROBE_NUMEL)
    shared = group.shared_memory(aligned_size([probed * item_bytes]), "probe")
    if isinstance(shared, str) or shared.machines > 1:
        values, value = torch.zeros(probed), torch.zeros(1)
        small_s = _fastest_s(group, lambda: group.all_reduce(value))
        gradient_s = _fastest_s(group, lambda: group.all_reduce(values))
        message_s = _fastest_s(group, lambda: _ping(group)) / 2
    else:
        sums = SharedMemoryAllReduce(shared, [probed], [parameters[0][1].dtype])

        def add_up() -> None:
            sums.mark_filled()
            sums.finish()

        small_s = message_s = 0.0
        gradient_s = _fastest_s(group, add_up)
    gradient_s = small_s + max(0.0, gradient_s - small_s) * count / probed
    least = torch.tensor([-small_s, -gradient_s], dtype=torch.float64)
    group.all_reduce(least, largest=True)
    # Every pair has its own latency; a worker without a partner has none.
    latency = torch.tensor([message_s, float(_partner(group) is not None)], dtype=torch.float64)
    group.all_reduce(latency)
    small_s, gradient_s = (-least).tolist()
    total_s, measured = latency.tolist()
    return ExchangeProbe(
        message_s=total_s / measured,
        small_s=small_s,
        gradient_s=gradient_s,
        gradient_bytes=count * item_bytes,
    )


def _fastest_s(group: CollectiveGroup, exchange: Callable[[], None]) -> float:
    times_s = []
    for _ in range(ROUNDS):
        group.barrier()
        began = time.perf_counter()
        exchange()
        times_s.append(time.perf_counter() - began)
    return min(times_s)


def _partner(group: CollectiveGroup) -> int | None:
    partner = group.rank ^ 1
    return partner if partner < group.size else None


def _ping(group: CollectiveGroup) -> None:
    """A round trip between two neighbors."""
    partner, value = _partner(group), torch.zeros(1)
    if partner is None:
        return
    if group.rank < partner:
        group.isend(value, partner, PING).wait()
        group.irecv(value, partner, PONG).wait()
    else:
        group.irecv(value, partner, PING).wait()
        group.isend(value, partner, PONG).wait()
