"""Records of one length: IDX (MNIST's form) and CIFAR's binary form, cut by ranges of bytes.

IDX images lie in one file and their labels in another of the same name with `labels-idx1` for
`images-idx3`. A compressed file is one block.
"""

from __future__ import annotations

import gzip
import math
import struct
import zlib

import numpy as np

from paceline.data.blocks import (
    ColumnSelection,
    DataBlock,
    Rows,
    bad_file,
    check_not_empty,
    stack_features,
)
from paceline.data.stores import StoredFile, list_files, read_bytes
from paceline.errors import DataError

BLOCK_BYTES = 4 << 20
CIFAR_SHAPE = (3, 32, 32)
CIFAR_RECORD = 1 + 3 * 32 * 32


class CifarSource:
    """One label byte, then the image, again and again."""

    def __init__(self, files: tuple[StoredFile, ...], wanted: ColumnSelection) -> None:
        check_not_empty(list(files))
        self.files = files
        self.wanted = wanted
        blocks = []
        step = BLOCK_BYTES // CIFAR_RECORD
        for number, file in enumerate(files):
            rows, rest = divmod(file.size, CIFAR_RECORD)
            if rest:
                raise bad_file(
                    file,
                    f"has {file.size:,} bytes, no multiple of {CIFAR_RECORD:,}: it is cut off, or "
                    "not of CIFAR's form",
                    f" (at byte {rows * CIFAR_RECORD:,})",
                )
            for first in range(0, rows, step):
                count = min(step, rows - first)
                blocks.append(DataBlock(number, first * CIFAR_RECORD, count, count * CIFAR_RECORD))
        self.blocks = tuple(blocks)

    def read(self, block: DataBlock) -> Rows:
        file = self.files[block.file]
        content = read_bytes(file.url, block.offset, block.offset + block.size)
        if len(content) != block.size:
            raise bad_file(file, "is cut off", f" (at byte {block.offset + len(content):,})")
        records = np.frombuffer(content, np.uint8).reshape(block.rows, CIFAR_RECORD)
        features = records[:, 1:].reshape(block.rows, *CIFAR_SHAPE)
        return stack_features([features], self.wanted.shape), records[:, 0]

    def count_classes(self) -> int | None:
        return None


def open_cifar(files: tuple[StoredFile, ...], wanted: ColumnSelection) -> CifarSource:
    return CifarSource(files, wanted)


class IdxSource:
    """Pairs of files: images, and their labels."""

    def __init__(self, files: tuple[StoredFile, ...], wanted: ColumnSelection) -> None:
        check_not_empty(list(files))
        self.files = tuple(f for f in files if "images" in f.name) or files
        self.wanted = wanted
        named = {file.url: file for file in files}
        self._labels: list[StoredFile] = []
        self._shapes: list[tuple[int, ...]] = []
        blocks = []
        for number, file in enumerate(self.files):
            url = file.url.replace("images-idx3", "labels-idx1")
            if url == file.url:
                raise bad_file(
                    file, "its labels are looked for by its name: call it ...images-idx3-..."
                )
            labels = named.get(url) or list_files(url)[0]
            shape, begin, packed = _read_head(file)
            (count,), _, _ = _read_head(labels)
            if count != shape[0]:
                raise bad_file(file, f"{shape[0]:,} images, but {count:,} labels in {labels.url}")
            self._labels.append(labels)
            self._shapes.append(shape[1:])
            size = math.prod(shape[1:])
            step = count if packed or _is_packed(labels) else max(1, BLOCK_BYTES // size)
            if not packed and file.size != begin + count * size:
                raise bad_file(
                    file,
                    f"has {file.size:,} bytes where its head says {begin + count * size:,}",
                    f" (at byte {min(file.size, begin + count * size):,})",
                )
            blocks += [
                DataBlock(number, first, min(step, count - first), min(step, count - first) * size)
                for first in range(0, count, step)
            ]
        self.blocks = tuple(blocks)

    def read(self, block: DataBlock) -> Rows:
        """`offset` of a block counts rows: its two files differ in bytes."""
        file, labels = self.files[block.file], self._labels[block.file]
        shape = self._shapes[block.file]
        images = _read_rows(file, 4 + 4 * (1 + len(shape)), math.prod(shape), block)
        features = images.reshape(block.rows, *shape)
        numbers = _read_rows(labels, 8, 1, block)
        return stack_features([features], self.wanted.shape), numbers

    def count_classes(self) -> int | None:
        return None


def open_idx(files: tuple[StoredFile, ...], wanted: ColumnSelection) -> IdxSource:
    return IdxSource(files, wanted)


def _is_packed(file: StoredFile) -> bool:
    return read_bytes(file.url, 0, 2) == b"\x1f\x8b"


def _read_head(file: StoredFile) -> tuple[tuple[int, ...], int, bool]:
    """Dimensions, where the data begins, and whether the file is compressed."""
    head = read_bytes(file.url, 0, min(file.size, 4096))
    packed = head[:2] == b"\x1f\x8b"
    if packed:
        try:
            head = zlib.decompressobj(wbits=31).decompress(head, 64)
        except zlib.error as error:
            raise bad_file(file, f"is damaged ({error})", " (at byte 0)") from None
    if len(head) < 8 or head[:3] != b"\x00\x00\x08" or not 1 <= head[3] <= 4:
        raise bad_file(file, f"begins with {head[:4].hex()}: no IDX file of bytes", " (at byte 0)")
    dimensions = head[3]
    if len(head) < 4 + 4 * dimensions:
        raise bad_file(file, "is cut off in its head")
    shape = struct.unpack(f">{dimensions}I", head[4 : 4 + 4 * dimensions])
    if 0 in shape:
        raise bad_file(file, "holds no rows: take it away")
    return shape, 4 + 4 * dimensions, packed


def _read_rows(
    file: StoredFile, begin: int, size: int, block: DataBlock
) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    start, stop = begin + block.offset * size, begin + (block.offset + block.rows) * size
    if _is_packed(file):
        try:
            content = gzip.decompress(read_bytes(file.url))[start:stop]
        except (EOFError, OSError, zlib.error) as error:
            raise bad_file(file, f"is cut off or damaged ({error})") from None
    else:
        content = read_bytes(file.url, start, stop)
    if len(content) != stop - start:
        raise DataError(f"{file.url} (at byte {start + len(content):,}): is cut off")
    return np.frombuffer(content, np.uint8)
