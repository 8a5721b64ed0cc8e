"""Decoded arrays kept on disk, because unpacking an archive takes longer than reading them.

An entry is a folder of .npy files, named after the archive's size and time of change, under
`~/.cache/paceline/decoded`. It may be deleted at any time. Readers map the files, so that the
processes of one machine share the memory. Without a folder to write to, everything still works.
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
    """The name of the entry for an archive as it now is: another size or time, another entry."""
    status = archive.stat()
    return f"{data_set}-{status.st_size}-{status.st_mtime_ns}"


def load_or_build(
    entry: str,
    names: tuple[str, ...],
    *,
    build: Callable[[], Arrays],
    fits: Callable[[Arrays], bool],
) -> Arrays:
    """The arrays of an entry; built, and kept, if they are absent, cut off or do not fit.

    Of several processes that ask at once, one builds and the others wait for it. Raises only what
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
    # Read back rather than kept: mapped pages are shared and can be dropped, built ones cannot.
    return _fetch(folder, names, fits) or built


def root() -> Path:
    return Path(os.path.expanduser("~/.cache/paceline/decoded"))


def _fetch(folder: Path, names: tuple[str, ...], fits: Callable[[Arrays], bool]) -> Arrays | None:
    arrays: Arrays = {}
    for name in names:
        path = folder / f"{name}.npy"
        try:
            mapped = np.load(path, mmap_mode="r", allow_pickle=False)
            whole = path.stat().st_size == mapped.offset + mapped.nbytes
        except Exception:
            # Whatever is wrong with a cached file, the remedy is the same: build it anew.
            return None
        if mapped.dtype != np.uint8 or not whole:
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
            # A folder can only be renamed onto an empty one, so a broken entry goes first.
            folder.rename(broken)
        fresh.rename(folder)
    finally:
        shutil.rmtree(fresh, ignore_errors=True)
        shutil.rmtree(broken, ignore_errors=True)


@contextmanager
def build_lock(folder: Path) -> Iterator[None]:
    """Let one process at a time build an entry; where no lock can be had, go on without."""
    with ExitStack() as stack:
        with suppress(OSError):
            folder.parent.mkdir(parents=True, exist_ok=True)
            stream = stack.enter_context((folder.parent / f".{folder.name}.lock").open("w"))
            # The lock ends with the process, so a builder that dies leaves nobody waiting.
            fcntl.flock(stream, fcntl.LOCK_EX)
        yield
