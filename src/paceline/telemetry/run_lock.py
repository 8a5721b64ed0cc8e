"""The lock of a run folder: one run at a time, and whether its process is alive.

`run.lock` is locked by the supervisor with flock, so the kernel releases it when the process ends,
however it ends. The file contains the process that holds it; it is removed when the run ends, and
remains if the supervisor was killed.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import socket
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from paceline.errors import UsageError

LOCK_FILE = "run.lock"
WATCHDOG_FILE = "watchdog.lock"
"""Held by the process that continues a detached run if its supervisor is killed."""
RETRY_S = 0.3
"""A reader that tests the lock holds it for an instant."""
_UNSUPPORTED = (errno.ENOTSUP, errno.ENOSYS, errno.ENOLCK, errno.EINVAL)


@dataclass(frozen=True)
class LockHolder:
    """The process that holds, or held, the lock of a run folder."""

    pid: int
    host: str

    def __str__(self) -> str:
        here = "" if self.host == socket.gethostname() else f" on {self.host}"
        return f"process {self.pid}{here}"


@contextlib.contextmanager
def held_lock(folder: Path, name: str) -> Iterator[None]:
    """Holds a lock in an existing folder. Raises UsageError if another process holds it."""
    descriptor = _acquire(folder, name)
    try:
        yield
    finally:
        # Unlinked before it is released: no other process holds a lock on this file.
        if _is_current(descriptor, folder / name):
            (folder / name).unlink(missing_ok=True)
        os.close(descriptor)


@contextlib.contextmanager
def locked_folder(folder: Path) -> Iterator[bool]:
    """Holds the lock of a run folder, and yields whether the folder was created for it.

    A folder that was created and is still empty at the end is removed. Raises UsageError if
    another run is in progress there, or if the folder cannot be created.
    """
    if folder.exists() and not folder.is_dir():
        raise UsageError(f"--out {folder} is a file; choose a directory")
    fresh = not folder.exists()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = contextlib.ExitStack()
        lock.enter_context(held_lock(folder, LOCK_FILE))
    except OSError as error:
        raise UsageError(
            f"--out {folder} cannot be written ({error.strerror}); choose another directory"
        ) from None
    try:
        yield fresh
    finally:
        lock.close()
        if fresh:
            with contextlib.suppress(OSError):
                folder.rmdir()


def _acquire(folder: Path, name: str) -> int:
    deadline = time.monotonic() + RETRY_S
    path = folder / name
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            if _try_lock(descriptor) and _is_current(descriptor, path):
                holder = LockHolder(os.getpid(), socket.gethostname())
                os.truncate(descriptor, 0)
                os.pwrite(descriptor, json.dumps(asdict(holder)).encode() + b"\n", 0)
                return descriptor
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)
        if time.monotonic() > deadline:
            raise UsageError(
                f"--out {folder}: a run is in progress there ({read_holder(folder) or 'unknown'});"
                " wait for its end, or choose another directory"
            )
        time.sleep(RETRY_S / 10)


def _try_lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in _UNSUPPORTED:
            raise
        # A file system without locks: runs are not protected from each other.
    return True


def _is_current(descriptor: int, path: Path) -> bool:
    """Returns whether the file has not been removed by its last holder in the meantime."""
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False


def read_holder(folder: Path, name: str = LOCK_FILE) -> LockHolder | None:
    """Returns the process named in the lock file; None without a readable one."""
    try:
        plain = json.loads((folder / name).read_text(encoding="utf-8"))
        return LockHolder(int(plain["pid"]), str(plain["host"]))
    except (OSError, ValueError, KeyError, TypeError):
        return None


def is_running(folder: Path, name: str = LOCK_FILE) -> bool:
    """Returns whether a supervisor, or another process, holds its lock in this folder."""
    try:
        descriptor = os.open(folder / name, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False
