"""Images and labels in IDX files, gzipped or plain: MNIST and compatible datasets.

A file with only the first N rows is named `train-images-firstN-idx3-ubyte[.gz]` (`t10k-` for the
test set). It is used if the full file is missing, and adds a note to the dataset. Its labels come
from `train-labels-firstN-idx1-ubyte[.gz]`, or else are the first N of the full label file.

Other IDX files can be read by URL, in byte ranges. Labels are in a file with `labels-idx1` instead
of `images-idx3` in its name. A compressed file is one block.
"""

import gzip
import io
import math
import re
import struct
import zlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from paceline.data.blocks import BlockSource, Bytes, ColumnSelection, DataBlock, Rows
from paceline.data.catalog import DatasetFiles
from paceline.data.stores import GZIP_MAGIC, StoredFile, list_files

BLOCK_BYTES = 4 << 20
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


def read(files: DatasetFiles, part: IdxSplit) -> Rows:
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


def read_file(files: DatasetFiles, path: Path, dimensions: int) -> Bytes:
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
        raise files.corrupt(images, f"contains {count:,} images, but its name says {subset[0]:,}")
    own = files.find(*_variants(f"{stem}-labels-first{count}-idx1-ubyte")) if subset else None
    labels = own or files.require(*_variants(f"{stem}-labels-idx1-ubyte"))
    labelled = read_header(files, labels, LABELS)[0][0]
    # A subset of the images may use the first labels of the full file.
    if labelled < count or (labelled > count and (own or not subset)):
        raise files.corrupt(labels, f"{labelled:,} labels, expected {count:,} as in {images.name}")
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


class IdxSource(BlockSource):
    """Pairs of files: images and their labels."""

    def __init__(self, files: tuple[StoredFile, ...], selection: ColumnSelection) -> None:
        super().__init__(files, selection)
        self._check_not_empty()
        self.files = tuple(f for f in files if "images" in f.name) or files
        named = {file.url: file for file in files}
        self._labels: list[StoredFile] = []
        self._shapes: list[tuple[int, ...]] = []
        blocks = []
        for number, file in enumerate(self.files):
            url = file.url.replace("images-idx3", "labels-idx1")
            if url == file.url:
                raise file.error(
                    "its name must contain images-idx3, from which that of its labels is derived"
                )
            labels = named.get(url) or list_files(url)[0]
            shape, packed = _read_dimensions(file)
            (count,), labels_packed = _read_dimensions(labels)
            if count != shape[0]:
                raise file.error(f"{shape[0]:,} images, but {count:,} labels in {labels.url}")
            self._labels.append(labels)
            self._shapes.append(shape[1:])
            size = math.prod(shape[1:])
            needed = 4 + 4 * len(shape) + count * size
            if not packed and file.size != needed:
                raise file.error(
                    f"has {file.size:,} bytes, but its header requires {needed:,}",
                    at=min(file.size, needed),
                )
            step = count if packed or labels_packed else max(1, BLOCK_BYTES // size)
            for first in range(0, count, step):
                rows = min(step, count - first)
                blocks.append(DataBlock(number, first, rows, rows * size))
        self.blocks = tuple(blocks)

    def read(self, block: DataBlock) -> Rows:
        """Reads a block. `offset` counts rows, because the two files differ in bytes per row."""
        shape = self._shapes[block.file]
        images = _read_rows(self.files[block.file], 8 + 4 * len(shape), math.prod(shape), block)
        labels = _read_rows(self._labels[block.file], 8, 1, block)
        return self._shape_features(block, [images.reshape(block.rows, *shape)]), labels


def _read_dimensions(file: StoredFile) -> tuple[tuple[int, ...], bool]:
    """Returns the dimensions, and whether the file is compressed."""
    head = file.read(0, min(file.size, 4096))
    packed = head[:2] == GZIP_MAGIC
    if packed:
        try:
            head = zlib.decompressobj(wbits=31).decompress(head, 64)
        except zlib.error as error:
            raise file.error(f"is damaged ({error})", at=0) from None
    if len(head) < 8 or head[:3] != b"\x00\x00\x08" or not 1 <= head[3] <= 4:
        raise file.error(f"begins with {head[:4].hex()}: not an IDX file of bytes", at=0)
    length = 4 + 4 * head[3]
    if len(head) < length:
        raise file.error("is truncated in its header")
    shape = struct.unpack(f">{head[3]}I", head[4:length])
    if 0 in shape:
        raise file.error("contains no rows; remove it")
    return shape, packed


def _read_rows(file: StoredFile, begin: int, size: int, block: DataBlock) -> Bytes:
    start, stop = begin + block.offset * size, begin + (block.offset + block.rows) * size
    packed = file.read(0, 2) == GZIP_MAGIC
    content = file.unpack(file.read())[start:stop] if packed else file.read(start, stop)
    if len(content) != stop - start:
        raise file.error("is truncated", at=start + len(content))
    return np.frombuffer(content, np.uint8)
