"""Reads and writes tf.train.Example without TensorFlow, vectorized over records of equal layout.

An Example is a protocol buffer: a map from names to lists of bytes, floats or int64. Records of a
dataset mostly differ only in their values, so the first record of a layout is parsed byte by byte,
and all others with the same non-value bytes are read from the same offsets, without a loop over
rows. Field numbers: https://github.com/tensorflow/tensorflow/blob/master/tensorflow/core/example/
feature.proto and example.proto.
"""

import itertools
from collections.abc import Collection, Iterator
from dataclasses import dataclass

import numpy as np

from paceline.data.blocks import Array, Bytes, RowError

BYTES, FLOATS, INTS = 1, 2, 3
MAX_LAYOUTS = 64
"""Maximum number of layouts per block; further records are parsed individually."""


@dataclass(frozen=True)
class FeatureSpan:
    """Location of a feature's values in a record; `kind` is negative if each has its own key."""

    kind: int
    start: int
    size: int

    @property
    def part(self) -> slice:
        return slice(self.start, self.start + self.size)


def _varint(record: Bytes | bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        if at >= len(record) or shift > 63:
            raise ValueError("a number is truncated")
        byte = int(record[at])  # Indexing `bytes` is several times as fast as an array.
        at += 1
        value |= (byte & 0x7F) << shift
        shift += 7
        if byte < 0x80:
            return value, at


def _fields(record: Bytes | bytes, at: int, stop: int) -> Iterator[tuple[int, int, int, int]]:
    """Yields (field number, wire type, start, stop) of each field in [at, stop)."""
    while at < stop:
        key, at = _varint(record, at)
        number, wire = key >> 3, key & 7
        if wire == 2:
            size, at = _varint(record, at)
        elif wire == 0:
            size = _varint(record, at)[1] - at
        elif wire in (1, 5):
            size = 8 if wire == 1 else 4
        else:
            raise ValueError(f"wire type {wire}")
        if at + size > stop:
            raise ValueError("a field is longer than the record")
        yield number, wire, at, at + size
        at += size


def find_features(record: Bytes | bytes) -> dict[str, FeatureSpan]:
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


def _entry(record: Bytes | bytes, at: int, stop: int) -> tuple[str, FeatureSpan]:
    name, span = "", FeatureSpan(0, at, 0)
    for number, _, a, b in _fields(record, at, stop):
        if number == 1:
            name = bytes(record[a:b]).decode("utf-8", errors="replace")
        elif number == 2:
            for kind, _, c, d in _fields(record, a, b):
                span = _values(record, kind, c, d)
    return name, span


def _values(record: Bytes | bytes, kind: int, at: int, stop: int) -> FeatureSpan:
    parts = list(_fields(record, at, stop))
    if len(parts) == 1 and parts[0][1] == 2:
        _, _, a, b = parts[0]
        return FeatureSpan(kind, a, b - a)
    # Several byte strings, or numbers that are not packed, as old writers did.
    return FeatureSpan(-kind, at, stop - at)


def decode(
    content: Bytes,
    starts: Array,
    lengths: Array,
    names: tuple[str, ...],
    encoded: Collection[str] = (),
) -> list[Array]:
    """Returns one array per feature with one row per record. Raises RowError.

    Those of the features `encoded` contain one `bytes` object per record, of any length.
    """
    columns: dict[str, Array] = {name: np.empty(len(starts), object) for name in encoded}
    for numbers, records, spans in _group(content, starts, lengths, names):
        for name, span in spans.items():
            if name in encoded:
                if span.kind != BYTES:
                    raise RowError(f"has no image in feature {name!r}", int(numbers[0]))
                for number, record in zip(numbers, records[:, span.part], strict=True):
                    columns[name][number] = record.tobytes()
                continue
            try:
                values = _decode_span(records, span)
            except ValueError as error:
                raise RowError(f"feature {name!r}: {error}", int(numbers[0])) from None
            if name not in columns:
                columns[name] = np.empty((len(starts), *values.shape[1:]), values.dtype)
            column = columns[name]
            what = None
            if values.shape[1:] != column.shape[1:]:
                what = f"{values.shape[1]:,} values, others have {column.shape[1]:,}"
            elif values.dtype != column.dtype:
                what = f"the type {values.dtype}, others have {column.dtype}"
            if what:
                raise RowError(f"feature {name!r} has {what}", int(numbers[0]))
            column[numbers] = values
    return [columns[name] for name in names]


def _group(
    content: Bytes, starts: Array, lengths: Array, names: tuple[str, ...]
) -> Iterator[tuple[Array, Bytes, dict[str, FeatureSpan]]]:
    """Yields records of the same layout: their numbers, their bytes, and where the features are."""
    todo = np.arange(len(starts))
    for layouts in itertools.count():
        if len(todo) == 0:
            return
        number = int(todo[0])
        start, length = int(starts[number]), int(lengths[number])
        record = content[start : start + length]
        found = _parse(record, names, number)
        spans = {name: found[name] for name in names}
        if layouts >= MAX_LAYOUTS:
            yield todo[:1], record[None], spans
            todo = todo[1:]
            continue
        same = todo[lengths[todo] == length]
        rows = _stack(content, starts[same], length)
        alike = np.all((rows == record) | _free(length, found, names), axis=1)
        # Integers have variable length: their last bytes must be at the same offsets.
        for span in spans.values():
            if span.kind == INTS:
                ends = (rows[:, span.part] < 0x80) == (record[span.part] < 0x80)
                alike &= np.all(ends, axis=1)
        chosen = same[alike]
        yield chosen, rows[alike], spans
        todo = np.setdiff1d(todo, chosen, assume_unique=True)


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
        found = find_features(record.tobytes())
    except ValueError as error:
        raise RowError(f"is not a tf.train.Example ({error})", row) from None
    for name in names:
        if name not in found or found[name].kind == 0:
            have = ", ".join(sorted(found)) or "none"
            raise RowError(f"has no feature {name!r} (it has: {have})", row)
    return found


def _free(length: int, found: dict[str, FeatureSpan], names: tuple[str, ...]) -> Array:
    """Returns a mask of the bytes that are values and may differ between records."""
    free = np.zeros(length, np.bool_)
    for name, span in found.items():
        # Unused features may contain anything of the same length.
        if span.kind > 0 if name in names else span.kind in (BYTES, -BYTES, FLOATS):
            free[span.part] = True
    return free


def _decode_span(rows: Bytes, span: FeatureSpan) -> Array:
    """Returns the values of one feature of records with the same layout. Raises ValueError."""
    part = rows[:, span.part]
    if span.kind == BYTES:
        return part
    if span.kind == FLOATS:
        return np.ascontiguousarray(part).view("<f4")
    if span.kind == INTS:
        return _decode_varints(part)
    fields = list(_fields(rows[0], span.start, span.start + span.size))
    if span.kind == -BYTES:
        raise ValueError(f"{len(fields)} byte strings, expected one")
    # Numbers that are not packed, so that their bytes are equal in all rows.
    values: list[float] = []
    for _, wire, a, b in fields:
        if span.kind == -FLOATS and wire == 5:
            values.append(float(rows[0, a:b].view("<f4")[0]))
        elif span.kind == -INTS and wire == 0:
            values.append(int(_decode_varints(rows[:1, a:b])[0, 0]))
    array = np.array(values, np.float32 if span.kind == -FLOATS else np.int64)
    return np.repeat(array[None], len(rows), axis=0)


def _decode_varints(part: Bytes) -> Array:
    """Decodes rows of integers whose last bytes are at the same offsets in all rows."""
    ends = np.flatnonzero(part[0] < 0x80)
    if part.shape[1] == 0:
        return np.zeros((len(part), 0), np.int64)
    if len(ends) == 0 or ends[-1] != part.shape[1] - 1:
        raise ValueError("a number is truncated")
    sizes = np.diff(ends, prepend=-1)
    starts = ends + 1 - sizes
    shifts = 7 * (np.arange(part.shape[1]) - np.repeat(starts, sizes)).astype(np.uint64)
    bits = (part & 0x7F).astype(np.uint64) << shifts
    return np.bitwise_or.reduceat(bits, starts, axis=1).view(np.int64)


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
