"""Files of the machine's own memory, mapped by several processes of one user.

Nothing is left behind: their names are removed as soon as everybody has them open.
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

FOLDER = Path("/dev/shm")
_NAME = re.compile(r"paceline-[0-9a-f]{32}")


def shm_domain_id() -> str | None:
    """Equal for processes that can share memory and count as one machine; None where none can.

    Only on Linux on x86-64: there a store is seen by others in the order in which it was made,
    which plain stores from Python need. Processes in network namespaces of their own count as
    machines of their own.
    """
    if sys.platform != "linux" or platform.machine() != "x86_64" or not FOLDER.is_dir():
        return None
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        places = [os.stat(p) for p in (FOLDER, "/proc/self/ns/net", "/proc/self/ns/pid")]
    except OSError:
        return None  # a container that hides them: nobody can tell who is beside whom
    return f"{boot}/" + "/".join(f"{place.st_dev}-{place.st_ino}" for place in places)


def create_segment(nbytes: int) -> str:
    """A new file of zeros that only this user can open; OSError where there is no room."""
    name = f"paceline-{secrets.token_hex(16)}"
    handle = os.open(FOLDER / name, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
    try:
        # Otherwise a full file system would kill the process at the first touch of a page.
        os.posix_fallocate(handle, 0, nbytes)
    except OSError:
        unlink_segment(name)
        raise
    finally:
        os.close(handle)
    return name


def open_segment(name: str, nbytes: int) -> mmap.mmap:
    """Map what another process made; the name may come from the wire."""
    if not _NAME.fullmatch(name):
        raise WireError(f"shared memory named {name!r}: not one of ours")
    handle = os.open(FOLDER / name, os.O_RDWR | os.O_NOFOLLOW)
    try:
        if os.fstat(handle).st_size < nbytes:
            raise WireError(f"shared memory of {os.fstat(handle).st_size} bytes, {nbytes} expected")
        return mmap.mmap(handle, nbytes)
    finally:
        os.close(handle)


def unlink_segment(name: str) -> None:
    """Those who have it open keep it; nothing is left when the last of them ends."""
    (FOLDER / name).unlink(missing_ok=True)
