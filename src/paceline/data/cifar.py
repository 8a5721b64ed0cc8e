"""CIFAR-10, binary version: six files of records, unpacked or in the published archive.

A record has 3,073 bytes: a label, then 1,024 red, 1,024 green and 1,024 blue, row by row. Other
files of such records can be read by URL, in byte ranges.
"""

import lzma
import tarfile
import zlib
from pathlib import Path

import numpy as np

from paceline.data import array_cache
from paceline.data.array_cache import ByteArrays
from paceline.data.blocks import BlockSource, ColumnSelection, DataBlock, Rows
from paceline.data.catalog import DatasetFiles
from paceline.data.stores import GZIP_MAGIC, StoredFile
from paceline.errors import DataError

BLOCK_BYTES = 4 << 20
CLASSES = 10
RECORD = 1 + 3 * 32 * 32
FOLDER = "cifar-10-batches-bin"
TRAIN = tuple(f"data_batch_{number}.bin" for number in range(1, 6))
TEST = ("test_batch.bin",)
ARCHIVES = ("cifar-10-binary.tar.gz", "cifar-10-binary.tar.xz")
PICKLED = ("cifar-10-batches-py", "cifar-10-python.tar.gz", "data_batch_1")

Contents = dict[str, tuple[Path | str, bytes]]  # By file name: label for errors, and content.


def locate(files: DatasetFiles) -> tuple[Path, ...]:
    """Returns the six unpacked files if the first exists, else the archive.

    Raises DataError if they are missing, if only the pickled version exists, or for a file with the
    wrong size, with incomplete records, or that is not an archive.
    """
    if files.find(f"{FOLDER}/{TRAIN[0]}", TRAIN[0]):
        return tuple(_check_unpacked(files, name) for name in TRAIN + TEST)
    archive = files.find(*ARCHIVES)
    if archive is not None:
        _check_archive(files, archive)
        return (archive,)
    for path in (folder / name for folder in files.folders for name in PICKLED):
        if path.exists():
            raise _refuse_pickle(files, path)
    raise files.missing(ARCHIVES[0])


def read(files: DatasetFiles, paths: tuple[Path, ...]) -> ByteArrays:
    """Returns images (N, 3, 32, 32) and labels (N,) as bytes: train_images, train_labels, test_...

    An archive is decoded once and cached. Raises DataError for an archive that is truncated or
    lacks a file, records of the wrong length, a label above 9 or another MD5 than published.
    """
    if len(paths) > 1:
        return _join(files, {path.name: (path, files.read_checked(path)) for path in paths})
    archive = paths[0]
    return array_cache.load_or_build(
        files.entry.name,
        archive,
        ("train_images", "train_labels", "test_images", "test_labels"),
        build=lambda: _join(files, unpack(files, archive)),
        fits=_fits,
    )


def _check_unpacked(files: DatasetFiles, name: str) -> Path:
    path = files.find(f"{FOLDER}/{name}", name)
    if path is None:
        raise files.missing(name)
    _check_records(files, path, files.check_size(path))
    return path


def _check_records(files: DatasetFiles, where: Path | str, size: int) -> None:
    if size == 0 or size % RECORD:
        raise files.corrupt(where, f"has {size:,} bytes, expected a multiple of {RECORD:,}")


def _check_archive(files: DatasetFiles, path: Path) -> None:
    size = files.check_size(path)
    kind, magic = ("gzip", GZIP_MAGIC) if path.suffix == ".gz" else ("xz", b"\xfd7zXZ\x00")
    head = files.read_head(path, len(magic))
    if head != magic:
        what = f"is not {kind} (starts with {head.hex()}, expected {magic.hex()})"
        raise files.corrupt(path, what)
    if kind == "xz":
        # xz files end with a magic number, so an incomplete download is found without decoding.
        with path.open("rb") as stream:
            stream.seek(max(size - 2, 0))
            if stream.read() != b"YZ":
                raise files.corrupt(path, f"is truncated: no xz footer after {size:,} bytes")


def _refuse_pickle(files: DatasetFiles, where: Path | str) -> DataError:
    return files.corrupt(
        where,
        "is the pickled version, which is not supported because a pickle can execute code; "
        f"download the binary version, {ARCHIVES[0]}, from {files.entry.homepage}",
    )


def unpack(files: DatasetFiles, archive: Path) -> Contents:
    """Returns the six files of an archive. Raises DataError if one is missing or damaged."""
    found: Contents = {}
    try:
        with tarfile.open(archive, "r:*") as tar:
            for member in tar:
                name = member.name.rpartition("/")[2]
                if name == PICKLED[-1]:
                    raise _refuse_pickle(files, archive)
                stream = tar.extractfile(member) if name in TRAIN + TEST else None
                if stream is not None:
                    where = f"{archive} ({name})"
                    _check_records(files, where, member.size)
                    content = stream.read()
                    files.check_content(where, name, content)
                    found[name] = (where, content)
    except (tarfile.TarError, EOFError, OSError, lzma.LZMAError, zlib.error) as error:
        raise files.corrupt(archive, f"is truncated or damaged ({error})") from error
    for name in TRAIN + TEST:
        if name not in found:
            raise files.corrupt(archive, f"does not contain {FOLDER}/{name}")
    return found


def _join(files: DatasetFiles, contents: Contents) -> ByteArrays:
    arrays: ByteArrays = {}
    for part, names in (("train", TRAIN), ("test", TEST)):
        batches = []
        for name in names:
            where, content = contents[name]
            _check_records(files, where, len(content))
            records = np.frombuffer(content, np.uint8).reshape(-1, RECORD)
            if records[:, 0].max() >= CLASSES:
                row = int(np.argmax(records[:, 0] >= CLASSES))
                what = f"label {records[row, 0]} in record {row}, expected 0 to {CLASSES - 1}"
                raise files.corrupt(where, what)
            batches.append(records)
        images = np.concatenate([records[:, 1:] for records in batches])
        arrays[f"{part}_images"] = images.reshape(-1, 3, 32, 32)
        arrays[f"{part}_labels"] = np.concatenate([records[:, 0] for records in batches])
    return arrays


def _fits(arrays: ByteArrays) -> bool:
    return all(
        arrays[f"{part}_images"].shape == (len(arrays[f"{part}_labels"]), 3, 32, 32)
        for part in ("train", "test")
    )


class CifarSource(BlockSource):
    """Files of records at a URL."""

    def __init__(self, files: tuple[StoredFile, ...], selection: ColumnSelection) -> None:
        super().__init__(files, selection)
        self._find_blocks(self._find)

    def _find(self, file: StoredFile, number: int) -> list[DataBlock]:
        rows, rest = divmod(file.size, RECORD)
        if rest:
            raise file.error(
                f"has {file.size:,} bytes, not a multiple of {RECORD:,}: it is "
                "truncated, or not in CIFAR's format",
                at=rows * RECORD,
            )
        step = BLOCK_BYTES // RECORD
        counts = [min(step, rows - first) for first in range(0, rows, step)]
        return [
            DataBlock(number, index * step * RECORD, count, count * RECORD)
            for index, count in enumerate(counts)
        ]

    def read(self, block: DataBlock) -> Rows:
        file = self.files[block.file]
        content = file.read(block.offset, block.offset + block.size)
        if len(content) != block.size:
            raise file.error("is truncated", at=block.offset + len(content))
        records = np.frombuffer(content, np.uint8).reshape(block.rows, RECORD)
        images = records[:, 1:].reshape(block.rows, 3, 32, 32)
        return self._shape_features(block, [images]), records[:, 0]
