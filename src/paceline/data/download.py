"""Downloads the published files of named datasets, and lists which of them are present."""

import hashlib
import os
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

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
    gets its name only after its size and checksum have been verified. Raises DataError.
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
    size = PUBLISHED[files.entry.name, path.name].size
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        for attempt in range(1, ATTEMPTS + 1):
            try:
                digest = _copy(url, partial, lambda done: report(path.name, done, size))
                break
            except urllib.error.HTTPError as error:
                raise DataError(f"{url}: the server answered {error.code} {error.reason}") from None
            except (OSError, ValueError) as error:
                if attempt == ATTEMPTS:
                    reason = getattr(error, "reason", error)
                    raise DataError(f"{url}: cannot be downloaded ({reason})") from None
        files.check_digest(url, path.name, partial.stat().st_size, digest)
        if path.name in cifar.ARCHIVES:
            cifar.unpack(files, partial)  # The archive has no published MD5, its files do.
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def _copy(url: str, path: Path, report: Callable[[int], None]) -> str:
    """Writes the contents of a URL to a file; returns their MD5."""
    digest = hashlib.md5(usedforsecurity=False)
    done = 0
    with urllib.request.urlopen(url, timeout=TIMEOUT_S) as stream, path.open("wb") as target:
        expected = stream.headers.get("Content-Length")
        while chunk := stream.read(CHUNK_BYTES):
            digest.update(chunk)
            target.write(chunk)
            done += len(chunk)
            report(done)
    if expected is not None and done != int(expected):
        raise OSError(f"the connection ended after {done:,} of {int(expected):,} bytes")
    return digest.hexdigest()


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
