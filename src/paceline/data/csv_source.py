"""CSV and TSV files, read with Arrow in ranges of complete lines.

The first line contains the column names. Values must not contain line breaks, because files are
split at those. A compressed file is one block.
"""

from __future__ import annotations

import io
from collections.abc import Iterator
from typing import Any

import numpy as np

from paceline.data.arrow_columns import to_arrays
from paceline.data.blocks import GZIP_MAGIC, BlockSource, ColumnSelection, DataBlock, Rows
from paceline.data.stores import StoredFile, require_extra

BLOCK_BYTES = 4 << 20


class CsvSource(BlockSource):
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
        self.selection = selection.resolve(self.files[0], list(schema.names), "column")
        self._types = {name: schema.field(name).type for name in self.selection.names}
        for name in self.selection.features:
            # Integers in the first block may be followed by fractions.
            if pa.types.is_integer(self._types[name]):
                self._types[name] = pa.float64()

    def _find(self, file: StoredFile, number: int) -> list[DataBlock]:
        """Returns ranges of complete lines; the first one includes the header."""
        blocks: list[DataBlock] = []
        for begin, size, content in _ranges(file):
            rows = _count_lines(content)
            if begin == 0:
                self._check_head(file, content.partition(b"\n")[0] + b"\n")
                rows -= 1
            if rows > 0:
                blocks.append(DataBlock(number, begin, rows, size))
        return blocks

    def _check_head(self, file: StoredFile, head: bytes) -> None:
        if not self._head:
            self._head, self._head_url = head, file.url
        if head.strip() != self._head.strip():
            ours, theirs = (h.decode(errors="replace").strip() for h in (head, self._head))
            raise file.error(f"has the columns {ours!r}, but {self._head_url} {theirs!r}")

    def _parse(self, block: DataBlock, types: dict[str, Any] | None) -> Any:
        import pyarrow as pa
        from pyarrow import csv

        file = self.files[block.file]
        content = file.read(block.offset, block.offset + block.size)
        if block.offset:
            content = self._head + content
        elif content[:2] == GZIP_MAGIC:
            content = file.unpack(content)
        try:
            return csv.read_csv(
                io.BytesIO(content),
                read_options=csv.ReadOptions(use_threads=False),
                parse_options=csv.ParseOptions(
                    delimiter="\t" if ".tsv" in file.name.lower() else ","
                ),
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
        columns = to_arrays(table, self.selection, file, where, " of the block")
        return self._make_rows(block, columns, where)


def _ranges(file: StoredFile) -> Iterator[tuple[int, int, bytes]]:
    """Yields (offset, bytes in the file, complete lines); a compressed file is one range."""
    begin = 0
    while begin < file.size:
        content = file.read(begin, min(file.size, begin + BLOCK_BYTES))
        if begin == 0 and content[:2] == GZIP_MAGIC:
            yield 0, file.size, file.unpack(file.read())
            return
        size = len(content)
        if begin + size < file.size:
            size = content.rfind(b"\n") + 1
            if not size:
                what = f"no line ends within {BLOCK_BYTES:,} bytes"
                raise file.error(what, at=begin)
        yield begin, size, content[:size]
        begin += size


def _count_lines(content: bytes) -> int:
    """Returns the number of non-empty lines; Arrow's parser skips empty ones."""
    characters = np.frombuffer(content, np.uint8)
    ends = np.flatnonzero(characters == 10)
    starts = np.concatenate(([0], ends + 1))
    lengths = np.concatenate((ends, [len(content)])) - starts
    # A single carriage return is also an empty line.
    blank = int(np.sum(characters[starts[lengths == 1]] == 13))
    return int(np.sum(lengths > 0)) - blank
