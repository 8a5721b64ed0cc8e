"""Shared-memory segments: files in /dev/shm, mapped by several processes of one user.

Nothing is left behind: a segment's name is removed as soon as all of them have opened it.

Processes synchronize by 64-bit words in a segment. Each word has one writer and is read by others,
so plain loads and stores suffice on x86-64 (see `shm_domain_id`). Words of different writers belong
on different cache lines. A waiter sleeps in the kernel (Linux futex) and uses no processor time.
The futex compares the lower 32 bits of a word, which come first in memory because x86-64 is
little-endian.
"""

import ctypes
import mmap
import os
import platform
import re
import secrets
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from paceline.errors import WireError

SHM_DIR = Path("/dev/shm")
CACHE_LINE = 64
"""Bytes per cache line: two processes should not write to the same one."""
PAGE_BYTES = 4096
WORD_BYTES = 8
WORDS_PER_LINE = CACHE_LINE // WORD_BYTES
LIVENESS_CHECK_S = 0.1
"""Longest time that a dead process goes unnoticed by a waiter."""
_FUTEX, _WAIT, _WAKE = 202, 0, 1
_ALL_WAITERS = 1 << 30
_LIBC = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None
_NAME = re.compile(r"paceline-[0-9a-f]{32}")


def round_up(nbytes: int, unit: int = PAGE_BYTES) -> int:
    return -(-nbytes // unit) * unit


def shm_domain_id() -> str | None:
    """Returns an identity shared by processes that can share memory; None if none can.

    Requires Linux on x86-64, where other processes see stores in the order in which they were
    made: plain stores from Python rely on it. Processes in different network namespaces count as
    different machines.
    """
    if sys.platform != "linux" or platform.machine() != "x86_64" or not SHM_DIR.is_dir():
        return None
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        places = [os.stat(p) for p in (SHM_DIR, "/proc/self/ns/net", "/proc/self/ns/pid")]
    except OSError:
        return None  # A container hides them, so hosts cannot be distinguished.
    return f"{boot}/" + "/".join(f"{place.st_dev}-{place.st_ino}" for place in places)


def create_segment(nbytes: int) -> str:
    """Creates zeros that only this user can open; returns the name. Raises OSError without room."""
    name = f"paceline-{secrets.token_hex(16)}"
    handle = os.open(SHM_DIR / name, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
    try:
        # Otherwise a full file system would kill the process when it first touches a page.
        os.posix_fallocate(handle, 0, nbytes)
    except OSError:
        unlink_segment(name)
        raise
    finally:
        os.close(handle)
    return name


def open_segment(name: str, nbytes: int) -> mmap.mmap:
    """Maps a segment; raises WireError if the name, which may be a peer's, is not a segment's."""
    if not _NAME.fullmatch(name):
        raise WireError(f"shared memory {name!r} was not created by Paceline")
    handle = os.open(SHM_DIR / name, os.O_RDWR | os.O_NOFOLLOW)
    try:
        if os.fstat(handle).st_size < nbytes:
            raise WireError(
                f"shared memory has {os.fstat(handle).st_size} bytes, expected {nbytes}"
            )
        return mmap.mmap(handle, nbytes)
    finally:
        os.close(handle)


def unlink_segment(name: str) -> None:
    """Removes a segment's name; the memory is freed when the last process unmaps it."""
    (SHM_DIR / name).unlink(missing_ok=True)


class Words:
    """The words on some cache lines of a segment, numbered from 0."""

    def __init__(self, memory: mmap.mmap, *, first_line: int = 0, lines: int = 1) -> None:
        start = first_line * CACHE_LINE
        self.values = memoryview(memory)[start : start + lines * CACHE_LINE].cast("q")
        """May be assigned by their writer, which wakes no waiter."""
        # The address is valid as long as the mapping exists.
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(memory)) + start

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
        """Like `wait`, until a counter has reached `until`; first reads it `spin_reads` times."""
        words = self.values
        for _ in range(spin_reads):
            if words[index] >= until:
                return True
        return self.wait(index, lambda: words[index] >= until, deadline=deadline, alive=alive)

    def wait(
        self, index: int, done: Callable[[], bool], *, deadline: float, alive: Callable[[], None]
    ) -> bool:
        """Waits for a condition, tested whenever the word changes; returns False at the deadline.

        Calls `alive` about every `LIVENESS_CHECK_S`, even if the word keeps changing; it raises if
        the process that is waited for is gone. `deadline` is on the clock of `time.monotonic`.
        """
        checked = time.monotonic()
        while True:
            seen = self.values[index]
            if done():
                return True
            now = time.monotonic()
            if now >= checked + LIVENESS_CHECK_S:
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
        value: int = owner.words.values[self.index]
        return value

    def __set__(self, owner: Any, value: int) -> None:
        owner.words.values[self.index] = value


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
