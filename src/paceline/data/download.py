"""Downloads the published files of named datasets, and lists which of them are present."""

import fcntl
import hashlib
import http.client
import os
import shutil
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from paceline.data import cifar
from paceline.data.catalog import (
    ENTRIES,
    PUBLISHED,
    DatasetFiles,
    check_name,
    find_dataset_files,
)
from paceline.data.named_datasets import PLAIN_FILES, describe_files, locate
from paceline.data.stores import ATTEMPTS, join_url
from paceline.errors import DataError, UsageError

SOURCES = {
    "mnist": "https://ossci-datasets.s3.amazonaws.com/mnist",
    "fashion-mnist": "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com",
    "kmnist": "http://codh.rois.ac.jp/kmnist/dataset/kmnist",
    "cifar10": "https://www.cs.toronto.edu/~kriz",
    "adult": "https://archive.ics.uci.edu/ml/machine-learning-databases/adult",
    "tinyshakespeare": (
        "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare"
    ),
}
"""Directory of the published files, by dataset. Checksums decide, so any mirror will do."""
TIMEOUT_S = 30.0
CHUNK_BYTES = 1 << 18
RANGE_NOT_SATISFIABLE = 416

Report = Callable[[str, int, int], None]
"""Receives the name of a file, the bytes so far and its size."""


def published_files(name: str) -> tuple[str, ...]:
    """Returns the files to download; empty for a dataset that is part of the package."""
    if name == "cifar10":
        return cifar.ARCHIVES[:1]
    if name in PLAIN_FILES:
        return PLAIN_FILES[name]
    return tuple(file for data_set, file in PUBLISHED if data_set == name and file.endswith(".gz"))


def download(
    name: str, data_dir: Path | None, source: str | None, report: Report
) -> Iterator[tuple[Path, bool]]:
    """Yields each file of a dataset, and whether it was downloaded or already present.

    `source` replaces the published location: a URL or directory with the same file names. A file
    gets its name only after its size and checksum have been verified; until then it is hidden, and
    the next call continues an interrupted download. Raises DataError.
    """
    name = check_name(name)
    wanted = published_files(name)
    if not wanted:
        raise UsageError(f"{name} is part of the package; there is nothing to download")
    base = source or SOURCES[name]
    if "://" not in base:
        base = Path(base).expanduser().absolute().as_uri()
    files = find_dataset_files(name, data_dir)
    folder = files.folders[0]
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DataError(f"{folder}: cannot be created ({error.strerror})") from None
    for file in wanted:
        path = folder / file
        present = path.is_file() and _is_published(files, path)
        if not present:
            _fetch(files, join_url(base, file), path, report)
        yield path, not present
    locate(name, data_dir)


def _is_published(files: DatasetFiles, path: Path) -> bool:
    try:
        files.read_checked(path)
    except DataError:
        return False
    return True


def _fetch(files: DatasetFiles, url: str, path: Path, report: Report) -> None:
    """Downloads one file; continues one that was interrupted, also by another process."""
    size = PUBLISHED[files.entry.name, path.name].size
    partial = path.with_name(f".{path.name}.partial")
    with _open_locked(partial) as target:
        earlier = target.seek(0, os.SEEK_END)
        _check_space(path, size - earlier)
        while True:
            digest = _retry(url, target, size, lambda done: report(path.name, done, size))
            try:
                files.check_digest(url, path.name, target.tell(), digest)
                if path.name in cifar.ARCHIVES:
                    cifar.unpack(files, partial)  # The archive has no published MD5, its files do.
            except DataError:
                # A wrong file is never continued. What was left may have been of another source.
                target.truncate(0)
                if not earlier:
                    partial.unlink()
                    raise
                earlier = 0
                continue
            partial.replace(path)
            return


@contextmanager
def _open_locked(partial: Path) -> Iterator[BinaryIO]:
    """Opens a partial file for appending; an empty one is removed at the end."""
    try:
        target = partial.open("a+b", buffering=0)
    except OSError as error:
        raise DataError(f"{partial.parent}: cannot be written ({error.strerror})") from None
    with target:
        try:
            fcntl.flock(target, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise DataError(
                f"{partial}: another process is downloading it; wait until it has finished"
            ) from None
        try:
            yield target
        finally:
            if target.seek(0, os.SEEK_END) == 0:
                partial.unlink(missing_ok=True)


def _check_space(path: Path, needed: int) -> None:
    free = shutil.disk_usage(path.parent).free
    if free < needed:
        raise DataError(
            f"{path}: needs {needed:,} bytes, but only {free:,} are free; choose another directory "
            "with --data-dir"
        )


def _retry(url: str, target: BinaryIO, size: int, report: Callable[[int], None]) -> str:
    """Completes the file and returns its MD5. Raises DataError; what has arrived is kept."""
    for attempt in range(1, ATTEMPTS + 1):
        try:
            return _complete(url, target, size, report)
        except urllib.error.HTTPError as error:
            raise DataError(f"{url}: the server answered {error.code} {error.reason}") from None
        except (OSError, ValueError, http.client.HTTPException) as error:
            if attempt == ATTEMPTS:
                reason = getattr(error, "reason", error) or type(error).__name__
                advice = "; run the command again to continue" if target.tell() else ""
                raise DataError(f"{url}: cannot be downloaded ({reason}){advice}") from None
    raise AssertionError


def _complete(url: str, target: BinaryIO, size: int, report: Callable[[int], None]) -> str:
    """Appends what is missing, if the server can send a part, and returns the MD5 of the file."""
    digest = hashlib.md5(usedforsecurity=False)
    done = target.seek(0, os.SEEK_END)
    if done > size:
        done = _restart(target)
    target.seek(0)
    while chunk := target.read(CHUNK_BYTES):
        digest.update(chunk)
    if done == size:
        return digest.hexdigest()
    request = urllib.request.Request(url)
    if done:
        request.add_header("Range", f"bytes={done}-")
    try:
        stream = urllib.request.urlopen(request, timeout=TIMEOUT_S)
    except urllib.error.HTTPError as error:
        if error.code != RANGE_NOT_SATISFIABLE or not done:
            raise
        _restart(target)
        raise OSError("the server has another file than before") from None
    with stream:
        continues = (stream.headers.get("Content-Range") or "").startswith(f"bytes {done}-")
        if done and not (stream.status == http.client.PARTIAL_CONTENT and continues):
            done, digest = _restart(target), hashlib.md5(usedforsecurity=False)
        length = stream.headers.get("Content-Length")
        expected = None if length is None else done + int(length)
        while (chunk := stream.read1(CHUNK_BYTES)) and done <= size:
            digest.update(chunk)
            _write(target, chunk)
            done += len(chunk)
            report(done)
    if expected is not None and done < min(expected, size):
        raise OSError(f"the connection ended after {done:,} of {expected:,} bytes")
    return digest.hexdigest()


def _restart(target: BinaryIO) -> int:
    target.truncate(0)
    return target.seek(0)


def _write(target: BinaryIO, chunk: bytes) -> None:
    """Raises DataError for a full disk, which another attempt does not help."""
    view = memoryview(chunk)
    try:
        while view:
            view = view[target.write(view) :]
    except OSError as error:
        raise DataError(
            f"{target.name}: cannot be written ({error.strerror}); choose another directory with "
            "--data-dir"
        ) from None


@dataclass(frozen=True)
class Presence:
    """State of a named dataset on this machine."""

    name: str
    state: str
    """complete, partial, missing, damaged or bundled."""
    where: str
    note: str


def list_datasets(data_dir: Path | None) -> list[Presence]:
    """Describes all named datasets by the names, sizes and headers of their files."""
    return [_describe(name, find_dataset_files(name, data_dir)) for name in sorted(ENTRIES)]


def _describe(name: str, files: DatasetFiles) -> Presence:
    wanted = published_files(name)
    if not wanted:
        return Presence(name, "bundled", "", "part of the package")
    try:
        paths, notes = describe_files(name, files)
    except DataError as error:
        found = [file for file in wanted if files.find(file)]
        note = str(error).removeprefix(f"{name}: ")
        if not found:
            return Presence(name, "missing", "", f"run `paceline data get {name}`")
        state = "partial" if len(found) < len(wanted) else "damaged"
        return Presence(name, state, str(files.folders[0]), note)
    note = "; ".join(note.removeprefix(f"{name}: ") for note in notes)
    return Presence(name, "partial" if notes else "complete", str(paths[0].parent), note)
