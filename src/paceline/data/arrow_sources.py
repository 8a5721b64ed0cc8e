"""Formats that Arrow decodes: Parquet and CSV.

A block of Parquet is a row group, read with one request for the bytes of its columns. A block of
CSV or TSV is a range of complete lines. The first line contains the column names. Values must not
contain line breaks, because files are split at those. A compressed CSV file is one block.

Columns are converted to arrays without copies where possible and without a loop over rows:

| column | array of n rows |
|---|---|
| integers, floats, booleans | (n,) |
| fixed-size lists, also nested, and fixed-shape tensors | (n, size, ...) |
| lists of equal length | (n, length) |
| binary of equal length | (n, length) bytes |
| dense vectors in Spark's format | (n, size) |
| encoded images: binary, or {bytes, path} as Hugging Face stores them | (n, C, H, W) bytes |
| decimals | (n,) float64 |

Nulls are an error unless `fill` is given. Strings are not supported.
"""

import io
import json
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from paceline.data.blocks import Array, BlockSource, ColumnSelection, DataBlock, RowError, Rows
from paceline.data.encoded_images import ImageDecoder, is_encoded
from paceline.data.stores import GZIP_MAGIC, StoredFile, require_extra, scheme_of
from paceline.errors import DataError

CSV_BLOCK_BYTES = 4 << 20
TAIL_BYTES = 64 * 1024
"""Most footers of Parquet are shorter, so that one request is sufficient."""
MARK = b"PAR1"


class ArrowSource(BlockSource):
    """Files that Arrow decodes to tables."""

    def __init__(self, files: tuple[StoredFile, ...], selection: ColumnSelection) -> None:
        super().__init__(files, selection)
        self._decoders: dict[str, ImageDecoder] = {}
        """By column that contains encoded images."""

    def _resolve(self, file: StoredFile, schema: Any, images: Sequence[str]) -> None:
        """Selects the columns, given those with images."""
        self.columns = tuple(schema.names)
        self.selection = self.selection.resolve(
            file, self.columns, "column", images, tuple(named_classes(schema))
        )

    def _convert(self, block: DataBlock, table: Any, where: str, row_of: str = "") -> Rows:
        """Converts the selected columns. Raises DataError with the column and the row."""
        file = self.files[block.file]
        arrays = []
        for name in self.selection.names:
            try:
                arrays.append(self._convert_column(name, table.column(name)))
            except RowError as error:
                row = "" if error.row is None else f", row {error.row}{row_of}"
                raise file.error(f"column {name!r} contains {error}", where + row) from None
        return self._make_rows(block, arrays, where)

    def _convert_column(self, name: str, column: Any) -> Array:
        images = name in self._decoders or has_images(column.type)
        if not images and is_binary(column.type):
            # The bytes of an image file or pixels: the first row decides for all.
            first = next((row for row in column.slice(0, 1).to_pylist() if row is not None), b"")
            images = is_encoded(first)
        if not images:
            return to_array(column, self.selection.fill)
        self.decodes_images = True
        decoder = self._decoders.setdefault(name, ImageDecoder(self.selection.shape))
        return decoder.decode(image_bytes(column))


class CachedRangeFile(io.RawIOBase):
    """A file of which one byte range is cached; the rest is fetched on demand."""

    def __init__(self, file: StoredFile, begin: int, content: bytes) -> None:
        self._file = file
        self._begin, self._content = begin, content
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = 0) -> int:
        self._at = (0, self._at, self._file.size)[whence] + offset
        return self._at

    def read(self, count: int = -1) -> bytes:
        start = self._at
        stop = self._file.size if count < 0 else min(self._file.size, start + count)
        self._at = max(start, stop)
        if self._begin <= start and stop <= self._begin + len(self._content):
            return self._content[start - self._begin : stop - self._begin]
        return self._file.read(start, stop) if stop > start else b""

    def readinto(self, buffer: Any) -> int:
        content = self.read(len(buffer))
        buffer[: len(content)] = content
        return len(content)


class ParquetSource(ArrowSource):
    """Parquet files with one schema; opening them reads only their footers.

    Raises DataError for a file that is empty, truncated, not Parquet, lacks a column, has other
    types than the first, or has no rows; UsageError if no column is left for features.
    """

    def __init__(self, files: tuple[StoredFile, ...], selection: ColumnSelection) -> None:
        require_extra("pyarrow", "data", "Parquet")
        super().__init__(files, selection)
        self._first = files[0]
        self._classes: int | None = None
        self._types: dict[str, Any] = {}
        self._footers: dict[int, Any] = {}
        self._find_blocks(self._find)

    def _find(self, file: StoredFile, number: int) -> list[DataBlock]:
        footer = self._footers[number] = read_footer(file)
        schema = footer.schema.to_arrow_schema()
        if not self._types:
            images = [field.name for field in schema if has_images(field.type)]
            self._resolve(file, schema, images)
            self._classes = count_named_classes(schema, self.selection.label)
            self._types = {name: schema.field(name).type for name in self.selection.names}
        for name, kind in self._types.items():
            if name not in schema.names:
                raise file.error(f"has no column {name!r}, unlike {self._first.url}")
            found = schema.field(name).type
            if not found.equals(kind):
                raise file.error(
                    f"column {name!r} has the type {found}, but {kind} in {self._first.url}; "
                    "all files must have the same schema"
                )
        groups = [footer.row_group(group) for group in range(footer.num_row_groups)]
        return [
            DataBlock(number, index, group.num_rows, group.total_byte_size)
            for index, group in enumerate(groups)
            if group.num_rows
        ]

    def read(self, block: DataBlock) -> Rows:
        file = self.files[block.file]
        where = f", row group {block.offset}"
        try:
            return self._convert(block, self._read_group(file, block), where)
        except DataError:
            raise
        except ValueError as error:
            raise file.error(str(error), where) from None
        except Exception as error:
            at = self._range(block)[0]
            raise file.error(f"is truncated or damaged ({error})", where, at=at) from error

    def _chunks(self, block: DataBlock) -> list[Any]:
        """Returns the metadata of all column chunks of a row group."""
        group = self._footers[block.file].row_group(block.offset)
        return [group.column(index) for index in range(group.num_columns)]

    def _range(self, block: DataBlock) -> tuple[int, int]:
        """Returns the byte range of the selected columns of a row group."""
        starts, stops = [], []
        for chunk in self._chunks(block):
            if chunk.path_in_schema.partition(".")[0] in self._types:
                start = chunk.data_page_offset
                if chunk.has_dictionary_page:
                    start = min(start, chunk.dictionary_page_offset)
                starts.append(start)
                stops.append(start + chunk.total_compressed_size)
        return min(starts), max(stops)

    def _read_group(self, file: StoredFile, block: DataBlock) -> Any:
        import pyarrow.parquet as pq

        source: Any = file.url.removeprefix("file://")
        if scheme_of(file.url) != "file":
            start, stop = self._range(block)
            content = file.read(start, stop)
            if len(content) < stop - start:
                raise EOFError(f"{len(content):,} bytes instead of {stop - start:,}")
            source = CachedRangeFile(file, start, content)
        with pq.ParquetFile(source, metadata=self._footers[block.file]) as reader:
            return reader.read_row_group(block.offset, list(self._types), use_threads=False)

    def count_classes(self) -> int | None:
        """Returns the number of classes from the schema or the footers' statistics, if present."""
        if self._classes is not None:
            return self._classes
        found = [
            chunk.statistics
            for block in self.blocks
            for chunk in self._chunks(block)
            if chunk.path_in_schema == self.selection.label
        ]
        if any(s is None or not s.has_min_max or not isinstance(s.max, int) for s in found):
            return None
        highest = max((statistics.max for statistics in found), default=-1)
        return highest + 1 if highest >= 0 else None


def read_footer(file: StoredFile) -> Any:
    """Returns a file's metadata. Raises DataError if there is none."""
    import pyarrow.parquet as pq

    if file.size < 12:
        raise file.error(f"has only {file.size} bytes: too short for Parquet")
    start = max(0, file.size - TAIL_BYTES)
    tail = file.read(start, file.size)
    if tail[-4:] != MARK:
        raise file.error(
            f"ends with {tail[-4:].hex()} instead of {MARK.hex()} ({MARK.decode()}): it is "
            "truncated, or not a Parquet file",
            at=file.size - 4,
        )
    try:
        return pq.read_metadata(CachedRangeFile(file, start, tail))
    except DataError:
        raise
    except Exception as error:
        raise file.error(f"has a damaged footer ({error})", at=start) from error


class CsvSource(ArrowSource):
    """CSV files with the same columns; the types come from the first block.

    Opening them counts the lines. Raises DataError for an empty file or different columns.
    """

    def __init__(self, files: tuple[StoredFile, ...], selection: ColumnSelection) -> None:
        pa = require_extra("pyarrow", "data", "CSV")
        super().__init__(files, selection)
        self._head = b""
        self._head_url = ""
        self._find_blocks(self._find)
        schema = self._parse(self.blocks[0], None).schema
        self._resolve(self.files[0], schema, ())
        self._types = {name: schema.field(name).type for name in self.selection.names}
        for name in self.selection.features:
            # Integers in the first block may be followed by fractions.
            if pa.types.is_integer(self._types[name]):
                self._types[name] = pa.float64()

    def _find(self, file: StoredFile, number: int) -> list[DataBlock]:
        """Returns ranges of complete lines; the first one includes the header."""
        blocks: list[DataBlock] = []
        for begin, size, content in _ranges(file):
            # Arrow skips empty lines; a single carriage return is also one.
            rows = sum(line not in (b"", b"\r") for line in content.split(b"\n"))
            if begin == 0:
                head = content.partition(b"\n")[0] + b"\n"
                self._head, self._head_url = self._head or head, self._head_url or file.url
                if head.strip() != self._head.strip():
                    ours, theirs = (h.decode(errors="replace").strip() for h in (head, self._head))
                    raise file.error(f"has the columns {ours!r}, but {self._head_url} {theirs!r}")
                rows -= 1
            if rows > 0:
                blocks.append(DataBlock(number, begin, rows, size))
        return blocks

    def _parse(self, block: DataBlock, types: dict[str, Any] | None) -> Any:
        import pyarrow as pa
        from pyarrow import csv

        file = self.files[block.file]
        content = file.read(block.offset, block.offset + block.size)
        if block.offset:
            content = self._head + content
        elif content[:2] == GZIP_MAGIC:
            content = file.unpack(content)
        delimiter = "\t" if ".tsv" in file.name.lower() else ","
        try:
            return csv.read_csv(
                io.BytesIO(content),
                read_options=csv.ReadOptions(use_threads=False),
                parse_options=csv.ParseOptions(delimiter=delimiter),
                convert_options=csv.ConvertOptions(
                    column_types=types, include_columns=list(types) if types else None
                ),
            )
        except (pa.ArrowInvalid, pa.ArrowKeyError) as error:
            raise file.error(str(error), at=block.offset) from None

    def read(self, block: DataBlock) -> Rows:
        file = self.files[block.file]
        where = f" (at byte {block.offset:,})"
        table = self._parse(block, self._types)
        if table.num_rows != block.rows:
            what = f"{table.num_rows:,} rows in {block.rows:,} lines: a value contains a line break"
            raise file.error(what, where)
        return self._convert(block, table, where, " of the block")


def _ranges(file: StoredFile) -> Iterator[tuple[int, int, bytes]]:
    """Yields (offset, bytes in the file, complete lines); a compressed file is one range."""
    begin = 0
    while begin < file.size:
        content = file.read(begin, min(file.size, begin + CSV_BLOCK_BYTES))
        if begin == 0 and content[:2] == GZIP_MAGIC:
            yield 0, file.size, file.unpack(file.read())
            return
        size = len(content)
        if begin + size < file.size:
            size = content.rfind(b"\n") + 1
            if not size:
                raise file.error(f"no line ends within {CSV_BLOCK_BYTES:,} bytes", at=begin)
        yield begin, size, content[:size]
        begin += size


def is_binary(kind: Any) -> bool:
    import pyarrow.types as types

    return bool(types.is_binary(kind) or types.is_large_binary(kind))


def has_images(kind: Any) -> bool:
    """Returns whether a type is Hugging Face's for images: {bytes, path}."""
    import pyarrow.types as types

    return types.is_struct(kind) and {"bytes", "path"} == {field.name for field in kind}


def image_bytes(column: Any) -> list[bytes | None]:
    """Returns the encoded images of a column of bytes or {bytes, path}. Raises RowError."""
    rows: list[Any] = column.to_pylist()
    for number, row in enumerate(rows):
        if isinstance(row, dict):
            if row["bytes"] is None and row["path"]:
                raise RowError(f"only a path ({row['path']}); store the images themselves", number)
            rows[number] = row["bytes"]
    return rows


def named_classes(schema: Any) -> dict[str, int]:
    """Returns the columns with class names, by the metadata that Hugging Face's datasets writes."""
    try:
        described = json.loads((schema.metadata or {})[b"huggingface"])
        features = described["info"]["features"].items()
    except (AttributeError, KeyError, TypeError, ValueError):
        return {}
    return {
        name: len(facts["names"])
        for name, facts in features
        if isinstance(facts, dict) and isinstance(facts.get("names"), list)
    }


def count_named_classes(schema: Any, label: str | None) -> int | None:
    """Returns the number of class names of a column, if they are known."""
    return named_classes(schema).get(label or "")


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
    binary = is_binary(kind)
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
