"""All-reduce through shared memory on one host, and between hosts through one leader each.

Each worker's gradients are in its slot of a `SharedRegion`. When all workers have filled a bucket,
each adds up its own range over all slots, in rank order, and writes the sum to every slot: no byte
passes a socket, and all workers get the same bits. With several hosts, each host's sum is in the
slot of its first worker; these leaders exchange sums with torch collectives, and the other workers
copy the result.
"""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from paceline.comm.shm.segment import CACHE_LINE, WORDS_PER_LINE, Words, open_segment, round_up
from paceline.errors import PeerLost

if TYPE_CHECKING:
    from paceline.comm.process_group import SharedMemoryGroup

FILLED, SUMMED, READY, TAKEN, UPDATED = range(5)
"""Counters of a member: buckets filled, ranges added up, sums received from other hosts, sums
copied, and steps whose weights it has updated."""
PID_WORD = WORDS_PER_LINE - 1
SPIN_READS = 200
"""Reads of a counter before sleeping: other members are often only microseconds behind."""


def aligned_size(sizes: Sequence[int]) -> int:
    """Returns the bytes of a slot that holds buckets of these sizes."""
    return sum(round_up(n, CACHE_LINE) for n in sizes)


class SharedRegion:
    """A segment with one slot and one line of counters per member; each writes its own counters.

    Counters only grow. Every wait has a deadline and raises PeerLost for a member that has died.
    """

    def __init__(
        self,
        name: str,
        members: Sequence[int],
        rank: int,
        slot_bytes: int,
        timeout_s: float,
        is_aborted: Callable[[], bool] = lambda: False,
    ) -> None:
        """Opens it. Waits raise PeerLost as soon as `is_aborted()`."""
        self.members = list(members)
        """Ranks of the processes on this host, in order."""
        self.local_index = self.members.index(rank)
        """Index of this process among them."""
        self._memory = open_segment(name, self.size_for(len(members), slot_bytes))
        self._slot_bytes = slot_bytes
        self._timeout_s = timeout_s
        self._is_aborted = is_aborted
        self._words = Words(self._memory, lines=len(self.members))
        self._words.values[self.local_index * WORDS_PER_LINE + PID_WORD] = os.getpid()
        cores = len(os.sched_getaffinity(0))
        self._spin_reads = SPIN_READS if len(self.members) <= cores else 0

    @staticmethod
    def size_for(members: int, slot_bytes: int) -> int:
        return round_up(members * CACHE_LINE) + members * round_up(slot_bytes)

    def slot_tensor(self, place: int, offset: int, count: int, dtype: torch.dtype) -> torch.Tensor:
        """Returns `count` elements at byte `offset` of a member's slot."""
        start = round_up(len(self.members) * CACHE_LINE) + place * round_up(self._slot_bytes)
        return torch.frombuffer(self._memory, dtype=dtype, count=count, offset=start + offset)

    def increment(self, word: int) -> int:
        """Adds one to a counter of this member and wakes its waiters; returns the new value."""
        index = self.local_index * WORDS_PER_LINE + word
        self._words.values[index] += 1
        self._words.wake(index)
        return self._words.values[index]

    def value(self, place: int, word: int) -> int:
        return self._words.values[place * WORDS_PER_LINE + word]

    def wait_for_all(self, word: int, target: int) -> None:
        """Waits until the counters of all members have reached the target; raises PeerLost."""
        deadline = time.monotonic() + self._timeout_s
        for place in range(len(self.members)):
            if place != self.local_index:
                self.wait_for(place, word, target, deadline)

    def wait_for(self, place: int, word: int, target: int, deadline: float | None = None) -> None:
        """Waits until a member's counter has reached the target; raises PeerLost."""
        if not self._words.wait_for(
            place * WORDS_PER_LINE + word,
            target,
            deadline=deadline or time.monotonic() + self._timeout_s,
            alive=functools.partial(self._check_alive, place),
            spin_reads=self._spin_reads,
        ):
            self._check_alive(place)
            raise PeerLost(
                f"worker {self.members[place]} did not arrive within {self._timeout_s:g} s"
            )

    def _check_alive(self, place: int) -> None:
        if self._is_aborted():
            raise PeerLost("the view of this exchange has ended")
        pid = self.value(place, PID_WORD)
        if pid == 0:
            return  # It has not opened the segment yet.
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
        except OSError:
            state = "X"
        if state in "ZX":
            raise PeerLost(f"worker {self.members[place]} (process {pid}) has exited")


class SharedMemoryAllReduce:
    """All buckets of a model; every member fills and sums them in the same order."""

    def __init__(
        self,
        shared: SharedMemoryGroup,
        counts: Sequence[int],
        dtypes: Sequence[torch.dtype],
        flags: Sequence[int] | None = None,
    ) -> None:
        """With `flags` (numbers at the end of each bucket), this is a reduce-scatter on one host:
        each member keeps the sums of its ranges, and calls `finish_update` after using them.
        """
        region = self._region = shared.region
        self._leaders = shared.leaders
        self._machines = shared.machines
        places = range(len(region.members))
        self._slots: list[list[torch.Tensor]] = []
        """By bucket and member."""
        offset = 0
        for count, dtype in zip(counts, dtypes, strict=True):
            self._slots.append([region.slot_tensor(p, offset, count, dtype) for p in places])
            offset += round_up(count * dtype.itemsize, CACHE_LINE)
        self._flags = flags
        if flags is not None:
            counts = [count - flag for count, flag in zip(counts, flags, strict=True)]
        self.owned_ranges = [_cut(count, len(places))[region.local_index] for count in counts]
        """Range of each bucket that this member adds up."""
        # The region may have been used before: its counters continue.
        self._filled = region.value(region.local_index, FILLED)
        self._ready = region.value(0, READY)

    def local_bucket(self, bucket: int) -> torch.Tensor:
        """Returns the memory for this worker's gradients of a bucket, and later for their sum."""
        return self._slots[bucket][self._region.local_index]

    def reduced_bucket(self, bucket: int) -> torch.Tensor:
        """Returns the memory with the sums of a bucket."""
        return self._slots[bucket][0]

    def used_parameters(self, bucket: int) -> list[bool] | None:
        """Returns, per parameter, whether any member has a gradient; None if all have one."""
        assert self._flags is not None
        count = self._flags[bucket]
        used = torch.stack([slot[-count:] for slot in self._slots[bucket]]).amax(0)
        return None if bool(used.all()) else [flag > 0 for flag in used.tolist()]

    def finish_update(self) -> None:
        """Marks this member's ranges as updated, and waits for all members."""
        self._region.wait_for_all(UPDATED, self._region.increment(UPDATED))

    def mark_filled(self) -> None:
        self._filled = self._region.increment(FILLED)

    def finish(self) -> None:
        """Sums all buckets, as the members fill them; raises PeerLost."""
        region, buckets = self._region, len(self._slots)
        for bucket, slots in enumerate(self._slots):
            region.wait_for_all(FILLED, self._filled - (buckets - 1 - bucket))
            self._add_piece(bucket, slots)
            region.increment(SUMMED)
        if self._flags is None:
            region.wait_for_all(SUMMED, region.value(region.local_index, SUMMED))
            if self._machines > 1:
                self._exchange_machines()

    def _add_piece(self, bucket: int, slots: list[torch.Tensor]) -> None:
        piece = self.owned_ranges[bucket]
        if piece.start == piece.stop:
            return
        parts = [slot[piece] for slot in slots]
        total = parts[0]
        for part in parts[1:]:
            total.add_(part)
        if self._machines == 1 and self._flags is None:
            for part in parts[1:]:
                part.copy_(total)

    def _exchange_machines(self) -> None:
        """Sums over hosts; the sum of this host is in its first member's slot."""
        region = self._region
        for slots in self._slots:
            if region.local_index == 0:
                dist.all_reduce(slots[0], group=self._leaders)
                self._ready = region.increment(READY)
            else:
                self._ready += 1
                region.wait_for(0, READY, self._ready)
                slots[region.local_index].copy_(slots[0])
            taken = region.increment(TAKEN)
        if region.local_index == 0:
            # Its next gradients would overwrite sums that others still copy.
            region.wait_for_all(TAKEN, taken)


def _cut(count: int, parts: int) -> list[slice]:
    """Returns ranges that start at cache lines, whatever the size of an element."""
    lines = -(-count // CACHE_LINE)
    edges = [min(count, lines * p // parts * CACHE_LINE) for p in range(parts + 1)]
    return [slice(a, b) for a, b in pairwise(edges)]
