"""Chooses the all-reduce of each bucket by its size and a short measurement of the network."""

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from paceline.comm.message_collectives import MessageCollectives
from paceline.comm.process_group import CollectiveGroup
from paceline.specs.collectives import (
    AUTO,
    all_reduce_steps,
    butterfly,
    candidates,
    ring,
)

ROUNDS = 4
"""The first round warms up; the fastest one counts, because noise only adds time."""
PROBE_NUMEL = 1 << 16
"""256 KiB of float32: a tenth of a second on a link with 100 Mbit/s, for all rounds."""


@dataclass(frozen=True)
class NetworkProbe:
    """Latency and bandwidth between workers, equal on all of them."""

    ring_hop_s: float
    """Latency of a step of torch's ring."""
    message_s: float
    """Latency of a message between two workers, sent from Python."""
    bytes_per_s: float


def probe_network(group: CollectiveGroup) -> NetworkProbe:
    """Measures sums of one number and of many; a collective operation."""
    one, many = torch.zeros(1), torch.zeros(PROBE_NUMEL)
    flat = MessageCollectives(group)
    small_s = _fastest_s(group, lambda: group.all_reduce(one))
    large_s = _fastest_s(group, lambda: group.all_reduce(many))
    message_s = _fastest_s(group, lambda: flat.butterfly(one))
    volume = ring(group.size, many.nbytes).nbytes
    found = torch.tensor([small_s, max(large_s - small_s, 1e-9), message_s], dtype=torch.float64)
    group.all_reduce(found, largest=True)
    small_s, transfer_s, message_s = found.tolist()
    return NetworkProbe(
        small_s / ring(group.size, 0).messages,
        message_s / butterfly(group.size, 0).messages,
        volume / transfer_s,
    )


def _fastest_s(group: CollectiveGroup, act: Callable[[], None]) -> float:
    times_s = []
    for _ in range(ROUNDS):
        group.barrier()
        began = time.perf_counter()
        act()
        times_s.append(time.perf_counter() - began)
    return min(times_s[1:])


def fastest_algorithm(probe: NetworkProbe, members: int, machines: int, nbytes: float) -> str:
    """Returns the all-reduce with the smallest cost; see `specs.collectives`."""

    def seconds(name: str) -> float:
        latency_s = probe.ring_hop_s if name == "ring" else probe.message_s
        steps = all_reduce_steps(name, members, machines, nbytes)
        return steps.seconds(latency_s, probe.bytes_per_s)

    return min(candidates(members, machines), key=seconds)


def choose_algorithms(
    wanted: str, before: Sequence[str] | None, sizes: Sequence[int], group: CollectiveGroup
) -> tuple[list[str], str]:
    """Returns the algorithm of each bucket and the reason; all workers must make the same call.

    `before` is what this run used before it was resumed: another algorithm adds in another order
    and differs in the last bits. `sizes` are the bytes of the buckets.
    """
    if wanted != AUTO:
        return [wanted] * len(sizes), ""
    if before is not None and len(before) == len(sizes):
        return list(before), "the algorithm was chosen before"
    if group.size < 3:
        # Between two workers, every algorithm sends the same bytes.
        return ["ring"] * len(sizes), ""
    probe = probe_network(group)
    machines = len(group.machines())
    chosen = [fastest_algorithm(probe, group.size, machines, nbytes) for nbytes in sizes]
    return chosen, (
        f"{1e3 * probe.ring_hop_s:.2f} ms per step of a ring, {1e3 * probe.message_s:.2f} ms per "
        f"message, {probe.bytes_per_s * 8 / 1e6:.0f} Mbit/s"
    )


def describe_algorithms(chosen: Sequence[str]) -> str:
    """Returns for example `ring`, or `butterfly (1 bucket), ring (3 buckets)`."""
    counts = Counter(chosen)
    if len(counts) == 1:
        return chosen[0]
    parts = [f"{name} ({n} bucket{'s' * (n > 1)})" for name, n in sorted(counts.items())]
    return ", ".join(parts)
