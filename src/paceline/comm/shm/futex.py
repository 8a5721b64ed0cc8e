"""Linux futex: sleeping on a 32-bit word of shared memory, and waking the sleepers."""

from __future__ import annotations

import ctypes
import mmap
import sys

_FUTEX, _WAIT, _WAKE = 202, 0, 1
_ALL_WAITERS = 1 << 30
_LIBC = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


def address_of(memory: mmap.mmap) -> int:
    """Returns the address of a mapping, valid as long as the mapping exists."""
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


def wait(address: int, value: int, seconds: float) -> int:
    """Sleeps while the word has the value, up to a limit; returns 0, or the errno that ended it."""
    limit = ctypes.byref(_Timespec(int(seconds), int(seconds % 1 * 1e9)))
    return _call(address, _WAIT, value, limit)


def wake(address: int) -> None:
    """Wakes all that sleep on the word."""
    _call(address, _WAKE, _ALL_WAITERS, None)


def _call(address: int, operation: int, value: int, limit: object) -> int:
    assert _LIBC is not None
    place = ctypes.c_void_p(address)
    # The kernel compares 32 bits without a sign.
    word = ctypes.c_uint32(value & 0xFFFFFFFF)
    if _LIBC.syscall(_FUTEX, place, operation, word, limit, None, 0) < 0:
        return ctypes.get_errno()
    return 0
