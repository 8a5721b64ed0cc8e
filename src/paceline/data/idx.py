"""Images and labels in IDX files, gzipped or plain: MNIST and compatible datasets.

A file with only the first N rows is named `train-images-firstN-idx3-ubyte[.gz]` (`t10k-` for the
test set). It is used if the full file is missing, and adds a note to the dataset. Its labels come
from `train-labels-firstN-idx1-ubyte[.gz]`, or else are the first N of the full label file.
"""

from __future__ import annotations

import gzip
import io
import math
import re
import struct
import zlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from paceline.data.blocks import GZIP_MAGIC
from paceline.data.catalog import DatasetFiles

IMAGES, LABELS = 3, 1  # The number of dimensions is the last byte of the magic number.
SIDE = 28
CLASSES = 10
FULL_COUNTS = {"train": 60_000, "t10k": 10_000}

_SUBSET = re.compile(r"\w+-images-first([1-9]\d*)-idx3-ubyte(?:\.gz)?")


@dataclass(frozen=True)
class IdxSplit:
    """Files of the training or test rows, the number of rows to use, and notes."""

    images: Path
    labels: Path
    count: int
    notes: tuple[str, ...] = ()


def locate(files: DatasetFiles) -> tuple[IdxSplit, IdxSplit]:
    """Returns the files of the training and test sets after checking their headers.

    Raises DataError for a missing file, a size other than published, a header that does not
    describe 28x28 images or their labels, or different numbers of images and labels.
    """
    return _locate_part(files, "train"), _locate_part(files, "t10k")


def read(
    files: DatasetFiles, part: IdxSplit
) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.int64]]:
    """Returns the images (N, 1, 28, 28) and labels (N,) of a part.

    Raises DataError for a file that is truncated, too long, damaged, has another MD5 than
    published, or contains a label above 9.
    """
    images = read_file(files, part.images, IMAGES)[: part.count]
    labels = read_file(files, part.labels, LABELS)[: part.count]
    if labels.max() >= CLASSES:
        row = int(np.argmax(labels >= CLASSES))
        what = f"label {labels[row]} in row {row}, expected 0 to {CLASSES - 1}"
        raise files.corrupt(part.labels, what)
    return images.reshape(-1, 1, SIDE, SIDE), labels.astype(np.int64)


def read_file(files: DatasetFiles, path: Path, dimensions: int) -> npt.NDArray[np.uint8]:
    """Returns the array of one IDX file of bytes. Raises DataError like `read`."""
    shape, expected = read_header(files, path, dimensions)
    content = files.read_checked(path)
    if path.suffix == ".gz":
        content = _decompress(files, path, content, expected)
    if len(content) != expected:
        more = "more" if len(content) > expected else f"{len(content):,}"
        raise files.corrupt(path, f"header {shape} requires {expected:,} bytes, found {more}")
    return np.frombuffer(content, np.uint8, offset=4 + 4 * dimensions).reshape(shape)


def read_header(files: DatasetFiles, path: Path, dimensions: int) -> tuple[tuple[int, ...], int]:
    """Returns the shape and the size of the uncompressed file; decompresses only the first bytes.

    Raises DataError for a wrong size or magic number, no rows, or images that are not 28x28.
    """
    size = files.check_size(path)
    length = 4 + 4 * dimensions
    head = files.read_head(path, 1024 if path.suffix == ".gz" else length)
    if path.suffix == ".gz":
        if head[:2] != GZIP_MAGIC:
            what = f"is not gzip (starts with {head[:2].hex()}, expected {GZIP_MAGIC.hex()})"
            raise files.corrupt(path, what)
        try:
            head = zlib.decompressobj(wbits=31).decompress(head, length)
        except zlib.error as error:
            raise files.corrupt(path, f"is damaged gzip data ({error})") from error
    if len(head) < length:
        raise files.corrupt(path, f"is truncated: {len(head)} bytes of a {length}-byte header")
    magic, *sizes = struct.unpack(f">{1 + dimensions}I", head)
    if magic != 0x0800 + dimensions:
        raise files.corrupt(path, f"IDX magic is {magic}, expected {0x0800 + dimensions}")
    if dimensions == IMAGES and sizes[1:] != [SIDE, SIDE]:
        raise files.corrupt(path, f"images are {sizes[1]}x{sizes[2]}, expected {SIDE}x{SIDE}")
    if sizes[0] == 0:
        raise files.corrupt(path, "contains no rows")
    shape, expected = tuple(sizes), length + math.prod(sizes)
    if path.suffix != ".gz" and size != expected:
        raise files.corrupt(path, f"header {shape} requires {expected:,} bytes, found {size:,}")
    return shape, expected


def _decompress(files: DatasetFiles, path: Path, content: bytes, expected: int) -> bytes:
    try:
        with gzip.GzipFile(fileobj=io.BytesIO(content)) as stream:
            # Reading one byte past the end makes gzip verify its checksum, and detects a file that
            # is too long without decompressing all of it.
            return stream.read(expected) + stream.read(1)
    except EOFError as error:
        raise files.corrupt(path, "is truncated: the gzip data ends too early") from error
    except (OSError, zlib.error) as error:
        raise files.corrupt(path, f"is damaged gzip data ({error})") from error


def _locate_part(files: DatasetFiles, stem: str) -> IdxSplit:
    full = _variants(f"{stem}-images-idx3-ubyte")
    subset = None if files.find(*full) else _find_subset(files, stem)
    images = subset[1] if subset else files.require(*full)
    count = read_header(files, images, IMAGES)[0][0]
    if subset and count != subset[0]:
        what = f"contains {count:,} images, but its name says {subset[0]:,}"
        raise files.corrupt(images, what)
    own = files.find(*_variants(f"{stem}-labels-first{count}-idx1-ubyte")) if subset else None
    labels = own or files.require(*_variants(f"{stem}-labels-idx1-ubyte"))
    labelled = read_header(files, labels, LABELS)[0][0]
    # A subset of the images may use the first labels of the full file.
    if labelled < count or (labelled > count and (own or not subset)):
        what = f"{labelled:,} labels, expected {count:,} as in {images.name}"
        raise files.corrupt(labels, what)
    if not subset:
        return IdxSplit(images, labels, count)
    rows = "training" if stem == "train" else "test"
    note = (
        f"{files.entry.name}: only {count:,} of {FULL_COUNTS[stem]:,} {rows} images are available "
        f"({images.name}): do not report results as {files.entry.name}'s"
    )
    return IdxSplit(images, labels, count, (note,))


def _variants(name: str) -> tuple[str, str]:
    return f"{name}.gz", name


def _find_subset(files: DatasetFiles, stem: str) -> tuple[int, Path] | None:
    """Returns the largest subset of images in the first directory that has one, and its size."""
    for folder in files.folders:
        found = [
            (int(match[1]), path)
            for path in folder.glob(f"{stem}-images-first*")
            if (match := _SUBSET.fullmatch(path.name)) and path.is_file()
        ]
        if found:
            return max(found)
    return None
