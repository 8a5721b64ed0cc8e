"""Waiting on words of shared memory, and waking those who do: the kernel's futex."""

from __future__ import annotations

import ctypes
import mmap
import sys

_FUTEX, _WAIT, _WAKE = 202, 0, 1
_EVERYBODY = 1 << 30
_LIBC = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


def address_of(memory: mmap.mmap) -> int:
    """Where a mapping begins, for as long as somebody keeps it."""
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


def wait(address: int, value: int, seconds: float) -> int:
    """Sleep while the 32-bit word there has the value, but not longer; 0, or why it ended early."""
    limit = ctypes.byref(_Timespec(int(seconds), int(seconds % 1 * 1e9)))
    return _call(address, _WAIT, value, limit)


def wake(address: int) -> None:
    """Everybody who waits on the word."""
    _call(address, _WAKE, _EVERYBODY, None)


def _call(address: int, operation: int, value: int, limit: object) -> int:
    assert _LIBC is not None
    place = ctypes.c_void_p(address)
    # A word with a sign is told as the kernel reads it, without.
    told = ctypes.c_uint32(value & 0xFFFFFFFF)
    if _LIBC.syscall(_FUTEX, place, operation, told, limit, None, 0) < 0:
        return ctypes.get_errno()
    return 0
