"""Disk cache of decoded arrays, because unpacking an archive is slower than reading them.

An entry is a directory of .npy files, named after the archive's size and modification time, under
`~/.cache/paceline/decoded`. It may be deleted at any time. Readers memory-map the files, so that
the processes of one machine share the memory. If the directory is not writable, nothing is cached.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import numpy as np
import numpy.typing as npt

Arrays = dict[str, npt.NDArray[np.uint8]]


def name_entry(data_set: str, archive: Path) -> str:
    """Returns the cache key of an archive, from its size and modification time."""
    status = archive.stat()
    return f"{data_set}-{status.st_size}-{status.st_mtime_ns}"


def load_or_build(
    entry: str,
    names: tuple[str, ...],
    *,
    build: Callable[[], Arrays],
    fits: Callable[[Arrays], bool],
) -> Arrays:
    """Returns the arrays of an entry; builds and stores them if absent, truncated or invalid.

    If several processes request an entry, one builds it and the others wait. Raises only what
    `build` raises.
    """
    folder = root() / entry
    arrays = _fetch(folder, names, fits)
    if arrays is not None:
        return arrays
    with build_lock(folder):
        arrays = _fetch(folder, names, fits)
        if arrays is not None:
            return arrays
        built = build()
        with suppress(OSError):
            _store(folder, built)
    # Reads the arrays back: mapped pages are shared and evictable, the built ones are not.
    return _fetch(folder, names, fits) or built


def root() -> Path:
    return Path(os.path.expanduser("~/.cache/paceline/decoded"))


def _fetch(folder: Path, names: tuple[str, ...], fits: Callable[[Arrays], bool]) -> Arrays | None:
    arrays: Arrays = {}
    for name in names:
        path = folder / f"{name}.npy"
        try:
            mapped = np.load(path, mmap_mode="r", allow_pickle=False)
            complete = path.stat().st_size == mapped.offset + mapped.nbytes
        except Exception:
            # A cached file with any defect is rebuilt.
            return None
        if mapped.dtype != np.uint8 or not complete:
            return None
        arrays[name] = mapped.view(np.ndarray)
    return arrays if fits(arrays) else None


def _store(folder: Path, arrays: Arrays) -> None:
    folder.parent.mkdir(parents=True, exist_ok=True)
    fresh, broken = (
        Path(tempfile.mkdtemp(prefix=prefix, dir=folder.parent)) for prefix in (".new-", ".old-")
    )
    try:
        for name, array in arrays.items():
            np.save(fresh / f"{name}.npy", array, allow_pickle=False)
        if folder.exists():
            # A directory can only be renamed onto an empty one, so a broken entry is moved away
            # first.
            folder.rename(broken)
        fresh.rename(folder)
    finally:
        shutil.rmtree(fresh, ignore_errors=True)
        shutil.rmtree(broken, ignore_errors=True)


@contextmanager
def build_lock(folder: Path) -> Iterator[None]:
    """Lets one process at a time build an entry; proceeds without a lock if locking fails."""
    with ExitStack() as stack:
        with suppress(OSError):
            folder.parent.mkdir(parents=True, exist_ok=True)
            stream = stack.enter_context((folder.parent / f".{folder.name}.lock").open("w"))
            # The lock ends with the process, so that no process waits for a dead one.
            fcntl.flock(stream, fcntl.LOCK_EX)
        yield
