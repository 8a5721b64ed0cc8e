"""64-bit words in shared memory, and waiting for them to change.

Each word has one writer and is read by others, so plain loads and stores suffice on x86-64 (see
`shm_domain_id`). Words of different writers belong on different cache lines. A waiter sleeps in the
kernel (futex) and uses no processor time. The futex compares the lower 32 bits of a word, which
come first in memory because x86-64 is little-endian.
"""

from __future__ import annotations

import mmap
import time
from collections.abc import Callable

from paceline.comm.shm import futex
from paceline.comm.shm.segment import CACHE_LINE

WORD_BYTES = 8
WORDS_PER_LINE = CACHE_LINE // WORD_BYTES
LIVENESS_CHECK_S = 0.1
"""Longest time that a dead process goes unnoticed by a waiter."""


class Words:
    """The words on some cache lines of a segment, numbered from 0."""

    def __init__(self, memory: mmap.mmap, *, first_line: int = 0, lines: int = 1) -> None:
        start = first_line * CACHE_LINE
        self._words = memoryview(memory)[start : start + lines * CACHE_LINE].cast("q")
        self._address = futex.address_of(memory) + start

    def load(self, index: int) -> int:
        return self._words[index]

    def store(self, index: int, value: int) -> None:
        """Sets a word without waking its waiters."""
        self._words[index] = value

    def add(self, index: int, amount: int = 1) -> int:
        """Adds to a word that only this process writes; returns the new value. Wakes no waiter."""
        value = self._words[index] = self._words[index] + amount
        return value

    def wake(self, index: int) -> None:
        """Wakes all that wait for this word."""
        futex.wake(self._address + index * WORD_BYTES)

    def wait_for(
        self,
        index: int,
        until: int,
        *,
        deadline: float,
        alive: Callable[[], None],
        spin_reads: int = 0,
    ) -> bool:
        """Waits until a counter has reached `until`; returns False at the deadline.

        Reads it up to `spin_reads` times before it sleeps. See `wait` for `alive`.
        """
        words = self._words
        for _ in range(spin_reads):
            if words[index] >= until:
                return True
        return self.wait(index, lambda: words[index] >= until, deadline=deadline, alive=alive)

    def wait(
        self,
        index: int,
        done: Callable[[], bool],
        *,
        deadline: float,
        alive: Callable[[], None],
    ) -> bool:
        """Waits for a condition, tested whenever the word changes; returns False at the deadline.

        Calls `alive` about every `LIVENESS_CHECK_S`, even if the word keeps changing; it raises if
        the process that is waited for is gone. `deadline` is on the clock of `time.monotonic`.
        """
        checked: float | None = None
        while True:
            seen = self._words[index]
            if done():
                return True
            now = time.monotonic()
            if checked is None:
                checked = now
            elif now >= checked + LIVENESS_CHECK_S:
                checked = now
                alive()
            if now >= deadline:
                return False
            timeout_s = min(LIVENESS_CHECK_S, deadline - now)
            futex.wait(self._address + index * WORD_BYTES, seen, timeout_s)
