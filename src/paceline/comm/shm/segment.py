"""Shared-memory segments: files in /dev/shm, mapped by several processes of one user.

Nothing is left behind: a segment's name is removed as soon as all of them have opened it.
"""

from __future__ import annotations

import mmap
import os
import platform
import re
import secrets
import sys
from pathlib import Path

from paceline.errors import WireError

SHM_DIR = Path("/dev/shm")
CACHE_LINE = 64
"""Bytes per cache line: two processes should not write to the same one."""
PAGE_BYTES = 4096
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
