"""Datasets of Hugging Face: objects in memory, and the Arrow files of `save_to_disk`."""

from typing import Any

from paceline.data.arrow_sources import ArrowSource, count_named_classes, has_images
from paceline.data.blocks import ColumnSelection, DataBlock, Rows
from paceline.data.stores import StoredFile, require_extra, scheme_of

ROWS_PER_BLOCK = 1000
"""As many as `datasets` itself writes at once."""


class TableSource(ArrowSource):
    """Rows of tables with one schema."""

    _classes: int | None = None

    def _resolve_images(self, file: StoredFile, schema: Any) -> None:
        self._resolve(file, schema, [field.name for field in schema if has_images(field.type)])
        self._classes = count_named_classes(schema, self.selection.label)

    def count_classes(self) -> int | None:
        return self._classes


class ArrowFileSource(TableSource):
    """Arrow files, streamed or random-access; a block is a record batch. Local files are mapped."""

    def __init__(self, files: tuple[StoredFile, ...], selection: ColumnSelection) -> None:
        require_extra("pyarrow", "data", "Arrow files")
        super().__init__(files, selection)
        self._batches: dict[tuple[int, int], Any] = {}
        self._find_blocks(self._find)

    def _find(self, file: StoredFile, number: int) -> list[DataBlock]:
        import pyarrow as pa

        try:
            if scheme_of(file.url) == "file":
                source: Any = pa.memory_map(file.url.removeprefix("file://"))
            else:
                source = pa.BufferReader(file.read())
            if bytes(file.read(0, 6)) == b"ARROW1":
                reader = pa.ipc.open_file(source)
                batches = [reader.get_batch(n) for n in range(reader.num_record_batches)]
            else:
                batches = list(pa.ipc.open_stream(source))
        except (OSError, pa.ArrowInvalid) as error:
            raise file.error(f"is truncated, or not an Arrow file ({error})") from None
        batches = [batch for batch in batches if batch.num_rows]
        if batches and not self._batches:
            self._resolve_images(file, batches[0].schema)
        self._batches |= {(number, index): batch for index, batch in enumerate(batches)}
        return [
            DataBlock(number, index, batch.num_rows, batch.nbytes)
            for index, batch in enumerate(batches)
        ]

    def read(self, block: DataBlock) -> Rows:
        import pyarrow as pa

        batch = self._batches[block.file, block.offset]
        missing = [name for name in self.selection.names if name not in batch.schema.names]
        if missing:
            raise self.files[block.file].error(f"has no column {missing[0]!r}")
        where = f", record batch {block.offset}"
        return self._convert(block, pa.Table.from_batches([batch]), where)


class HubDatasetSource(TableSource):
    """A `datasets.Dataset`, read as Arrow tables in the order of its rows."""

    def __init__(self, dataset: Any, selection: ColumnSelection) -> None:
        self._dataset = dataset.with_format("arrow")
        file = StoredFile(f"{type(dataset).__name__}", len(dataset))
        super().__init__((file,), selection)
        self._resolve_images(file, self._dataset[:1].schema)
        starts = range(0, len(dataset), ROWS_PER_BLOCK)
        self.blocks = tuple(
            DataBlock(0, start, min(ROWS_PER_BLOCK, len(dataset) - start), 0) for start in starts
        )

    def read(self, block: DataBlock) -> Rows:
        table = self._dataset[block.offset : block.offset + block.rows]
        return self._convert(block, table, f", rows from {block.offset:,}")


def is_hub_dataset(obj: Any) -> bool:
    """Returns whether an object is a `datasets.Dataset`, without importing the library."""
    return all(hasattr(obj, name) for name in ("with_format", "features", "column_names"))
