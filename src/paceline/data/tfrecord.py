"""TFRecord files: framed records with checksums, each a tf.train.Example.

A record is its length (u64), a masked CRC-32C of that, the data and a masked CRC-32C of the data,
all little-endian: https://www.tensorflow.org/tutorials/load_data/tfrecord#tfrecords_format_details.
A file is split into blocks of complete records. Their offsets are found in one pass and stored in
an index in the cache directory. A compressed file (gzip, zlib) is one block.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import os
import struct
import zlib
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from paceline.data import array_cache
from paceline.data.blocks import (
    ColumnSelection,
    DataBlock,
    Rows,
    bad_file,
    check_not_empty,
    stack_features,
)
from paceline.data.stores import StoredFile, read_bytes, require_extra
from paceline.data.tf_example import Array, ExampleError, decode, encode, find_features
from paceline.errors import DataError, UsageError, suggest_name

BLOCK_BYTES = 4 << 20
"""Approximate size of a block."""
READ_BYTES = 32 << 20
HEAD, FOOT = 12, 4
_MASK_DELTA = 0xA282EAD8


def masked_crc(content: bytes) -> int:
    """Returns the masked CRC-32C of the format."""
    crc: int = _crc()(content)
    return ((crc >> 15 | crc << 17) + _MASK_DELTA) & 0xFFFFFFFF


def _crc() -> Any:
    return require_extra("google_crc32c", "data", "TFRecord").value


@dataclass(frozen=True)
class RecordIndex:
    """Blocks of one file, as (offset, bytes, rows)."""

    blocks: list[tuple[int, int, int]]


class TFRecordSource:
    """TFRecord files of Examples with the same features."""

    def __init__(
        self,
        files: tuple[StoredFile, ...],
        selection: ColumnSelection,
        blocks: tuple[DataBlock, ...],
    ) -> None:
        self.files = files
        self.selection = selection
        self.blocks = blocks

    def read(self, block: DataBlock) -> Rows:
        file = self.files[block.file]
        content = _unpack(file, block)
        starts, lengths = _check_records(file, content, block.offset)
        if len(starts) != block.rows:
            raise bad_file(
                file,
                f"{len(starts):,} records instead of {block.rows:,}: the file has changed",
                f" (at byte {block.offset:,})",
            )
        chosen = self.selection
        names = (*chosen.features, *([chosen.label] if chosen.label else []))
        try:
            columns = decode(np.frombuffer(content, np.uint8), starts, lengths, names)
        except ExampleError as error:
            at = block.offset + int(starts[error.row]) - HEAD
            raise bad_file(file, f"a record that {error}", f" (at byte {at:,})") from None
        labels: Array = np.zeros(block.rows, np.int64)
        if self.selection.label is not None:
            *columns, labels = columns
            if labels.ndim == 2 and labels.shape[1] == 1:
                labels = labels[:, 0]
        try:
            return stack_features(columns, self.selection.shape), labels
        except ValueError as error:
            raise bad_file(file, str(error), f" (at byte {block.offset:,})") from None

    def count_classes(self) -> int | None:
        return None


def open_tfrecords(files: tuple[StoredFile, ...], selection: ColumnSelection) -> TFRecordSource:
    """Indexes the records of all files. Raises DataError for a truncated or empty file."""
    require_extra("google_crc32c", "data", "TFRecord")
    if not selection.skip_empty:
        check_not_empty(list(files))
    kept: list[StoredFile] = []
    blocks: list[DataBlock] = []
    for file in files:
        index = _find_blocks(file) if file.size else RecordIndex([])
        if not index.blocks:
            if selection.skip_empty:
                continue
            raise bad_file(file, "contains no records; remove it or use --skip-empty")
        blocks += [DataBlock(len(kept), start, rows, size) for start, size, rows in index.blocks]
        kept.append(file)
    if not blocks:
        raise DataError(f"{files[0].url}: none of {len(files)} files contains a record")
    return TFRecordSource(tuple(kept), _choose(kept[0], blocks[0], selection), tuple(blocks))


def _choose(file: StoredFile, block: DataBlock, selection: ColumnSelection) -> ColumnSelection:
    """Selects the features by the first record."""
    from dataclasses import replace

    content = _unpack(file, block)
    starts, lengths = _check_records(file, content, block.offset)
    record = np.frombuffer(content, np.uint8)[int(starts[0]) : int(starts[0] + lengths[0])]
    try:
        names = sorted(find_features(record))
    except ValueError as error:
        raise bad_file(file, f"its first record is not a tf.train.Example ({error})") from None
    label = selection.label
    if label is None and "label" in names and "label" not in selection.features:
        label = "label"
    features = selection.features or tuple(name for name in names if name != label)
    if not features:
        raise UsageError(f"{file.url}: no feature is left besides the label; use --features")
    for name in (*features, *([label] if label else [])):
        if name not in names:
            raise bad_file(file, f"has no feature {name!r}: {suggest_name(name, names)}")
    return replace(selection, features=features, label=label)


def _unpack(file: StoredFile, block: DataBlock) -> bytes:
    content = read_bytes(file.url, block.offset, block.offset + block.size)
    return _decompress(file, content) if block.offset == 0 else content


def _decompress(file: StoredFile, content: bytes) -> bytes:
    kind = _compression(content)
    try:
        if kind == "gzip":
            return gzip.decompress(content)
        if kind == "zlib":
            return zlib.decompress(content)
    except (EOFError, OSError, zlib.error) as error:
        raise bad_file(file, f"is truncated or damaged ({error})") from None
    return content


def _compression(head: bytes) -> str | None:
    if head[:2] == b"\x1f\x8b":
        return "gzip"
    if len(head) >= HEAD:
        # An uncompressed file begins with a length and its checksum.
        length, crc = head[:8], struct.unpack("<I", head[8:12])[0]
        if masked_crc(length) == crc:
            return None
    if len(head) > 1 and head[0] & 0x0F == 8 and (head[0] << 8 | head[1]) % 31 == 0:
        return "zlib"
    return None


def _check_records(
    file: StoredFile, content: bytes, base: int
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Returns starts and lengths of the records' data after verifying every checksum."""
    crc = _crc()
    starts, lengths = [], []
    view = memoryview(content)
    at, size = 0, len(content)
    head = struct.Struct("<QI")
    foot = struct.Struct("<I")
    while at < size:
        where = f" (at byte {base + at:,})"
        if at + HEAD > size:
            raise bad_file(file, f"is truncated: {size - at} bytes in the last header", where)
        length, length_crc = head.unpack_from(view, at)
        found = crc(content[at : at + 8])
        if ((found >> 15 | found << 17) + _MASK_DELTA) & 0xFFFFFFFF != length_crc:
            raise bad_file(file, "wrong checksum of a record's length: the file is damaged", where)
        start = at + HEAD
        if start + length + FOOT > size:
            raise bad_file(
                file,
                f"is truncated: a record of {length:,} bytes, of which {size - start:,} exist",
                where,
            )
        found = crc(content[start : start + length])
        if ((found >> 15 | found << 17) + _MASK_DELTA) & 0xFFFFFFFF != foot.unpack_from(
            view, start + length
        )[0]:
            raise bad_file(file, "wrong checksum of a record: the file is damaged", where)
        starts.append(start)
        lengths.append(length)
        at = start + length + FOOT
    return np.array(starts, np.int64), np.array(lengths, np.int64)


# ---- the index -------------------------------------------------------------------------------


def _find_blocks(file: StoredFile) -> RecordIndex:
    identity = f"{file.url} {file.size} {file.stamp}"
    digest = hashlib.sha256(identity.encode()).hexdigest()[:24]
    path = array_cache.root() / "index" / f"{digest}.json"
    try:
        return RecordIndex([(a, b, c) for a, b, c in json.loads(path.read_text())])
    except (OSError, ValueError, TypeError):
        pass
    index = _scan(file)
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
        partial.write_text(json.dumps(index.blocks))
        os.replace(partial, path)
    return index


def _scan(file: StoredFile) -> RecordIndex:
    head = read_bytes(file.url, 0, min(file.size, HEAD))
    if _compression(head) is not None:
        content = _decompress(file, read_bytes(file.url))
        rows = len(_check_records(file, content, 0)[0])
        return RecordIndex([(0, file.size, rows)] if rows else [])
    blocks: list[tuple[int, int, int]] = []
    begin, rows, at = 0, 0, 0
    base, content = 0, b""
    crc = _crc()
    while at < file.size:
        if at + HEAD > base + len(content):
            base, content = at, read_bytes(file.url, at, min(file.size, at + READ_BYTES))
        where = f" (at byte {at:,})"
        if at + HEAD > base + len(content):
            what = f"is truncated: {file.size - at} bytes in the last header"
            raise bad_file(file, what, where)
        length, length_crc = struct.unpack_from("<QI", content, at - base)
        found = crc(content[at - base : at - base + 8])
        if ((found >> 15 | found << 17) + _MASK_DELTA) & 0xFFFFFFFF != length_crc:
            raise bad_file(
                file,
                "wrong checksum of a record's length: it is damaged, or not a TFRecord file",
                where,
            )
        stop = at + HEAD + length + FOOT
        if stop > file.size:
            raise bad_file(
                file,
                f"is truncated: a record of {length:,} bytes, of which "
                f"{max(0, file.size - at - HEAD):,} exist",
                where,
            )
        rows += 1
        at = stop
        if at - begin >= BLOCK_BYTES:
            blocks.append((begin, at - begin, rows))
            begin, rows = at, 0
    if rows:
        blocks.append((begin, at - begin, rows))
    return RecordIndex(blocks)


# ---- writing ---------------------------------------------------------------------------------


def frame(record: bytes) -> bytes:
    """Returns a record framed with its length and checksums."""
    length = struct.pack("<Q", len(record))
    return b"".join(
        (
            length,
            struct.pack("<I", masked_crc(length)),
            record,
            struct.pack("<I", masked_crc(record)),
        )
    )


def write_records(rows: Iterable[dict[str, Array]], *, compress: bool = False) -> bytes:
    """Returns a file of Examples."""
    content = b"".join(frame(encode(row)) for row in rows)
    return gzip.compress(content, mtime=0) if compress else content
