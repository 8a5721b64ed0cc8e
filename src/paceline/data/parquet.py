"""Parquet files. A block is a row group, read with one request for the bytes of its columns."""

from __future__ import annotations

import io
from typing import Any

from paceline.data.arrow_columns import to_arrays
from paceline.data.blocks import BlockSource, ColumnSelection, DataBlock, Rows
from paceline.data.stores import StoredFile, require_extra, scheme_of
from paceline.errors import DataError

TAIL_BYTES = 64 * 1024
"""Most footers are shorter, so that one request is sufficient."""
MARK = b"PAR1"


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


class ParquetSource(BlockSource):
    """Parquet files with one schema; opening them reads only their footers.

    Raises DataError for a file that is empty, truncated, not Parquet, lacks a column, has other
    types than the first, or has no rows; UsageError if no column is left for features.
    """

    def __init__(self, files: tuple[StoredFile, ...], selection: ColumnSelection) -> None:
        require_extra("pyarrow", "data", "Parquet")
        super().__init__(files, selection)
        self._first = files[0]
        self._types: dict[str, Any] = {}
        self._footers: dict[int, Any] = {}
        self._find_blocks(self._find)

    def _find(self, file: StoredFile, number: int) -> list[DataBlock]:
        footer = self._footers[number] = read_footer(file)
        schema = footer.schema.to_arrow_schema()
        if not self._types:
            self.selection = self.selection.resolve(file, list(schema.names), "column")
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
            table = self._read_group(file, block)
            return self._make_rows(block, to_arrays(table, self.selection, file, where), where)
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
        """Returns the number of classes from the footers' statistics, if present."""
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
