"""Fixed-length records, read in byte ranges: IDX (as MNIST) and CIFAR's binary format.

IDX images are in one file and their labels in another, with `labels-idx1` instead of `images-idx3`
in its name. A compressed file is one block.
"""

from __future__ import annotations

import math
import struct
import zlib

import numpy as np
import numpy.typing as npt

from paceline.data.blocks import GZIP_MAGIC, BlockSource, ColumnSelection, DataBlock, Rows
from paceline.data.stores import StoredFile, list_files

BLOCK_BYTES = 4 << 20
CIFAR_SHAPE = (3, 32, 32)
CIFAR_RECORD = 1 + 3 * 32 * 32


class CifarSource(BlockSource):
    """Records of one label byte and one image."""

    def __init__(self, files: tuple[StoredFile, ...], selection: ColumnSelection) -> None:
        super().__init__(files, selection)
        self._find_blocks(self._find)

    def _find(self, file: StoredFile, number: int) -> list[DataBlock]:
        rows, rest = divmod(file.size, CIFAR_RECORD)
        if rest:
            raise file.error(
                f"has {file.size:,} bytes, not a multiple of {CIFAR_RECORD:,}: it is "
                "truncated, or not in CIFAR's format",
                at=rows * CIFAR_RECORD,
            )
        step = BLOCK_BYTES // CIFAR_RECORD
        counts = [min(step, rows - first) for first in range(0, rows, step)]
        return [
            DataBlock(number, index * step * CIFAR_RECORD, count, count * CIFAR_RECORD)
            for index, count in enumerate(counts)
        ]

    def read(self, block: DataBlock) -> Rows:
        file = self.files[block.file]
        content = file.read(block.offset, block.offset + block.size)
        if len(content) != block.size:
            raise file.error("is truncated", at=block.offset + len(content))
        records = np.frombuffer(content, np.uint8).reshape(block.rows, CIFAR_RECORD)
        images = records[:, 1:].reshape(block.rows, *CIFAR_SHAPE)
        return self._shape_features(block, [images]), records[:, 0]


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
            shape, packed = _read_head(file)
            (count,), labels_packed = _read_head(labels)
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


def _read_head(file: StoredFile) -> tuple[tuple[int, ...], bool]:
    """Returns the dimensions, and whether the file is compressed."""
    head = file.read(0, min(file.size, 4096))
    packed = head[:2] == GZIP_MAGIC
    if packed:
        try:
            head = zlib.decompressobj(wbits=31).decompress(head, 64)
        except zlib.error as error:
            raise file.error(f"is damaged ({error})", at=0) from None
    if len(head) < 8 or head[:3] != b"\x00\x00\x08" or not 1 <= head[3] <= 4:
        what = f"begins with {head[:4].hex()}: not an IDX file of bytes"
        raise file.error(what, at=0)
    length = 4 + 4 * head[3]
    if len(head) < length:
        raise file.error("is truncated in its header")
    shape = struct.unpack(f">{head[3]}I", head[4:length])
    if 0 in shape:
        raise file.error("contains no rows; remove it")
    return shape, packed


def _read_rows(file: StoredFile, begin: int, size: int, block: DataBlock) -> npt.NDArray[np.uint8]:
    start, stop = begin + block.offset * size, begin + (block.offset + block.rows) * size
    if file.read(0, 2) == GZIP_MAGIC:
        content = file.unpack(file.read())[start:stop]
    else:
        content = file.read(start, stop)
    if len(content) != stop - start:
        raise file.error("is truncated", at=start + len(content))
    return np.frombuffer(content, np.uint8)
