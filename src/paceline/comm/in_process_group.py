"""Collectives among threads of one process, with the interface of `CollectiveGroup`.

Used where several real runners live in one process: the twin, and tests of runners. Every member
is a thread. A collective completes when the last member arrives; sums are formed in rank order, so
results do not depend on scheduling.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import TypeVar

import torch
import torch.distributed as dist

from paceline.comm.process_group import CollectiveGroup, SharedMemoryGroup
from paceline.errors import PeerLost

T = TypeVar("T")
Ranks = tuple[int, ...]
Meetings = dict[Ranks, tuple[threading.Barrier, dict[int, torch.Tensor]]]
"""A barrier and the tensors of the collective in progress, by group of ranks."""


class InProcessGroup(CollectiveGroup):
    """One member's view of a group of threads."""

    def __init__(self, rank: int, ranks: Ranks, timeout_s: float, meetings: Meetings) -> None:
        """`meetings` are shared by all members; the first one creates each."""
        super().__init__(rank, len(ranks))
        self._ranks, self._timeout_s, self._meetings = ranks, timeout_s, meetings
        barrier = threading.Barrier(len(ranks), timeout=timeout_s)
        self._barrier, self._tensors = meetings.setdefault(ranks, (barrier, {}))

    @classmethod
    def create(cls, size: int, timeout_s: float) -> list[InProcessGroup]:
        """One group with `size` members, in rank order."""
        meetings: Meetings = {}
        return [cls(rank, tuple(range(size)), timeout_s, meetings) for rank in range(size)]

    def abort(self) -> None:
        """Makes all waiting members raise PeerLost; call it when one of them failed."""
        for barrier, _ in list(self._meetings.values()):
            barrier.abort()

    def new_subgroup(self, groups: tuple[Ranks, ...]) -> InProcessGroup:
        mine = next(group for group in groups if self.rank in group)
        return InProcessGroup(self.rank, mine, self._timeout_s, self._meetings)

    def shared_memory(self, slot_bytes: int, use: str = "gradients") -> SharedMemoryGroup | str:
        return "the workers are threads of one process"

    def all_reduce_async(self, tensor: torch.Tensor, *, largest: bool = False) -> None:
        combine = torch.maximum if largest else torch.add
        self._replace(tensor, lambda tensors: functools.reduce(combine, tensors))

    def broadcast(self, tensor: torch.Tensor, source: int = 0) -> None:
        index = self._ranks.index(source)
        self._replace(tensor, lambda tensors: tensors[index].clone())

    def all_gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        if self.size == 1:
            return [tensor]
        return self._meet(tensor, lambda tensors: [t.clone() for t in tensors])

    def isend(self, tensor: torch.Tensor, rank: int, tag: int) -> dist.Work:
        raise NotImplementedError("an in-process group does not support point-to-point messages")

    irecv = isend

    def barrier(self) -> None:
        if self.size > 1:
            self._meet(torch.empty(0), len)

    def _replace(
        self, tensor: torch.Tensor, combine: Callable[[list[torch.Tensor]], torch.Tensor]
    ) -> None:
        """Every member computes the same result from the same tensors."""
        if self.size > 1:
            tensor.copy_(self._meet(tensor, combine))

    def _meet(self, tensor: torch.Tensor, combine: Callable[[list[torch.Tensor]], T]) -> T:
        """Combines the tensors of all members, in rank order; raises PeerLost at the deadline."""
        self._tensors[self.rank] = tensor
        try:
            self._barrier.wait()
            result = combine([self._tensors[r] for r in self._ranks])
            # No member may change its tensor before all members have read it.
            self._barrier.wait()
        except threading.BrokenBarrierError:
            raise PeerLost(f"worker {self.rank}: another member left a collective") from None
        return result
