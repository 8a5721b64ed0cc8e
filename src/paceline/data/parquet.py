"""Parquet files. A block is a row group, read with one request for the bytes of its columns."""

from __future__ import annotations

import io
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from paceline.data.arrow_columns import ColumnError, to_array
from paceline.data.blocks import (
    ColumnSelection,
    DataBlock,
    Rows,
    bad_file,
    check_not_empty,
    stack_features,
)
from paceline.data.stores import StoredFile, read_bytes, require_extra, scheme_of
from paceline.errors import DataError, UsageError, suggest_name

TAIL_BYTES = 64 * 1024
"""Most footers are shorter, so that one request is sufficient."""
MARK = b"PAR1"


class CachedRangeFile(io.RawIOBase):
    """A file of which some byte ranges are cached; others are fetched on demand."""

    def __init__(self, file: StoredFile, parts: list[tuple[int, bytes]]) -> None:
        self._file = file
        self._parts = parts
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = 0) -> int:
        base = (0, self._at, self._file.size)[whence]
        self._at = base + offset
        return self._at

    def read(self, count: int = -1) -> bytes:
        start = self._at
        stop = self._file.size if count < 0 else min(self._file.size, start + count)
        self._at = max(start, stop)
        for begin, content in self._parts:
            if begin <= start and stop <= begin + len(content):
                return content[start - begin : stop - begin]
        return read_bytes(self._file.url, start, stop) if stop > start else b""

    def size(self) -> int:
        return self._file.size


@dataclass
class ParquetSource:
    """Parquet files with one schema; opening them reads only their footers."""

    files: tuple[StoredFile, ...]
    selection: ColumnSelection
    blocks: tuple[DataBlock, ...] = ()
    _footers: list[Any] = field(default_factory=list)
    _types: list[tuple[str, Any]] = field(default_factory=list)

    def read(self, block: DataBlock) -> Rows:
        file = self.files[block.file]
        where = f", row group {block.offset}"
        names = [name for name, _ in self._types]
        try:
            table = self._read_group(file, block)
            columns = []
            for name in names:
                try:
                    columns.append(to_array(table.column(name), self.selection.fill))
                except ColumnError as error:
                    row = "" if error.row is None else f", row {error.row}"
                    raise bad_file(file, f"column {name!r} contains {error}", where + row) from None
            if self.selection.label is not None:
                *columns, labels = columns
            else:
                labels = np.zeros(block.rows, np.int64)
            features = stack_features(columns, self.selection.shape)
        except DataError:
            raise
        except ValueError as error:
            raise bad_file(file, str(error), where) from None
        except Exception as error:
            at = f"{where} (at byte {self._range(block)[0]:,})"
            raise bad_file(file, f"is truncated or damaged ({error})", at) from error
        if labels.ndim == 2 and labels.shape[1] == 1:
            labels = labels[:, 0]
        return features, labels

    def _range(self, block: DataBlock) -> tuple[int, int]:
        """Returns the byte range of the selected columns of a row group."""
        group = self._footers[block.file].row_group(block.offset)
        names = {name for name, _ in self._types}
        starts, stops = [], []
        for index in range(group.num_columns):
            chunk = group.column(index)
            if chunk.path_in_schema.partition(".")[0] in names:
                start = chunk.data_page_offset
                if chunk.has_dictionary_page:
                    start = min(start, chunk.dictionary_page_offset)
                starts.append(start)
                stops.append(start + chunk.total_compressed_size)
        return min(starts), max(stops)

    def _read_group(self, file: StoredFile, block: DataBlock) -> Any:
        import pyarrow.parquet as pq

        names = [name for name, _ in self._types]
        footer = self._footers[block.file]
        if scheme_of(file.url) == "file":
            with open(file.url.removeprefix("file://"), "rb") as stream:
                reader = pq.ParquetFile(stream, metadata=footer)
                return reader.read_row_group(block.offset, columns=names, use_threads=False)
        start, stop = self._range(block)
        content = read_bytes(file.url, start, stop)
        if len(content) < stop - start:
            raise EOFError(f"{len(content):,} bytes instead of {stop - start:,}")
        reader = pq.ParquetFile(CachedRangeFile(file, [(start, content)]), metadata=footer)
        return reader.read_row_group(block.offset, columns=names, use_threads=False)

    def count_classes(self) -> int | None:
        """Returns the number of classes from the footers' statistics, if present."""
        if self.selection.label is None:
            return None
        highest = -1
        for footer in self._footers:
            for number in range(footer.num_row_groups):
                group = footer.row_group(number)
                for index in range(group.num_columns):
                    chunk = group.column(index)
                    if chunk.path_in_schema == self.selection.label:
                        facts = chunk.statistics
                        if facts is None or not facts.has_min_max:
                            return None
                        if not isinstance(facts.max, int):
                            return None
                        highest = max(highest, facts.max)
        return highest + 1 if highest >= 0 else None


def open_parquet(files: tuple[StoredFile, ...], selection: ColumnSelection) -> ParquetSource:
    """Reads the footers and checks that all files have the same schema.

    Raises DataError for a file that is empty, truncated, not Parquet, lacks a column, has other
    types than the first, or has no rows; UsageError if no column is left for features.
    """
    require_extra("pyarrow", "data", "Parquet")
    if not selection.skip_empty:
        check_not_empty(list(files))
    kept: list[StoredFile] = []
    blocks: list[DataBlock] = []
    source = ParquetSource(files, selection)
    for file in files:
        if file.size == 0:
            continue
        footer = read_footer(file)
        schema = footer.schema.to_arrow_schema()
        if not source._types:
            selection = source.selection = select_columns(file, schema, selection)
            names = [*selection.features, *([selection.label] if selection.label else [])]
            source._types = [(name, schema.field(name).type) for name in names]
        _check_schema(file, schema, source._types, files[0])
        if footer.num_rows == 0:
            if selection.skip_empty:
                continue
            raise bad_file(file, "contains no rows; remove it or use --skip-empty")
        for number in range(footer.num_row_groups):
            group = footer.row_group(number)
            if group.num_rows:
                blocks.append(DataBlock(len(kept), number, group.num_rows, group.total_byte_size))
        kept.append(file)
        source._footers.append(footer)
    if not blocks:
        raise DataError(f"{files[0].url}: none of {len(files)} files contains a row")
    source.files, source.blocks = tuple(kept), tuple(blocks)
    return source


def read_footer(file: StoredFile) -> Any:
    """Returns a file's metadata. Raises DataError if there is none."""
    import pyarrow.parquet as pq

    if file.size < 12:
        raise bad_file(file, f"has only {file.size} bytes: too short for Parquet")
    start = max(0, file.size - TAIL_BYTES)
    tail = read_bytes(file.url, start, file.size)
    if tail[-4:] != MARK:
        raise bad_file(
            file,
            f"ends with {tail[-4:].hex()} instead of {MARK.hex()} ({MARK.decode()}): it is "
            "truncated, or not a Parquet file",
            f" (at byte {file.size - 4:,})",
        )
    try:
        return pq.read_metadata(CachedRangeFile(file, [(start, tail)]))
    except DataError:
        raise
    except Exception as error:
        raise bad_file(file, f"has a damaged footer ({error})", f" (at byte {start:,})") from error


def select_columns(file: StoredFile, schema: Any, selection: ColumnSelection) -> ColumnSelection:
    """Returns the columns to read. Raises DataError for a missing one."""
    from dataclasses import replace

    names = list(schema.names)
    label = selection.label
    if label is None and "label" in names and "label" not in selection.features:
        label = "label"
    features = selection.features
    if not features:
        others = [name for name in names if name != label]
        if not others:
            raise UsageError(f"{file.url}: no column is left for features; use --features")
        features = tuple(others)
    for name in (*features, *([label] if label else [])):
        if name not in names:
            raise bad_file(file, f"has no column {name!r}: {suggest_name(name, names)}")
    return replace(selection, features=features, label=label)


def _check_schema(
    file: StoredFile, schema: Any, types: list[tuple[str, Any]], first: StoredFile
) -> None:
    for name, kind in types:
        if name not in schema.names:
            raise bad_file(file, f"has no column {name!r}, unlike {first.url}")
        found = schema.field(name).type
        if not found.equals(kind):
            raise bad_file(
                file,
                f"column {name!r} has the type {found}, but {kind} in {first.url}; "
                "all files must have the same schema",
            )
