"""TFRecord files: framed records with checksums, each a tf.train.Example.

A record is its length (u64), a masked CRC-32C of that, the data and a masked CRC-32C of the data,
all little-endian: https://www.tensorflow.org/tutorials/load_data/tfrecord#tfrecords_format_details.
A file is split into blocks of complete records. Their offsets are found in one pass and stored in
an index in the cache directory. A compressed file (gzip, zlib) is one block.
"""

import gzip
import hashlib
import json
import os
import struct
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from functools import cache
from typing import Any

import numpy as np

from paceline.data import array_cache
from paceline.data.blocks import Array, BlockSource, ColumnSelection, DataBlock, RowError, Rows
from paceline.data.encoded_images import ImageDecoder, is_encoded
from paceline.data.stores import GZIP_MAGIC, StoredFile, require_extra
from paceline.data.tf_example import decode, encode, find_features

BLOCK_BYTES = 4 << 20
"""Approximate size of a block."""
READ_BYTES = 32 << 20
HEAD, FOOT = 12, 4


@cache
def _crc() -> Any:
    return require_extra("google_crc32c", "data", "TFRecord").value


def masked_crc(content: bytes) -> int:
    crc: int = _crc()(content)
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


class TFRecordSource(BlockSource):
    """TFRecord files of Examples with the features of the first record.

    Opening them indexes the records. Raises DataError for a truncated or empty file.
    """

    def __init__(self, files: tuple[StoredFile, ...], selection: ColumnSelection) -> None:
        _crc()
        super().__init__(files, selection)
        self._find_blocks(_find_blocks, "record")
        file, block = self.files[0], self.blocks[0]
        content, starts, lengths = _read_records(file, block)
        record = content[starts[0] : starts[0] + lengths[0]]
        try:
            found = find_features(record)
        except ValueError as error:
            raise file.error(f"its first record is not a tf.train.Example ({error})") from None
        images = [
            name
            for name, span in sorted(found.items())
            if name in selection.images or is_encoded(record[span.part].tobytes())
        ]
        self.selection = selection.resolve(file, sorted(found), "feature", images)
        self.columns = tuple(sorted(found))
        self._decoders = {
            name: ImageDecoder(selection.shape) for name in images if name in self.selection.names
        }
        self.decodes_images = bool(self._decoders)

    def read(self, block: DataBlock) -> Rows:
        file = self.files[block.file]
        where = f" (at byte {block.offset:,})"
        content, starts, lengths = _read_records(file, block)
        if len(starts) != block.rows:
            what = f"{len(starts):,} records instead of {block.rows:,}: the file has changed"
            raise file.error(what, where)
        names = self.selection.names
        try:
            columns = decode(content, starts, lengths, names, self._decoders)
            for name, decoder in self._decoders.items():
                images = columns[names.index(name)]
                try:
                    columns[names.index(name)] = decoder.decode(images)
                except RowError as error:
                    raise RowError(f"contains {error} in feature {name!r}", error.row) from None
        except RowError as error:
            row = error.row or 0
            at = block.offset + int(starts[row]) - HEAD
            first = next(n for n, b in enumerate(self.blocks) if b.file == block.file)
            before = self.blocks[first : self.blocks.index(block)]
            where = f" (record {sum(b.rows for b in before) + row:,}, at byte {at:,})"
            raise file.error(f"a record that {error}", where) from None
        return self._make_rows(block, columns, where)


def _decompressor(head: bytes) -> Callable[[bytes], bytes] | None:
    """Returns the function that decompresses a file; None if it is not compressed."""
    if head[:2] == GZIP_MAGIC:
        return gzip.decompress
    # An uncompressed file begins with a length and its checksum.
    if len(head) >= HEAD and masked_crc(head[:8]) == struct.unpack("<I", head[8:HEAD])[0]:
        return None
    is_zlib = len(head) > 1 and head[0] & 0x0F == 8 and (head[0] << 8 | head[1]) % 31 == 0
    return zlib.decompress if is_zlib else None


def _check_head(
    file: StoredFile, head: bytes, at: int, size: int, damage: str = "the file is damaged"
) -> int:
    """Returns a record's length. The record is at byte `at` of a file, or a part, of `size` bytes.

    Raises DataError if the header is truncated or damaged, or the record is truncated.
    """
    if len(head) < HEAD:
        what = f"is truncated: {size - at} bytes in the last header"
    else:
        length, length_crc = struct.unpack("<QI", head)
        if masked_crc(head[:8]) != length_crc:
            what = f"wrong checksum of a record's length: {damage}"
        elif at + HEAD + length + FOOT > size:
            left = max(0, size - at - HEAD)
            what = f"is truncated: a record of {length:,} bytes, of which {left:,} exist"
        else:
            return int(length)
    raise file.error(what, at=at)


def _check_records(file: StoredFile, content: bytes, base: int) -> Iterator[tuple[int, int]]:
    """Yields start and length of each record's data after verifying its checksums."""
    at = 0
    while at < len(content):
        length = _check_head(file, content[at : at + HEAD], base + at, base + len(content))
        start, stop = at + HEAD, at + HEAD + length
        if masked_crc(content[start:stop]) != struct.unpack_from("<I", content, stop)[0]:
            raise file.error("wrong checksum of a record: the file is damaged", at=base + at)
        yield start, length
        at = stop + FOOT


def _read_records(file: StoredFile, block: DataBlock) -> tuple[Array, Array, Array]:
    """Returns the bytes of a block, and the starts and lengths of its records' data."""
    content = file.read(block.offset, block.offset + block.size)
    if block.offset == 0 and (decompress := _decompressor(content)):
        content = file.unpack(content, decompress)
    spans = np.array(list(_check_records(file, content, block.offset)), np.int64).reshape(-1, 2)
    return np.frombuffer(content, np.uint8), spans[:, 0], spans[:, 1]


def _find_blocks(file: StoredFile, number: int) -> list[DataBlock]:
    """Returns the blocks of a file from its index, which is written if absent."""
    digest = hashlib.sha256(f"{file.url} {file.size} {file.stamp}".encode()).hexdigest()[:24]
    path = array_cache.root() / "index" / f"{digest}.json"
    try:
        index = [(offset, size, rows) for offset, size, rows in json.loads(path.read_text())]
    except (OSError, ValueError, TypeError):
        index = list(_scan(file))
        with suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
            partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
            partial.write_text(json.dumps(index))
            os.replace(partial, path)
    return [DataBlock(number, offset, rows, size) for offset, size, rows in index]


def _scan(file: StoredFile) -> Iterator[tuple[int, int, int]]:
    """Yields (offset, bytes, records) of each block of a file."""
    if decompress := _decompressor(file.read(0, min(file.size, HEAD))):
        content = file.unpack(file.read(), decompress)
        count = sum(1 for _ in _check_records(file, content, 0))
        if count:
            yield 0, file.size, count
        return
    begin, rows, at = 0, 0, 0
    base, content = 0, b""
    while at < file.size:
        if at + HEAD > base + len(content):
            base, content = at, file.read(at, min(file.size, at + READ_BYTES))
        head = content[at - base : at - base + HEAD]
        damage = "it is damaged, or not a TFRecord file"
        at += HEAD + _check_head(file, head, at, file.size, damage) + FOOT
        rows += 1
        if at - begin >= BLOCK_BYTES or at == file.size:
            yield begin, at - begin, rows
            begin, rows = at, 0


def frame(record: bytes) -> bytes:
    """Returns a record framed with its length and checksums."""
    length = struct.pack("<Q", len(record))
    crcs = [struct.pack("<I", masked_crc(part)) for part in (length, record)]
    return b"".join((length, crcs[0], record, crcs[1]))


def write_records(rows: Iterable[dict[str, Array]], *, compress: bool = False) -> bytes:
    """Returns a file of Examples."""
    content = b"".join(frame(encode(row)) for row in rows)
    return gzip.compress(content, mtime=0) if compress else content
