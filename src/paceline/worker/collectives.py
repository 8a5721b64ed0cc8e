"""Measures collectives among the workers of a group (`paceline collectives`)."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from paceline.comm.message_collectives import MessageCollectives, make_algorithm
from paceline.comm.process_group import CollectiveGroup
from paceline.comm.wire import ControlConnection
from paceline.protocol.messages import WorkerFinished
from paceline.specs.collectives import COLLECTIVES, HIERARCHICAL, member_counts
from paceline.strategies.runner import peer_errors
from paceline.telemetry.phase_clock import COMM, OTHER, PhaseClock
from paceline.worker.assignment import Assignment
from paceline.worker.session import connect_group, start_heartbeats

WARM_UP = 1
MIN_ROUNDS = 3
POINT_S = 1.0
"""A point has no further rounds beyond this time."""
ITEM_BYTES = 4
BURST_BYTES = 1 << 17
"""Rate limits of clouds and switches are token buckets: after a pause, the first bytes are fast."""
BY_MACHINE = "all-reduce (hierarchical)"


def measure_collectives(assignment: Assignment, control: ControlConnection, wait_s: float) -> None:
    """Measures and sends the result as this worker's totals. Raises PeerLost."""
    assert assignment.collectives is not None
    plan = assignment.collectives
    torch.set_num_threads(1)
    clock, closing = PhaseClock(assignment.started_wall_s), threading.Event()
    group = connect_group(assignment, control, wait_s)
    start_heartbeats(control, group.rank, clock, closing, lambda: 0)
    measurement = Measurement(group, clock, plan.rounds)
    with peer_errors("a collective failed"):
        rows = measurement.run(plan.sizes)
    closing.set()
    control.send(WorkerFinished(group.rank, {"rows": rows, "machines": group.machines()}))
    group.destroy()
    control.close()


class Measurement:
    """Rounds of every collective, for every number of workers and size.

    All workers make the same calls: those that do not take part in a collective wait for the end
    of its rounds, which all of them decide by the same times.
    """

    def __init__(self, group: CollectiveGroup, clock: PhaseClock, rounds: int) -> None:
        self._group, self._clock, self._rounds = group, clock, rounds
        self._all = MessageCollectives(group)
        self._burst = torch.zeros(BURST_BYTES, dtype=torch.uint8), torch.zeros(BURST_BYTES).byte()
        self._order = order_by_machine(group.machines())

    def run(self, sizes: tuple[int, ...]) -> list[dict[str, Any]]:
        """Returns one row per collective, number of workers and size."""
        group, rows = self._group, []
        for members in member_counts(group.size):
            ranks = sorted(self._order[:members])
            # torch requires all processes to take part in creating a group.
            inner = None if members == group.size else dist.new_group(ranks)
            machines = len([m for m in group.machines() if set(m) & set(ranks)])
            for size in sizes:
                acts: dict[str, Callable[[], None]] = {}
                if group.rank in ranks:
                    acts = self._collectives(ranks, inner, size)
                shares_machines = members == group.size and 1 < machines < members
                for name in (*COLLECTIVES, *((BY_MACHINE,) if shares_machines else ())):
                    seconds = self._time(acts.get(name))
                    row = {"collective": name, "workers": members, "machines": machines}
                    rows.append({**row, "bytes": size, "seconds": seconds})
        return rows

    def _time(self, act: Callable[[], None] | None) -> float:
        """Returns the slowest worker's seconds in the fastest round: noise only adds time."""
        times_s: list[float] = []
        while len(times_s) < WARM_UP + MIN_ROUNDS or (
            len(times_s) < WARM_UP + self._rounds and sum(times_s) < POINT_S
        ):
            self._clock.enter(COMM)
            self._group.barrier()
            self._spend_bursts()
            self._group.barrier()
            began = time.perf_counter()
            if act is not None:
                act()
            taken = time.perf_counter() - began if act is not None else 0.0
            self._clock.enter(OTHER)
            slowest = torch.tensor([taken], dtype=torch.float64)
            self._group.all_reduce(slowest, largest=True)
            times_s.append(float(slowest))
        return min(times_s[WARM_UP:])

    def _spend_bursts(self) -> None:
        """Sends to a neighbor what a link may carry above its rate after a pause."""
        size, rank = self._group.size, self._group.rank
        self._all.exchange(self._burst[0], (rank + 1) % size, self._burst[1], (rank - 1) % size)

    def _collectives(
        self, ranks: list[int], inner: dist.ProcessGroup | None, size: int
    ) -> dict[str, Callable[[], None]]:
        group, members = self._group, len(ranks)
        flat = MessageCollectives(group, ranks)
        # Equal parts: those of an all-to-all go to a worker and come from it.
        count = max(1, round(size / ITEM_BYTES / members)) * members
        x, y = torch.zeros(count), torch.empty(count)
        parts, received = torch.tensor_split(x, members), torch.tensor_split(y, members)
        first, last = group.rank == ranks[0], group.rank == ranks[-1]

        def one_way() -> None:
            # The receiver's time counts: a sender is done when the message is on its way.
            if first:
                flat.send(x, members - 1)
            elif last:
                flat.receive(y, 0)

        by_machine = make_algorithm(group, HIERARCHICAL)
        return {
            "point-to-point": one_way,
            "broadcast": lambda: flat.broadcast(x),
            "reduce": lambda: flat.reduce(x),
            "all-reduce (ring)": lambda: dist.all_reduce(x, group=inner),
            "all-reduce (tree)": lambda: flat.tree(x),
            "all-reduce (butterfly)": lambda: flat.butterfly(x),
            BY_MACHINE: lambda: by_machine(x),
            "gather": lambda: flat.gather(parts),
            "all-gather": lambda: flat.all_gather(parts),
            "scatter": lambda: flat.scatter(parts),
            "reduce-scatter": lambda: flat.reduce_scatter(parts),
            "all-to-all": lambda: flat.all_to_all(parts, received),
            "scan": lambda: flat.scan(x),
        }


def order_by_machine(machines: list[list[int]]) -> list[int]:
    """Returns all ranks, one of each machine at a time: the first ones use the network."""
    turns = itertools.zip_longest(*machines)
    return [rank for turn in turns for rank in turn if rank is not None]
