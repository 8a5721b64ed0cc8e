"""CIFAR-10, binary version: six files of records, loose or in the archive they come in.

A record is 3,073 bytes: a label, then 1,024 red, 1,024 green and 1,024 blue, row by row.
"""

from __future__ import annotations

import lzma
import tarfile
import zlib
from pathlib import Path

import numpy as np
import numpy.typing as npt

from paceline.data import array_cache
from paceline.data.dataset_files import DatasetFiles
from paceline.errors import DataError

CLASSES = 10
RECORD = 1 + 3 * 32 * 32
FOLDER = "cifar-10-batches-bin"
TRAIN = tuple(f"data_batch_{number}.bin" for number in range(1, 6))
TEST = ("test_batch.bin",)
ARCHIVES = ("cifar-10-binary.tar.gz", "cifar-10-binary.tar.xz")
PICKLED = ("cifar-10-batches-py", "cifar-10-python.tar.gz", "data_batch_1")

_ARRAYS = ("train_images", "train_labels", "test_images", "test_labels")

Bytes = npt.NDArray[np.uint8]
Arrays = dict[str, Bytes]
Files = dict[str, tuple[Path | str, bytes]]  # By file name: what to call it in an error, content.


def locate(shelf: DatasetFiles) -> tuple[Path, ...]:
    """The six loose files if the first is there, else the archive.

    Raises DataError if they are missing, if only the pickled version is there, or for a file that
    is not of the published size, of whole records, or the archive its name says.
    """
    if _find_loose(shelf, TRAIN[0]):
        return tuple(_check_loose(shelf, name) for name in TRAIN + TEST)
    archive = shelf.find(*ARCHIVES)
    if archive is not None:
        _check_archive(shelf, archive)
        return (archive,)
    for folder in shelf.folders:
        for name in PICKLED:
            if (folder / name).exists():
                raise _refuse_pickle(shelf, folder / name)
    raise shelf.missing_file_error(ARCHIVES[0])


def read(shelf: DatasetFiles, paths: tuple[Path, ...]) -> Arrays:
    """Images (N, 3, 32, 32) and labels (N,) as bytes: train_images, train_labels, test_...

    An archive is decoded once and kept in the cache. Raises DataError for an archive that is cut
    off or lacks a file, records of another length, a label above 9 or another MD5 than published.
    """
    if len(paths) > 1:
        return _join(shelf, {path.name: (path, shelf.read_checked(path)) for path in paths})
    archive = paths[0]
    return array_cache.load_or_build(
        array_cache.name_entry(shelf.entry.name, archive),
        _ARRAYS,
        build=lambda: _join(shelf, _unpack(shelf, archive)),
        fits=_fits,
    )


def _find_loose(shelf: DatasetFiles, name: str) -> Path | None:
    return shelf.find(f"{FOLDER}/{name}", name)


def _check_loose(shelf: DatasetFiles, name: str) -> Path:
    path = _find_loose(shelf, name)
    if path is None:
        raise shelf.missing_file_error(name)
    _check_records(shelf, path, shelf.check_size(path))
    return path


def _check_records(shelf: DatasetFiles, where: Path | str, size: int) -> None:
    if size == 0 or size % RECORD:
        raise shelf.corrupt_file_error(
            where, f"has {size:,} bytes, expected a multiple of {RECORD:,}"
        )


def _check_archive(shelf: DatasetFiles, path: Path) -> None:
    size = shelf.check_size(path)
    magic = b"\x1f\x8b" if path.suffix == ".gz" else b"\xfd7zXZ\x00"
    head = shelf.read_head(path, len(magic))
    if head != magic:
        kind = "gzip" if path.suffix == ".gz" else "xz"
        raise shelf.corrupt_file_error(
            path, f"is not {kind} (starts with {head.hex()}, expected {magic.hex()})"
        )
    if path.suffix == ".xz":
        # An xz file ends with a mark of its own: a broken download shows without decoding.
        with path.open("rb") as stream:
            stream.seek(max(size - 2, 0))
            if stream.read() != b"YZ":
                raise shelf.corrupt_file_error(
                    path, f"is cut off: no xz end mark after {size:,} bytes"
                )


def _refuse_pickle(shelf: DatasetFiles, where: Path | str) -> DataError:
    return shelf.corrupt_file_error(
        where,
        "is the pickled version, which is refused because a pickle can execute code; "
        f"take the binary version, {ARCHIVES[0]}, from {shelf.entry.homepage}",
    )


def _unpack(shelf: DatasetFiles, archive: Path) -> Files:
    found: Files = {}
    try:
        with tarfile.open(archive, "r:gz" if archive.suffix == ".gz" else "r:xz") as tar:
            for member in tar:
                name = member.name.rpartition("/")[2]
                if name == PICKLED[-1]:
                    raise _refuse_pickle(shelf, archive)
                stream = tar.extractfile(member) if name in TRAIN + TEST else None
                if stream is not None:
                    where = f"{archive} ({name})"
                    _check_records(shelf, where, member.size)
                    content = stream.read()
                    shelf.check_content(where, name, content)
                    found[name] = (where, content)
    except (tarfile.TarError, EOFError, OSError, lzma.LZMAError, zlib.error) as error:
        raise shelf.corrupt_file_error(archive, f"is cut off or damaged ({error})") from error
    for name in TRAIN + TEST:
        if name not in found:
            raise shelf.corrupt_file_error(archive, f"holds no {name}, expected {FOLDER}/{name}")
    return found


def _join(shelf: DatasetFiles, files: Files) -> Arrays:
    arrays: Arrays = {}
    for part, names in (("train", TRAIN), ("test", TEST)):
        batches = []
        for name in names:
            where, content = files[name]
            _check_records(shelf, where, len(content))
            records = np.frombuffer(content, np.uint8).reshape(-1, RECORD)
            if records[:, 0].max() >= CLASSES:
                row = int(np.argmax(records[:, 0] >= CLASSES))
                raise shelf.corrupt_file_error(
                    where,
                    f"label {records[row, 0]} in record {row}, expected 0 to {CLASSES - 1}",
                )
            batches.append(records)
        arrays[f"{part}_images"] = np.concatenate([b[:, 1:] for b in batches]).reshape(
            -1, 3, 32, 32
        )
        arrays[f"{part}_labels"] = np.concatenate([b[:, 0] for b in batches])
    return arrays


def _fits(arrays: Arrays) -> bool:
    return all(
        arrays[f"{part}_images"].shape == (len(arrays[f"{part}_labels"]), 3, 32, 32)
        for part in ("train", "test")
    )
