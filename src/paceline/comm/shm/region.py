"""Memory that the processes of one machine share, and words in it to wait on.

Every member has a slot of equal size and a few words that it alone writes: counters, which only
grow. Waiting is the kernel's (futex), so that a waiter takes no processor time; every wait has a
deadline, and a member that died meanwhile is named.
"""

from __future__ import annotations

import errno
import mmap
import os
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from paceline.comm.shm import futex
from paceline.comm.shm.segment import open_segment
from paceline.errors import PeerLost

CACHE_LINE = 64
"""Bytes of a processor's cache line: no two members write to one."""
PAGE_BYTES = 4096
PID_WORD = 15
"""The last word of a member's line: its process."""
SPIN_READS = 200
"""Looks at a word before the kernel is asked: others often are only microseconds behind."""
LIVENESS_CHECK_S = 0.1
"""How long a dead member can go unnoticed."""


class SharedRegion:
    """One machine's shared memory, as one of its members sees it."""

    def __init__(
        self,
        memory: mmap.mmap,
        members: Sequence[int],
        rank: int,
        slot_bytes: int,
        timeout_s: float,
    ) -> None:
        self.members = list(members)
        """Ranks of the processes here, in order."""
        self.local_index = self.members.index(rank)
        """This process among them."""
        self._memory = memory
        self._slot_bytes = slot_bytes
        self._timeout_s = timeout_s
        self._address = futex.address_of(memory)
        self._words = memoryview(memory)[: len(self.members) * CACHE_LINE].cast("i")
        self._words[self.local_index * CACHE_LINE // 4 + PID_WORD] = os.getpid()
        cores = len(os.sched_getaffinity(0))
        self._spins = SPIN_READS if len(self.members) <= cores else 0

    @staticmethod
    def size_for(members: int, slot_bytes: int) -> int:
        return _round_up(members * CACHE_LINE) + members * _round_up(slot_bytes)

    @classmethod
    def open(
        cls, name: str, members: Sequence[int], rank: int, slot_bytes: int, timeout_s: float
    ) -> SharedRegion:
        memory = open_segment(name, cls.size_for(len(members), slot_bytes))
        return cls(memory, members, rank, slot_bytes, timeout_s)

    # ---- slots --------------------------------------------------------------------------------

    def slot_tensor(self, place: int, offset: int, count: int, dtype: torch.dtype) -> torch.Tensor:
        """Part of a member's slot."""
        start = _round_up(len(self.members) * CACHE_LINE) + place * _round_up(self._slot_bytes)
        return torch.frombuffer(self._memory, dtype=dtype, count=count, offset=start + offset)

    # ---- words --------------------------------------------------------------------------------

    def increment(self, word: int) -> int:
        """Add one to an own counter, and wake whoever waits for it; what it is now."""
        index = self.local_index * CACHE_LINE // 4 + word
        value = _wrap(self._words[index] + 1)
        self._words[index] = value
        futex.wake(self._address + 4 * index)
        return value

    def value(self, place: int, word: int) -> int:
        return self._words[place * CACHE_LINE // 4 + word]

    def wait_for_all(self, word: int, target: int) -> None:
        """Until everybody's counter has reached the target; raises PeerLost."""
        deadline = time.monotonic() + self._timeout_s
        for place in range(len(self.members)):
            if place != self.local_index:
                self._await(place, word, target, deadline)

    def wait_for(self, place: int, word: int, target: int) -> None:
        self._await(place, word, target, time.monotonic() + self._timeout_s)

    def _await(self, place: int, word: int, target: int, deadline: float) -> None:
        words, index = self._words, place * CACHE_LINE // 4 + word
        for _ in range(self._spins):
            if _wrap(words[index] - target) >= 0:
                return
        while True:
            seen = words[index]
            if _wrap(seen - target) >= 0:
                return
            slept = futex.wait(self._address + 4 * index, seen, LIVENESS_CHECK_S)
            if slept == errno.ETIMEDOUT:
                self._check_alive(place)
                if time.monotonic() > deadline:
                    raise PeerLost(
                        f"worker {self.members[place]} did not come in {self._timeout_s:g} s"
                    )

    def _check_alive(self, place: int) -> None:
        pid = self._words[place * CACHE_LINE // 4 + PID_WORD]
        if pid == 0:
            return  # it has not come yet
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
        except OSError:
            state = "X"
        if state in "ZX":
            raise PeerLost(f"worker {self.members[place]} (process {pid}) is gone")


def _round_up(nbytes: int) -> int:
    return -(-nbytes // PAGE_BYTES) * PAGE_BYTES


def _wrap(value: int) -> int:
    """As a 32-bit number with a sign: counters may pass its largest."""
    return (value + (1 << 31)) % (1 << 32) - (1 << 31)
