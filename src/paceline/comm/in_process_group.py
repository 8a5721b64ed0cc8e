"""Collectives among threads of one process, with the interface of `CollectiveGroup`.

Used where several real runners live in one process: the twin, and tests of runners. Every member
is a thread. A collective completes when the last member arrives; sums are formed in rank order, so
results do not depend on scheduling.
"""

from __future__ import annotations

import functools
import queue
import threading
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import TypeVar, cast

import torch
import torch.distributed as dist

from paceline.comm.process_group import CollectiveGroup, SharedMemoryGroup
from paceline.errors import PeerLost

T = TypeVar("T")
Ranks = tuple[int, ...]
Meetings = dict[Ranks, tuple[threading.Barrier, dict[int, torch.Tensor]]]
"""A barrier and the tensors of the collective in progress, by group of ranks."""
Mailboxes = dict[tuple[int, int, int], "queue.SimpleQueue[torch.Tensor]"]
"""Messages that were sent and not yet received, by sender, receiver and tag."""


class _Transfer:
    """A message in the form of torch's `Work`."""

    def __init__(self, complete: Callable[[], None] = lambda: None) -> None:
        self._complete = complete

    def wait(self) -> None:
        self._complete()


class InProcessGroup(CollectiveGroup):
    """One member's view of a group of threads."""

    def __init__(
        self,
        rank: int,
        ranks: Ranks,
        timeout_s: float,
        meetings: Meetings,
        mailboxes: Mailboxes,
        machines: Sequence[Ranks] | None = None,
    ) -> None:
        """`meetings` and `mailboxes` are shared by all members; the first one creates each."""
        super().__init__(rank, len(ranks))
        self._mailboxes = mailboxes
        self._machines = [list(m) for m in machines or [(each,) for each in ranks]]
        self._ranks, self._timeout_s, self._meetings = ranks, timeout_s, meetings
        barrier = threading.Barrier(len(ranks), timeout=timeout_s)
        self._barrier, self._tensors = meetings.setdefault(ranks, (barrier, {}))

    @classmethod
    def create(
        cls, size: int, timeout_s: float, machines: Sequence[Ranks] | None = None
    ) -> list[InProcessGroup]:
        """One group with `size` members, in rank order, each on its own machine by default."""
        meetings: Meetings = {}
        mailboxes: Mailboxes = defaultdict(queue.SimpleQueue)
        everyone = tuple(range(size))
        return [cls(rank, everyone, timeout_s, meetings, mailboxes, machines) for rank in everyone]

    def abort(self) -> None:
        """Makes all waiting members raise PeerLost; call it when one of them failed."""
        for barrier, _ in list(self._meetings.values()):
            barrier.abort()

    def new_subgroup(self, groups: tuple[Ranks, ...]) -> InProcessGroup:
        mine = next(group for group in groups if self.rank in group)
        return InProcessGroup(self.rank, mine, self._timeout_s, self._meetings, self._mailboxes)

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
        self._mailboxes[self.rank, rank, tag].put(tensor.clone())
        return cast(dist.Work, _Transfer())

    def irecv(self, tensor: torch.Tensor, rank: int, tag: int) -> dist.Work:
        def receive() -> None:
            try:
                found = self._mailboxes[rank, self.rank, tag].get(timeout=self._timeout_s)
            except queue.Empty:
                text = f"worker {self.rank}: no message of worker {rank}"
                raise PeerLost(f"{text} within {self._timeout_s:g} s") from None
            tensor.copy_(found)

        return cast(dist.Work, _Transfer(receive))

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
