"""Converts Arrow columns to arrays, without copies where possible and without a loop over rows.

| column | array of n rows |
|---|---|
| integers, floats, booleans | (n,) |
| fixed-size lists, also nested, and fixed-shape tensors | (n, size, ...) |
| lists of equal length | (n, length) |
| binary of equal length | (n, length) bytes |
| dense vectors in Spark's format | (n, size) |
| decimals | (n,) float64 |

Nulls are an error unless `fill` is given. Strings are not supported.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from paceline.data.blocks import Array, ColumnSelection, RowError
from paceline.data.stores import StoredFile


def to_arrays(
    table: Any, selection: ColumnSelection, file: StoredFile, where: str, row_of: str = ""
) -> list[Array]:
    """Converts the selected columns of a table. Raises DataError with the column and the row."""
    arrays = []
    for name in selection.names:
        try:
            arrays.append(to_array(table.column(name), selection.fill))
        except RowError as error:
            row = "" if error.row is None else f", row {error.row}{row_of}"
            raise file.error(f"column {name!r} contains {error}", where + row) from None
    return arrays


def to_array(column: Any, fill: float | None = None) -> Array:
    """Converts a pyarrow Array or ChunkedArray to one NumPy array. Raises RowError."""
    import pyarrow as pa
    import pyarrow.types as types

    if isinstance(column, pa.ChunkedArray):
        chunks = column.chunks or [pa.array([], column.type)]
        column = chunks[0] if len(chunks) == 1 else pa.concat_arrays(chunks)
    if isinstance(column, pa.ExtensionArray):
        shape = getattr(column.type, "shape", None)
        flat = to_array(column.storage, fill)
        return flat.reshape(len(flat), *shape) if shape else flat
    kind = column.type
    if types.is_dictionary(kind):
        return to_array(column.dictionary_decode(), fill)
    if types.is_struct(kind) and {"type", "values"} <= {field.name for field in kind}:
        sparse = to_array(column.field("type"), fill) != 1
        if sparse.any():
            raise RowError("a sparse vector; store dense vectors", int(np.argmax(sparse)))
        return to_array(column.field("values"), fill)
    nested = types.is_fixed_size_list(kind) or types.is_list(kind) or types.is_large_list(kind)
    binary = types.is_binary(kind) or types.is_large_binary(kind)
    if column.null_count:
        if fill is None or nested or binary or types.is_fixed_size_binary(kind):
            row = int(np.argmax(column.is_null().to_numpy(zero_copy_only=False)))
            remedy = "" if nested or binary else ", or set a fill value"
            raise RowError(f"a null; remove such rows{remedy}", row)
        if types.is_decimal(kind):
            column = column.cast(pa.float64())
        try:
            column = column.fill_null(pa.scalar(fill).cast(column.type))
        except pa.ArrowInvalid:
            raise RowError(f"nulls of {kind} cannot be filled with {fill!r}") from None
        return to_array(column)
    if nested:
        fixed = types.is_fixed_size_list(kind)
        length = kind.list_size if fixed else _one_length(np.diff(column.offsets.to_numpy()))
        try:
            # `values` would ignore the offset of a slice; `flatten` respects it without a copy.
            inner = to_array(column.flatten(), fill)
        except RowError as error:
            outer_row = None if error.row is None else error.row // max(1, length)
            raise RowError(str(error), outer_row) from None
        return inner.reshape(len(column), length, *inner.shape[1:])
    if types.is_fixed_size_binary(kind):
        width = kind.byte_width
        start = column.offset * width
        flat = np.frombuffer(column.buffers()[1], np.uint8)[start : start + len(column) * width]
        return flat.reshape(len(column), width)
    if binary:
        return _convert_binary(column, np.int64 if types.is_large_binary(kind) else np.int32)
    if types.is_boolean(kind):
        return np.asarray(column.to_numpy(zero_copy_only=False), dtype=np.uint8)
    if types.is_decimal(kind):
        return np.asarray(column.cast(pa.float64()).to_numpy())
    if types.is_integer(kind) or types.is_floating(kind):
        return np.asarray(column.to_numpy())
    raise RowError(f"values of the unsupported type {kind}")


def _convert_binary(column: Any, width: type[np.int32] | type[np.int64]) -> Array:
    _, offsets, data = column.buffers()
    size = np.dtype(width).itemsize
    ends = np.frombuffer(offsets, width, count=len(column) + 1, offset=column.offset * size)
    length = _one_length(np.diff(ends))
    if not length:
        return np.empty((len(column), 0), np.uint8)
    flat = np.frombuffer(data, np.uint8)[int(ends[0]) : int(ends[-1])]
    return flat.reshape(len(column), length)


def _one_length(lengths: Array) -> int:
    if len(lengths) == 0:
        return 0
    differs = lengths != lengths[0]
    if differs.any():
        row = int(np.argmax(differs))
        raise RowError(f"{int(lengths[row]):,} values where others have {int(lengths[0]):,}", row)
    return int(lengths[0])
