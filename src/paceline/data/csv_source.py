"""CSV and TSV files, read with Arrow in ranges of complete lines.

The first line contains the column names. Values must not contain line breaks, because files are
split at those. A compressed file is one block.
"""

from __future__ import annotations

import gzip
import io
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
from paceline.data.parquet import select_columns
from paceline.data.stores import StoredFile, read_bytes, require_extra
from paceline.errors import DataError

BLOCK_BYTES = 4 << 20


class CsvSource:
    """CSV files with the same columns; the types come from the first block."""

    def __init__(
        self, files: tuple[StoredFile, ...], blocks: tuple[DataBlock, ...], head: bytes
    ) -> None:
        self.files = files
        self.blocks = blocks
        self._head = head
        self._types: dict[str, Any] = {}
        self.selection = ColumnSelection()

    def choose(self, selection: ColumnSelection) -> None:
        table = self._parse(self.blocks[0], None)
        self.selection = select_columns(self.files[0], table.schema, selection)
        chosen = self.selection
        names = (*chosen.features, *([chosen.label] if chosen.label else []))
        self._types = {name: table.schema.field(name).type for name in names}
        import pyarrow as pa

        for name, kind in self._types.items():
            # Integers in the first block may be followed by fractions.
            if pa.types.is_integer(kind) and name != self.selection.label:
                self._types[name] = pa.float64()

    def _parse(self, block: DataBlock, types: dict[str, Any] | None) -> Any:
        import pyarrow as pa
        from pyarrow import csv

        file = self.files[block.file]
        content = _lines(file, block)
        if block.offset:
            content = self._head + content
        options = csv.ConvertOptions(
            column_types=types, include_columns=list(types) if types else None
        )
        delimiter = "\t" if ".tsv" in file.name.lower() else ","
        try:
            return csv.read_csv(
                io.BytesIO(content),
                read_options=csv.ReadOptions(use_threads=False),
                parse_options=csv.ParseOptions(delimiter=delimiter),
                convert_options=options,
            )
        except (pa.ArrowInvalid, pa.ArrowKeyError) as error:
            raise bad_file(file, str(error), f" (at byte {block.offset:,})") from None

    def read(self, block: DataBlock) -> Rows:
        file = self.files[block.file]
        where = f" (at byte {block.offset:,})"
        table = self._parse(block, self._types)
        if table.num_rows != block.rows:
            raise bad_file(
                file,
                f"{table.num_rows:,} rows in {block.rows:,} lines: a value contains a line break",
                where,
            )
        columns = []
        for name in self._types:
            try:
                columns.append(to_array(table.column(name), self.selection.fill))
            except ColumnError as error:
                row = "" if error.row is None else f", row {error.row} of the block"
                raise bad_file(file, f"column {name!r} contains {error}", where + row) from None
        labels = np.zeros(block.rows, np.int64)
        if self.selection.label is not None:
            *columns, labels = columns
        try:
            return stack_features(columns, self.selection.shape), labels
        except ValueError as error:
            raise bad_file(file, str(error), where) from None

    def count_classes(self) -> int | None:
        return None


def open_csv(files: tuple[StoredFile, ...], selection: ColumnSelection) -> CsvSource:
    """Counts the lines of all files. Raises DataError for an empty file or different columns."""
    require_extra("pyarrow", "data", "CSV")
    if not selection.skip_empty:
        check_not_empty(list(files))
    kept: list[StoredFile] = []
    blocks: list[DataBlock] = []
    first_head = b""
    for file in files:
        if not file.size:
            continue
        head, found = _find_blocks(file, len(kept))
        first_head = first_head or head
        if head.strip() != first_head.strip():
            raise bad_file(
                file,
                f"has the columns {head.decode(errors='replace').strip()!r}, but {kept[0].url} "
                f"{first_head.decode(errors='replace').strip()!r}",
            )
        if not found:
            if selection.skip_empty:
                continue
            raise bad_file(file, "contains no rows; remove it or use --skip-empty")
        blocks += found
        kept.append(file)
    if not blocks:
        raise DataError(f"{files[0].url}: none of {len(files)} files contains a row")
    source = CsvSource(tuple(kept), tuple(blocks), first_head)
    source.choose(selection)
    return source


def _lines(file: StoredFile, block: DataBlock) -> bytes:
    content = read_bytes(file.url, block.offset, block.offset + block.size)
    if block.offset == 0 and content[:2] == b"\x1f\x8b":
        try:
            return gzip.decompress(content)
        except (EOFError, OSError) as error:
            raise bad_file(file, f"is truncated or damaged ({error})") from None
    return content


def _find_blocks(file: StoredFile, number: int) -> tuple[bytes, list[DataBlock]]:
    """Returns the header line and ranges of complete lines; the first range includes the header."""
    head = b""
    blocks: list[DataBlock] = []
    begin = 0
    while begin < file.size:
        content = read_bytes(file.url, begin, min(file.size, begin + BLOCK_BYTES))
        size = len(content)
        if begin == 0 and content[:2] == b"\x1f\x8b":
            entire = DataBlock(number, 0, 0, file.size)
            content = _lines(file, entire)
            rows = _count(content) - 1
            found = [DataBlock(number, 0, rows, file.size)] if rows > 0 else []
            return content.partition(b"\n")[0] + b"\n", found
        if begin + size < file.size:
            size = content.rfind(b"\n") + 1
            if not size:
                raise bad_file(
                    file, f"no line ends within {BLOCK_BYTES:,} bytes", f" (at byte {begin:,})"
                )
            content = content[:size]
        rows = _count(content)
        if begin == 0:
            head = content.partition(b"\n")[0] + b"\n"
            rows -= 1
        if rows > 0:
            blocks.append(DataBlock(number, begin, rows, size))
        begin += size
    return head, blocks


def _count(content: bytes) -> int:
    """Returns the number of non-empty lines; Arrow's parser skips empty ones."""
    ends = np.flatnonzero(np.frombuffer(content, np.uint8) == 10)
    starts = np.concatenate(([0], ends + 1))
    stops = np.concatenate((ends, [len(content)]))
    bare = np.frombuffer(content, np.uint8)
    lengths = stops - starts
    # A single carriage return is also an empty line.
    single = np.flatnonzero(lengths == 1)
    blank = int(np.sum(bare[starts[single]] == 13)) if len(single) else 0
    return int(np.sum(lengths > 0)) - blank
