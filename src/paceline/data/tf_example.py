"""Reads and writes tf.train.Example without TensorFlow, vectorized over records of equal layout.

An Example is a protocol buffer: a map from names to lists of bytes, floats or int64. Records of a
dataset mostly differ only in their values, so the first record of a layout is parsed byte by byte,
and all others with the same non-value bytes are read from the same offsets, without a loop over
rows. Field numbers: https://github.com/tensorflow/tensorflow/blob/master/tensorflow/core/example/
feature.proto and example.proto.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
Bytes = npt.NDArray[np.uint8]

BYTES, FLOATS, INTS = 1, 2, 3
_KINDS = {BYTES: "bytes", FLOATS: "floats", INTS: "integers"}
MAX_LAYOUTS = 64
"""Maximum number of layouts per block; further records are parsed individually."""


class ExampleError(ValueError):
    """Raised for an invalid Example or a missing feature; `row` counts within the block."""

    def __init__(self, text: str, row: int) -> None:
        super().__init__(text)
        self.row = row


@dataclass(frozen=True)
class FeatureSpan:
    """Location of a feature's values in a record: kind, first byte, bytes, number of values."""

    kind: int
    start: int
    size: int
    count: int


def _varint(record: Bytes | bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        if at >= len(record) or shift > 63:
            raise ValueError("a number is truncated")
        byte = int(record[at])
        at += 1
        value |= (byte & 0x7F) << shift
        shift += 7
        if byte < 0x80:
            return value, at


def _fields(record: Bytes, at: int, stop: int) -> Iterator[tuple[int, int, int, int]]:
    """Yields (field number, wire type, start, stop) of each field in [at, stop)."""
    while at < stop:
        key, at = _varint(record, at)
        number, wire = key >> 3, key & 7
        if wire == 2:
            size, at = _varint(record, at)
        elif wire == 5:
            size = 4
        elif wire == 1:
            size = 8
        elif wire == 0:
            _, end = _varint(record, at)
            size = end - at
        else:
            raise ValueError(f"wire type {wire}")
        if at + size > stop:
            raise ValueError("a field is longer than the record")
        yield number, wire, at, at + size
        at += size


def find_features(record: Bytes) -> dict[str, FeatureSpan]:
    """Returns all features of one record. Raises ValueError if it is not an Example."""
    found: dict[str, FeatureSpan] = {}
    for number, _, a, b in _fields(record, 0, len(record)):
        if number != 1:
            continue
        for inner, _, c, d in _fields(record, a, b):
            if inner == 1:
                name, span = _entry(record, c, d)
                found[name] = span
    return found


def _entry(record: Bytes, at: int, stop: int) -> tuple[str, FeatureSpan]:
    name, span = "", FeatureSpan(0, at, 0, 0)
    for number, _, a, b in _fields(record, at, stop):
        if number == 1:
            name = bytes(record[a:b]).decode("utf-8", errors="replace")
        elif number == 2:
            for kind, _, c, d in _fields(record, a, b):
                span = _values(record, kind, c, d)
    return name, span


def _values(record: Bytes, kind: int, at: int, stop: int) -> FeatureSpan:
    """Returns the span of packed values or of a single bytes value; others are joined later."""
    parts = list(_fields(record, at, stop))
    if kind == BYTES:
        if len(parts) == 1:
            _, _, a, b = parts[0]
            return FeatureSpan(kind, a, b - a, 1)
        return FeatureSpan(kind, at, stop - at, len(parts))
    if len(parts) == 1 and parts[0][1] == 2:
        _, _, a, b = parts[0]
        count = (b - a) // 4 if kind == FLOATS else int(np.sum(record[a:b] < 0x80))
        return FeatureSpan(kind, a, b - a, count)
    # Not packed: every value has its own key, as old writers did.
    return FeatureSpan(-kind, at, stop - at, len(parts))


def decode_span(record: Bytes, span: FeatureSpan) -> Array:
    """Returns the values of one feature of one record."""
    if span.kind == BYTES:
        if span.count != 1:
            raise ValueError(f"{span.count} byte strings, expected one")
        return record[span.start : span.start + span.size]
    if span.kind == FLOATS:
        return record[span.start : span.start + span.size].view("<f4")
    values: list[float] = []
    at, stop = span.start, span.start + span.size
    if span.kind == INTS:
        while at < stop:
            value, at = _varint(record, at)
            values.append(_signed(value))
        return np.array(values, np.int64)
    for _, wire, a, b in _fields(record, at, stop):
        if span.kind == -FLOATS and wire == 5:
            values.append(float(record[a:b].view("<f4")[0]))
        elif span.kind == -INTS and wire == 0:
            values.append(_signed(_varint(record, a)[0]))
    return np.array(values, np.float32 if span.kind == -FLOATS else np.int64)


def _signed(value: int) -> int:
    return value - (1 << 64) if value >= 1 << 63 else value


def decode(content: Bytes, starts: Array, lengths: Array, names: tuple[str, ...]) -> list[Array]:
    """Returns one array per feature with one row per record. Raises ExampleError."""
    count = len(starts)
    columns: dict[str, Array] = {}
    todo = np.arange(count)
    for _ in range(MAX_LAYOUTS):
        if len(todo) == 0:
            break
        row = int(todo[0])
        length = int(lengths[row])
        record = content[int(starts[row]) : int(starts[row]) + length]
        spans = _parse(record, names, row)
        same = todo[lengths[todo] == length]
        rows = _stack(content, starts[same], length)
        alike = np.all((rows == record) | _free(length, spans, record), axis=1)
        # Integers have variable length: their last bytes must be at the same offsets.
        for span in spans.values():
            if span.kind == INTS:
                part = slice(span.start, span.start + span.size)
                ends = (rows[:, part] < 0x80) == (record[part] < 0x80)
                alike &= np.all(ends, axis=1)
        chosen, matching = same[alike], rows[alike]
        for name, span in spans.items():
            _store(columns, name, chosen, _decode_many(matching, span), count)
        todo = np.setdiff1d(todo, chosen, assume_unique=True)
    for row in todo.tolist():
        start = int(starts[row])
        record = content[start : start + int(lengths[row])]
        for name, span in _parse(record, names, row).items():
            try:
                values = decode_span(record, span)[None]
            except ValueError as error:
                raise ExampleError(f"feature {name!r}: {error}", row) from None
            _store(columns, name, np.array([row]), values, count)
    return [columns[name] for name in names]


def _stack(content: Bytes, starts: Array, length: int) -> Bytes:
    """Returns records of one length as rows; a view if they are equally spaced."""
    steps = np.diff(starts)
    if len(steps) and np.all(steps == steps[0]):
        first = content[int(starts[0]) :]
        return np.lib.stride_tricks.as_strided(
            first, (len(starts), length), (int(steps[0]), 1), writeable=False
        )
    return content[starts[:, None] + np.arange(length)]


def _parse(record: Bytes, names: tuple[str, ...], row: int) -> dict[str, FeatureSpan]:
    try:
        found = find_features(record)
    except ValueError as error:
        raise ExampleError(f"is not a tf.train.Example ({error})", row) from None
    for name in names:
        if name not in found or found[name].kind == 0:
            have = ", ".join(sorted(found)) or "none"
            raise ExampleError(f"has no feature {name!r} (it has: {have})", row)
    return {name: found[name] for name in names}


def _free(length: int, spans: dict[str, FeatureSpan], record: Bytes) -> npt.NDArray[np.bool_]:
    """Returns a mask of the bytes that are values and may differ between records."""
    free = np.zeros(length, np.bool_)
    for span in spans.values():
        if span.kind in (BYTES, FLOATS, INTS) and not (span.kind == BYTES and span.count != 1):
            free[span.start : span.start + span.size] = True
    for name, span in find_features(record).items():
        # Unused features may contain anything of the same length.
        if name not in spans and span.kind in (BYTES, FLOATS):
            free[span.start : span.start + span.size] = True
    return free


def _decode_many(rows: Bytes, span: FeatureSpan) -> Array:
    part = rows[:, span.start : span.start + span.size]
    if span.kind == BYTES and span.count == 1:
        return part
    if span.kind == FLOATS:
        return np.ascontiguousarray(part).view("<f4")
    if span.kind == INTS:
        ends = np.flatnonzero(part[0] < 0x80)
        values = np.zeros((len(rows), len(ends)), np.uint64)
        begin = 0
        for index, end in enumerate(ends):
            for shift, column in enumerate(range(begin, int(end) + 1)):
                bits = (part[:, column] & 0x7F).astype(np.uint64)
                values[:, index] |= bits << np.uint64(7 * shift)
            begin = int(end) + 1
        return values.view(np.int64)
    # Values that are not packed: their bytes were required to be equal.
    return np.repeat(decode_span(rows[0], span)[None], len(rows), axis=0)


def _store(columns: dict[str, Array], name: str, rows: Array, values: Array, count: int) -> None:
    if name not in columns:
        columns[name] = np.empty((count, *values.shape[1:]), values.dtype)
    column = columns[name]
    if values.shape[1:] != column.shape[1:]:
        raise ExampleError(
            f"feature {name!r} has {values.shape[1]:,} values, others have {column.shape[1]:,}",
            int(rows[0]),
        )
    if values.dtype != column.dtype:
        raise ExampleError(
            f"feature {name!r} has the type {values.dtype}, others have {column.dtype}",
            int(rows[0]),
        )
    column[rows] = values


# ---- writing ---------------------------------------------------------------------------------


def _write_varint(value: int) -> bytes:
    value &= (1 << 64) - 1
    out = bytearray()
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def _block(number: int, content: bytes) -> bytes:
    return _write_varint(number << 3 | 2) + _write_varint(len(content)) + content


def encode(features: dict[str, Array]) -> bytes:
    """Encodes one record: bytes as a bytes feature, floats as floats, other numbers as int64."""
    entries = b""
    for name, values in sorted(features.items()):
        if values.dtype == np.uint8:
            feature = _block(BYTES, _block(1, values.tobytes()))
        elif values.dtype.kind == "f":
            feature = _block(FLOATS, _block(1, values.astype("<f4").tobytes()))
        else:
            packed = b"".join(_write_varint(int(v)) for v in np.atleast_1d(values).reshape(-1))
            feature = _block(INTS, _block(1, packed))
        entries += _block(1, _block(1, name.encode()) + _block(2, feature))
    return _block(1, entries)
