"""Images and labels in IDX files, gzipped or plain: MNIST and the sets made in its likeness.

A file of the first N rows only is named `train-images-firstN-idx3-ubyte[.gz]` (`t10k-` for the
test set). It is used if the full file is absent, and the part then carries a note. Its labels are
those of `train-labels-firstN-idx1-ubyte[.gz]` or else the first N of the full file of labels.
"""

from __future__ import annotations

import gzip
import io
import re
import struct
import zlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from paceline.data.dataset_files import DatasetFiles

IMAGES, LABELS = 3, 1  # The number of dimensions, which is the last byte of the magic number.
SIDE = 28
CLASSES = 10
WHOLE = {"train": 60_000, "t10k": 10_000}

_GZIP_MAGIC = b"\x1f\x8b"


@dataclass(frozen=True)
class IdxSplit:
    """The files of the training or the test rows, how many rows to take, and what to tell."""

    images: Path
    labels: Path
    count: int
    notes: tuple[str, ...] = ()


def locate(shelf: DatasetFiles) -> tuple[IdxSplit, IdxSplit]:
    """The files of the training and test sets, their headers checked.

    Raises DataError for a file that is missing, of another size than published, with another
    header than 28x28 images and their labels have, or if images and labels differ in number.
    """
    return _locate_part(shelf, "train"), _locate_part(shelf, "t10k")


def read(
    shelf: DatasetFiles, part: IdxSplit
) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.int64]]:
    """The images (N, 1, 28, 28) and labels (N,) of a part.

    Raises DataError for a file that is cut off, too long, damaged, of another MD5 than published,
    or with a label above 9.
    """
    images = read_file(shelf, part.images, IMAGES)[: part.count]
    labels = read_file(shelf, part.labels, LABELS)[: part.count]
    if labels.max() >= CLASSES:
        row = int(np.argmax(labels >= CLASSES))
        raise shelf.corrupt_file_error(
            part.labels, f"label {labels[row]} in row {row}, expected 0 to {CLASSES - 1}"
        )
    return images.reshape(-1, 1, SIDE, SIDE), labels.astype(np.int64)


def read_file(shelf: DatasetFiles, path: Path, dimensions: int) -> npt.NDArray[np.uint8]:
    """The array of one IDX file of bytes; raises DataError as `read` does."""
    shelf.check_size(path)
    shape = read_shape(shelf, path, dimensions)
    content = shelf.read_checked(path)
    expected = 4 + 4 * dimensions + int(np.prod(shape, dtype=object))
    if path.suffix == ".gz":
        content = _decompress(shelf, path, content, expected)
    if len(content) != expected:
        more = "more" if len(content) > expected else f"{len(content):,}"
        raise shelf.corrupt_file_error(
            path, f"header {shape} calls for {expected:,} bytes, found {more}"
        )
    return np.frombuffer(content, np.uint8, offset=4 + 4 * dimensions).reshape(shape)


def read_shape(shelf: DatasetFiles, path: Path, dimensions: int) -> tuple[int, ...]:
    """The shape in a file's header, of which only the first bytes are unpacked.

    Raises DataError for another magic number, no rows, or images that are not 28x28.
    """
    length = 4 + 4 * dimensions
    head = shelf.read_head(path, 1024 if path.suffix == ".gz" else length)
    if path.suffix == ".gz":
        if head[:2] != _GZIP_MAGIC:
            raise shelf.corrupt_file_error(
                path, f"is not gzip (starts with {head[:2].hex()}, expected 1f8b)"
            )
        try:
            head = zlib.decompressobj(wbits=31).decompress(head, length)
        except zlib.error as error:
            raise shelf.corrupt_file_error(path, f"is damaged gzip data ({error})") from error
    if len(head) < length:
        raise shelf.corrupt_file_error(
            path, f"is cut off: {len(head)} bytes of a {length}-byte header"
        )
    magic, *sizes = struct.unpack(f">{1 + dimensions}I", head)
    if magic != 0x0800 + dimensions:
        raise shelf.corrupt_file_error(
            path, f"IDX magic is {magic}, expected {0x0800 + dimensions}"
        )
    if dimensions == IMAGES and sizes[1:] != [SIDE, SIDE]:
        raise shelf.corrupt_file_error(
            path, f"images are {sizes[1]}x{sizes[2]}, expected {SIDE}x{SIDE}"
        )
    if sizes[0] == 0:
        raise shelf.corrupt_file_error(path, "holds no rows")
    return tuple(sizes)


def _decompress(shelf: DatasetFiles, path: Path, content: bytes, expected: int) -> bytes:
    try:
        with gzip.GzipFile(fileobj=io.BytesIO(content)) as stream:
            # One byte past the end makes gzip compare its checksum, and shows a file too long
            # without unpacking all of it.
            return stream.read(expected) + stream.read(1)
    except EOFError as error:
        raise shelf.corrupt_file_error(path, "is cut off: the gzip data ends too early") from error
    except (OSError, zlib.error) as error:
        raise shelf.corrupt_file_error(path, f"is damaged gzip data ({error})") from error


def _locate_part(shelf: DatasetFiles, stem: str) -> IdxSplit:
    full_labels = _variants(f"{stem}-labels-idx1-ubyte")
    images = shelf.find(*_variants(f"{stem}-images-idx3-ubyte"))
    subset = None if images else _find_subset(shelf, stem)
    if subset is None:
        images = images or shelf.require(*_variants(f"{stem}-images-idx3-ubyte"))
        labels = shelf.require(*full_labels)
        count = _check_header(shelf, images, IMAGES)
        _check_counts(shelf, images, count, labels, _check_header(shelf, labels, LABELS))
        return IdxSplit(images, labels, count)
    images, count = subset
    found = _check_header(shelf, images, IMAGES)
    if found != count:
        raise shelf.corrupt_file_error(
            images, f"holds {found:,} images, expected {count:,} by its name"
        )
    own = shelf.find(*_variants(f"{stem}-labels-first{count}-idx1-ubyte"))
    labels = own or shelf.require(*full_labels)
    labelled = _check_header(shelf, labels, LABELS)
    if own or labelled < count:
        _check_counts(shelf, images, count, labels, labelled)
    rows = "training" if stem == "train" else "test"
    note = (
        f"{shelf.entry.name}: only {count:,} of {WHOLE[stem]:,} {rows} images are there "
        f"({images.name}): do not report results as {shelf.entry.name}'s"
    )
    return IdxSplit(images, labels, count, (note,))


def _check_header(shelf: DatasetFiles, path: Path, dimensions: int) -> int:
    size = shelf.check_size(path)
    shape = read_shape(shelf, path, dimensions)
    expected = 4 + 4 * dimensions + int(np.prod(shape, dtype=object))
    if path.suffix != ".gz" and size != expected:
        raise shelf.corrupt_file_error(
            path, f"header {shape} calls for {expected:,} bytes, found {size:,}"
        )
    return shape[0]


def _check_counts(
    shelf: DatasetFiles, images: Path, count: int, labels: Path, labelled: int
) -> None:
    if count != labelled:
        raise shelf.corrupt_file_error(
            labels, f"{labelled:,} labels, expected {count:,} as in {images.name}"
        )


def _variants(name: str) -> tuple[str, str]:
    return f"{name}.gz", name


def _find_subset(shelf: DatasetFiles, stem: str) -> tuple[Path, int] | None:
    """The largest subset of images there is, in the first folder that has one."""
    pattern = re.compile(rf"{stem}-images-first([1-9]\d*)-idx3-ubyte(\.gz)?")
    for folder in shelf.folders:
        found = []
        for path in folder.glob(f"{stem}-images-first*"):
            match = pattern.fullmatch(path.name)
            if match and path.is_file():
                found.append((int(match[1]), path))
        if found:
            count, path = max(found)
            return path, count
    return None
