"""Parquet: a row group is a block, read with one request for its columns' bytes."""

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
"""Most footers are shorter, so that one request is enough."""
MARK = b"PAR1"


class CachedRangeFile(io.RawIOBase):
    """A file of which some parts are at hand; what else is asked for is fetched."""

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
    """Parquet files of one schema; opening them reads their footers, nothing else."""

    files: tuple[StoredFile, ...]
    wanted: ColumnSelection
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
                    columns.append(to_array(table.column(name), self.wanted.fill))
                except ColumnError as error:
                    row = "" if error.row is None else f", row {error.row}"
                    raise bad_file(file, f"column {name!r} holds {error}", where + row) from None
            if self.wanted.label is not None:
                *columns, labels = columns
            else:
                labels = np.zeros(block.rows, np.int64)
            features = stack_features(columns, self.wanted.shape)
        except DataError:
            raise
        except ValueError as error:
            raise bad_file(file, str(error), where) from None
        except Exception as error:
            at = f"{where} (at byte {self._range(block)[0]:,})"
            raise bad_file(file, f"is cut off or damaged ({error})", at) from error
        if labels.ndim == 2 and labels.shape[1] == 1:
            labels = labels[:, 0]
        return features, labels

    def _range(self, block: DataBlock) -> tuple[int, int]:
        """The bytes of the wanted columns of a row group."""
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
            raise EOFError(f"{len(content):,} bytes where {stop - start:,} should be")
        reader = pq.ParquetFile(CachedRangeFile(file, [(start, content)]), metadata=footer)
        return reader.read_row_group(block.offset, columns=names, use_threads=False)

    def count_classes(self) -> int | None:
        """From the footers, where they say so."""
        if self.wanted.label is None:
            return None
        highest = -1
        for footer in self._footers:
            for number in range(footer.num_row_groups):
                group = footer.row_group(number)
                for index in range(group.num_columns):
                    chunk = group.column(index)
                    if chunk.path_in_schema == self.wanted.label:
                        facts = chunk.statistics
                        if facts is None or not facts.has_min_max:
                            return None
                        if not isinstance(facts.max, int):
                            return None
                        highest = max(highest, facts.max)
        return highest + 1 if highest >= 0 else None


def open_parquet(files: tuple[StoredFile, ...], wanted: ColumnSelection) -> ParquetSource:
    """Read the footers and check that all files agree.

    Raises DataError for a file that is empty, cut off, no Parquet or without a column, of another
    type than in the first, or without rows; UsageError if features have to be named.
    """
    require_extra("pyarrow", "data", "Parquet")
    if not wanted.skip_empty:
        check_not_empty(list(files))
    kept: list[StoredFile] = []
    blocks: list[DataBlock] = []
    source = ParquetSource(files, wanted)
    for file in files:
        if file.size == 0:
            continue
        footer = read_footer(file)
        schema = footer.schema.to_arrow_schema()
        if not source._types:
            wanted = source.wanted = select_columns(file, schema, wanted)
            names = [*wanted.features, *([wanted.label] if wanted.label else [])]
            source._types = [(name, schema.field(name).type) for name in names]
        _check_schema(file, schema, source._types, files[0])
        if footer.num_rows == 0:
            if wanted.skip_empty:
                continue
            raise bad_file(file, "holds no rows: take it away, or give --skip-empty")
        for number in range(footer.num_row_groups):
            group = footer.row_group(number)
            if group.num_rows:
                blocks.append(DataBlock(len(kept), number, group.num_rows, group.total_byte_size))
        kept.append(file)
        source._footers.append(footer)
    if not blocks:
        raise DataError(f"{files[0].url}: none of {len(files)} files holds a row")
    source.files, source.blocks = tuple(kept), tuple(blocks)
    return source


def read_footer(file: StoredFile) -> Any:
    """A file's metadata; raises DataError where there is none."""
    import pyarrow.parquet as pq

    if file.size < 12:
        raise bad_file(file, f"has {file.size} bytes: too short for Parquet")
    start = max(0, file.size - TAIL_BYTES)
    tail = read_bytes(file.url, start, file.size)
    if tail[-4:] != MARK:
        raise bad_file(
            file,
            f"ends with {tail[-4:].hex()} where Parquet has {MARK.hex()} ({MARK.decode()}): it is "
            "cut off, or no Parquet file",
            f" (at byte {file.size - 4:,})",
        )
    try:
        return pq.read_metadata(CachedRangeFile(file, [(start, tail)]))
    except DataError:
        raise
    except Exception as error:
        raise bad_file(file, f"has a damaged footer ({error})", f" (at byte {start:,})") from error


def select_columns(file: StoredFile, schema: Any, wanted: ColumnSelection) -> ColumnSelection:
    """Which columns to read; raises DataError for one that is not there."""
    from dataclasses import replace

    names = list(schema.names)
    label = wanted.label
    if label is None and "label" in names and "label" not in wanted.features:
        label = "label"
    features = wanted.features
    if not features:
        others = [name for name in names if name != label]
        if not others:
            raise UsageError(f"{file.url}: no column is left for features: name them")
        features = tuple(others)
    for name in (*features, *([label] if label else [])):
        if name not in names:
            raise bad_file(file, f"has no column {name!r}: {suggest_name(name, names)}")
    return replace(wanted, features=features, label=label)


def _check_schema(
    file: StoredFile, schema: Any, types: list[tuple[str, Any]], first: StoredFile
) -> None:
    for name, kind in types:
        if name not in schema.names:
            raise bad_file(file, f"has no column {name!r}, which {first.url} has")
        found = schema.field(name).type
        if not found.equals(kind):
            raise bad_file(
                file,
                f"column {name!r} is of {found}, but of {kind} in {first.url}: "
                "all files must have one schema",
            )
