"""Sums over the processes of one machine through shared memory, and over machines by their firsts.

Each worker's gradients lie in its slot. When all have filled a bucket, each adds up its own piece
of it over all slots, in the order of ranks, and writes the sum to every slot: no byte passes a
socket, and every worker ends with the same bits. With several machines each one's sum is in the
slot of its first worker, those exchange by torch's collectives, and the others take it from there.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
import torch.distributed as dist

from paceline.comm.process_group import SharedMemoryGroup

FILLED, SUMMED, READY, TAKEN, UPDATED = range(5)
"""Words of a member: buckets filled, its pieces added, brought from other machines, taken, and
steps whose weights it has updated."""
ALIGNED = 64


def aligned_size(sizes: Sequence[int]) -> int:
    return sum(_align(n) for n in sizes)


class SharedMemoryAllReduce:
    """All buckets of a model; they are filled and summed in one order everywhere."""

    def __init__(
        self,
        shared: SharedMemoryGroup,
        counts: Sequence[int],
        dtypes: Sequence[torch.dtype],
        flags: Sequence[int] | None = None,
    ) -> None:
        """With `flags`, of each bucket as many numbers at its end, nobody gets the sums but who
        adds them up: each member goes on with its own pieces, and says so by `updated`. (On one
        machine alone.)"""
        arena = self._arena = shared.region
        self._leaders = shared.leaders
        self._machines = shared.machines
        places = range(len(arena.members))
        self._slots: list[list[torch.Tensor]] = []
        """By bucket and member."""
        offset = 0
        for count, dtype in zip(counts, dtypes, strict=True):
            self._slots.append([arena.slot_tensor(p, offset, count, dtype) for p in places])
            offset += _align(count * dtype.itemsize)
        self._flags = flags
        if flags is not None:
            counts = [count - flag for count, flag in zip(counts, flags, strict=True)]
        self._pieces = [_cut(count, len(places))[arena.local_index] for count in counts]
        self._updated = arena.value(arena.local_index, UPDATED)
        # An arena may have served before: the counters go on.
        self._filled, self._summed = (arena.value(arena.local_index, w) for w in (FILLED, SUMMED))
        self._ready, self._taken = arena.value(0, READY), arena.value(arena.local_index, TAKEN)

    def local_bucket(self, bucket: int) -> torch.Tensor:
        """Where this worker's gradients of a bucket go, and where their sum will be."""
        return self._slots[bucket][self._arena.local_index]

    def owned_range(self, bucket: int) -> slice:
        """What of a bucket this member adds up."""
        return self._pieces[bucket]

    def reduced_bucket(self, bucket: int) -> torch.Tensor:
        """Where the sums of a bucket lie."""
        return self._slots[bucket][0]

    def used_parameters(self, bucket: int) -> list[bool] | None:
        """By parameter: has any member given it a gradient? None is yes for all."""
        assert self._flags is not None
        count = self._flags[bucket]
        told = torch.stack([slot[-count:] for slot in self._slots[bucket]]).amax(0)
        return None if bool(told.all()) else [flag > 0 for flag in told.tolist()]

    def finish_update(self) -> None:
        """This member is done with its pieces; wait until all are."""
        self._updated = self._arena.increment(UPDATED)
        self._arena.wait_for_all(UPDATED, self._updated)

    def mark_filled(self) -> None:
        """The next bucket is there."""
        self._filled = self._arena.increment(FILLED)

    def finish(self) -> None:
        """Sum all buckets, which everybody fills; raises PeerLost."""
        arena, buckets = self._arena, len(self._slots)
        for bucket, slots in enumerate(self._slots):
            arena.wait_for_all(FILLED, self._filled - (buckets - 1 - bucket))
            self._add_piece(bucket, slots)
            self._summed = arena.increment(SUMMED)
        if self._flags is not None:
            return
        arena.wait_for_all(SUMMED, self._summed)
        if self._machines > 1:
            self._exchange_machines()

    def _add_piece(self, bucket: int, slots: list[torch.Tensor]) -> None:
        piece = self._pieces[bucket]
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
        """The sum of this machine is in its first member's slot."""
        arena = self._arena
        for slots in self._slots:
            if arena.local_index == 0:
                dist.all_reduce(slots[0], group=self._leaders)
                self._ready = arena.increment(READY)
            else:
                self._ready += 1
                arena.wait_for(0, READY, self._ready)
                slots[arena.local_index].copy_(slots[0])
            self._taken = arena.increment(TAKEN)
        if arena.local_index == 0:
            # Its next gradients would overwrite what the others still copy.
            arena.wait_for_all(TAKEN, self._taken)


def _cut(count: int, parts: int) -> list[slice]:
    """Pieces that begin at cache lines, for any size of number."""
    lines = -(-count // ALIGNED)
    edges = [min(count, lines * p // parts * ALIGNED) for p in range(parts + 1)]
    return [slice(a, b) for a, b in pairwise(edges)]


def _align(nbytes: int) -> int:
    return -(-nbytes // ALIGNED) * ALIGNED
