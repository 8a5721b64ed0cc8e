"""64-bit words in shared memory, and waiting for them to change.

Each word has one writer and is read by others, so plain loads and stores suffice on x86-64 (see
`shm_domain_id`). Words of different writers belong on different cache lines. A waiter sleeps in the
kernel (Linux futex) and uses no processor time. The futex compares the lower 32 bits of a word,
which come first in memory because x86-64 is little-endian.
"""

from __future__ import annotations

import ctypes
import mmap
import sys
import time
from collections.abc import Callable
from typing import Any

from paceline.comm.shm.segment import CACHE_LINE

WORD_BYTES = 8
WORDS_PER_LINE = CACHE_LINE // WORD_BYTES
LIVENESS_CHECK_S = 0.1
"""Longest time that a dead process goes unnoticed by a waiter."""

_FUTEX, _WAIT, _WAKE = 202, 0, 1
_ALL_WAITERS = 1 << 30
_LIBC = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None


class Words:
    """The words on some cache lines of a segment, numbered from 0."""

    def __init__(self, memory: mmap.mmap, *, first_line: int = 0, lines: int = 1) -> None:
        start = first_line * CACHE_LINE
        self._words = memoryview(memory)[start : start + lines * CACHE_LINE].cast("q")
        # The address is valid as long as the mapping exists.
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(memory)) + start

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
        _call_futex(self._address + index * WORD_BYTES, _WAKE, _ALL_WAITERS, None)

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
            futex_wait(self._address + index * WORD_BYTES, seen, timeout_s)


class SharedWord:
    """A word as an attribute of an object with `words`; assigning to it wakes no waiter."""

    def __init__(self, index: int) -> None:
        self.index = index

    def __get__(self, owner: Any, kind: type | None = None) -> int:
        value: int = owner.words.load(self.index)
        return value

    def __set__(self, owner: Any, value: int) -> None:
        owner.words.store(self.index, value)


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


def futex_wait(address: int, value: int, seconds: float) -> int:
    """Sleeps while the word has the value, up to a limit; returns 0, or the errno that ended it."""
    limit = ctypes.byref(_Timespec(int(seconds), int(seconds % 1 * 1e9)))
    return _call_futex(address, _WAIT, value, limit)


def _call_futex(address: int, operation: int, value: int, limit: object) -> int:
    assert _LIBC is not None
    place = ctypes.c_void_p(address)
    # The kernel compares 32 bits without a sign.
    word = ctypes.c_uint32(value & 0xFFFFFFFF)
    if _LIBC.syscall(_FUTEX, place, operation, word, limit, None, 0) < 0:
        return ctypes.get_errno()
    return 0
