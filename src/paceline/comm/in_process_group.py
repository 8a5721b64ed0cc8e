"""Collectives among threads of one process, with the interface of `CollectiveGroup`.

Used where several real runners live in one process: the twin, and tests of runners. Every member
is a thread. A collective completes when the last member arrives; sums are formed in rank order, so
results do not depend on scheduling.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from paceline.comm.process_group import CollectiveGroup, SharedMemoryGroup
from paceline.errors import PeerLost

TIMEOUT_S = 300.0


class _Rendezvous:
    """Exchange of tensors between the members of a group, one collective at a time."""

    def __init__(self, ranks: Sequence[int], timeout_s: float) -> None:
        self.ranks = tuple(ranks)
        self._tensors: dict[int, torch.Tensor] = {}
        self._barrier = threading.Barrier(len(self.ranks), timeout=timeout_s)

    def run(
        self,
        rank: int,
        tensor: torch.Tensor,
        combine: Callable[[list[torch.Tensor]], list[torch.Tensor]],
    ) -> list[torch.Tensor]:
        """Hands in a tensor; returns what `combine` makes of all of them, in rank order.

        Raises PeerLost if another member does not arrive within the deadline.
        """
        self._tensors[rank] = tensor
        try:
            self._barrier.wait()
            result = combine([self._tensors[r] for r in self.ranks])
            # No member may change its tensor before all members have read it.
            self._barrier.wait()
        except threading.BrokenBarrierError:
            raise PeerLost(f"worker {rank}: another member left a collective") from None
        return result

    def abort(self) -> None:
        self._barrier.abort()


class InProcessGroup(CollectiveGroup):
    """One member's view of a group of threads."""

    def __init__(self, rank: int, rendezvous: _Rendezvous, shared: _Subgroups) -> None:
        super().__init__(rank, len(rendezvous.ranks))
        self._rendezvous = rendezvous
        self._subgroups = shared

    @classmethod
    def create(cls, size: int, timeout_s: float = TIMEOUT_S) -> list[InProcessGroup]:
        """One group with `size` members, in rank order."""
        whole, shared = _Rendezvous(range(size), timeout_s), _Subgroups(timeout_s)
        return [cls(rank, whole, shared) for rank in range(size)]

    def abort(self) -> None:
        """Makes all waiting members raise PeerLost; call it when one of them failed."""
        self._rendezvous.abort()
        self._subgroups.abort()

    def new_subgroup(self, groups: tuple[tuple[int, ...], ...]) -> InProcessGroup:
        mine = next(group for group in groups if self.rank in group)
        return InProcessGroup(self.rank, self._subgroups.get(mine), self._subgroups)

    def shared_memory(self, slot_bytes: int, use: str = "gradients") -> SharedMemoryGroup | str:
        return "the workers are threads of one process"

    def all_reduce(self, tensor: torch.Tensor) -> None:
        self._replace(tensor, lambda tensors: sum_in_order(tensors))

    def all_reduce_async(self, tensor: torch.Tensor) -> dist.Work | None:
        self.all_reduce(tensor)
        return None

    def all_reduce_max(self, tensor: torch.Tensor) -> None:
        self._replace(tensor, lambda tensors: torch.stack(tensors).amax(0))

    def all_reduce_max_async(self, tensor: torch.Tensor) -> dist.Work | None:
        self.all_reduce_max(tensor)
        return None

    def broadcast(self, tensor: torch.Tensor, source: int = 0) -> None:
        index = self._rendezvous.ranks.index(source)
        self._replace(tensor, lambda tensors: tensors[index].clone())

    def broadcast_any_layout(self, tensor: torch.Tensor, source: int = 0) -> None:
        self.broadcast(tensor.detach(), source)

    def all_gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        if self.size == 1:
            return [tensor]
        return self._rendezvous.run(self.rank, tensor, lambda ts: [t.clone() for t in ts])

    def isend(self, tensor: torch.Tensor, rank: int, tag: int) -> dist.Work:
        raise NotImplementedError("an in-process group does not support point-to-point messages")

    def irecv(self, tensor: torch.Tensor, rank: int, tag: int) -> dist.Work:
        raise NotImplementedError("an in-process group does not support point-to-point messages")

    def barrier(self) -> None:
        if self.size > 1:
            self._rendezvous.run(self.rank, torch.empty(0), lambda tensors: tensors)

    def destroy(self) -> None:
        return

    def _replace(
        self, tensor: torch.Tensor, combine: Callable[[list[torch.Tensor]], torch.Tensor]
    ) -> None:
        if self.size > 1:
            result = self._rendezvous.run(self.rank, tensor, lambda tensors: [combine(tensors)])
            # Every member computes the same result from the same tensors.
            tensor.copy_(result[0])


class _Subgroups:
    """Rendezvous of the subgroups, shared by all members."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._lock = threading.Lock()
        self._made: dict[tuple[int, ...], _Rendezvous] = {}

    def get(self, ranks: tuple[int, ...]) -> _Rendezvous:
        with self._lock:
            if ranks not in self._made:
                self._made[ranks] = _Rendezvous(ranks, self._timeout_s)
            return self._made[ranks]

    def abort(self) -> None:
        with self._lock:
            for rendezvous in self._made.values():
                rendezvous.abort()


def sum_in_order(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    total = tensors[0].clone()
    for tensor in tensors[1:]:
        total += tensor
    return total
