"""Builds a dataset from a pipeline: lists the files, reads the first block, chooses the storage.

| shard | rows held in memory | order of an epoch |
|---|---|---|
| `off` | all, by every worker | seed and epoch |
| `sample` | all, if they fit; else one memory-mapped copy per machine | seed and epoch |
| `row_group`, `file` | a few blocks at a time | seed, epoch and the recorded shard plan |

`auto` selects `sample` if all rows fit into half of the memory limit, else `row_group`.
"""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from paceline.data import array_cache, augmentation, hashing
from paceline.data.block_cache import DiskBlockCache, MemoryBlockCache
from paceline.data.blocks import BlockSource, DataBlock, Rows, row_bytes
from paceline.data.dataset import DatasetSplits, Kind, MapDataset
from paceline.data.discovery import (
    apply_metadata,
    list_data_files,
    list_splits,
    open_source_for,
    read_metadata,
)
from paceline.data.in_memory import ArrayDataset, BatchTransform, PixelScaling
from paceline.data.pipeline import DataPipeline
from paceline.data.pipelined_dataset import PipelinedDataset
from paceline.data.stores import StoredFile
from paceline.data.streaming import READERS, BlockReader, StreamingDataset
from paceline.data.thread_pool import DaemonThreadPool
from paceline.errors import DataError, UsageError

FETCHERS = 4
"""Threads that read an entire dataset at the start; they mostly wait for the store."""
MIN_BLOCKS_TO_SPLIT = 10
"""With fewer blocks, a tenth cannot be held out."""


@dataclass(frozen=True)
class BuiltDataset:
    """A dataset and the properties that built-in models need."""

    table: MapDataset
    shape: tuple[int, ...]
    classes: int | None
    kind: Kind
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class FeatureOptions:
    """Conversion of rows to features, the same for all splits of a dataset."""

    dtype: str = "float32"
    augment: bool = False
    seed: int = 0


def build_splits(
    name: str, pipeline: DataPipeline, val: DataPipeline | None, options: FeatureOptions
) -> DatasetSplits:
    """Builds a dataset from a URL, split by its description, or with a tenth held out.

    Raises a one-line DataError or UsageError.
    """
    pipeline, parts = list_splits(pipeline)
    hold_out = val is None and "val" not in parts
    opened, held = _open_part(pipeline, parts["train"], options, hold_out=hold_out)
    plain = replace(options, augment=False)
    others: dict[str, MapDataset | None] = {"val": held, "test": None}
    for part in ("val", "test"):
        if part in parts:
            others[part] = _open_part(pipeline, parts[part], plain)[0].table
    if val is not None and opened.kind == "text":
        raise UsageError(
            f"{name}: --val-data is not supported for text, whose character codes depend on the "
            "whole file; remove it, and a tenth is held out"
        )
    if val is not None:
        others["val"] = build_matching(pipeline, val, plain, opened)
    return DatasetSplits(
        name,
        opened.shape,
        opened.classes,
        opened.kind,
        opened.table,
        others["val"],
        others["test"],
        opened.notes,
    )


def build_matching(
    like: DataPipeline, pipeline: DataPipeline, options: FeatureOptions, first: BuiltDataset
) -> MapDataset:
    """Builds validation data like the training data. Raises DataError if the shapes differ."""
    pipeline = apply_metadata(pipeline, read_metadata(pipeline.urls[0]))
    selection = pipeline.selection
    for name in ("features", "label", "shape", "fill"):
        if not getattr(selection, name):
            selection = replace(selection, **{name: getattr(like.selection, name)})
    pipeline = replace(
        pipeline,
        selection=selection,
        scale=pipeline.scale or like.scale,
        maps=pipeline.maps or like.maps,
    )
    opened, _ = _open_part(pipeline, list_data_files(pipeline), options)
    if opened.shape != first.shape:
        raise DataError(
            f"{pipeline.urls[0]}: rows have the shape {opened.shape}, but {first.shape} in training"
        )
    return opened.table


def build_dataset(pipeline: DataPipeline, options: FeatureOptions) -> BuiltDataset:
    """Builds a dataset of all rows of a pipeline. Raises like `build_splits`."""
    pipeline, parts = list_splits(pipeline)
    return _open_part(pipeline, parts["train"], options)[0]


def _open_part(
    pipeline: DataPipeline,
    files: tuple[StoredFile, ...],
    options: FeatureOptions,
    *,
    hold_out: bool = False,
) -> tuple[BuiltDataset, MapDataset | None]:
    source = open_source_for(pipeline, files)
    build_table = getattr(source, "as_opened", None)
    if build_table is not None:
        # A format whose rows are derived from its files, such as windows of a text.
        built, part = build_table(hold_out)
        return replace(built, table=_wrap(built.table, pipeline, None)), part
    reader = BlockReader(source, pipeline.maps)
    first = reader.read(source.blocks[0])
    scaling, finish = _make_finish(pipeline, first, options)
    shape = first[0].shape[1:]
    classes = _count_classes(pipeline, source, reader, first)
    kind: Kind = "image" if len(shape) == 3 else "table"
    shard = choose_sharding(pipeline, source, row_bytes(first))
    train: MapDataset
    val: MapDataset | None = None
    notes: tuple[str, ...] = ()
    if shard in ("sample", "off"):
        x, y = _hold_all(pipeline, reader, first, shard)
        kept, held = np.arange(len(y)), np.arange(0)
        if hold_out and len(y) >= 10:
            kept, held = hashing.split_holdout(len(y), len(y) // 10)
        train = ArrayDataset(
            x,
            y,
            dtype=options.dtype,
            rows=None if len(kept) == len(y) else kept,
            scaling=scaling,
            augmentation=_augmentation(shape, options),
            seed=options.seed,
        )
        if len(held):
            val = ArrayDataset(x, y, dtype=options.dtype, rows=held, scaling=scaling)
    else:
        blocks, held_blocks = list(source.blocks), []
        if hold_out and len(blocks) >= MIN_BLOCKS_TO_SPLIT:
            order = hashing.split_holdout(len(blocks), len(blocks) // 10)
            blocks, held_blocks = ([source.blocks[i] for i in part] for part in order)
            notes = (f"validation: {len(held_blocks)} of {len(source.blocks)} blocks",)
        elif hold_out:
            notes = (f"no validation: {len(blocks)} blocks are too few to hold one out",)
        if pipeline.cache_in == "memory":
            reader.kept = MemoryBlockCache(_budget(pipeline) // 2)
        elif pipeline.cache_in == "disk":
            from paceline.data.mapped_copy import name_copy

            reader.stored = DiskBlockCache(array_cache.root() / name_copy(pipeline, reader))
        train = _make_streamed(pipeline, reader, blocks, finish, first)
        if held_blocks:
            _, plain = _make_finish(pipeline, first, replace(options, augment=False))
            val = _make_streamed(pipeline, reader, held_blocks, plain, first)
    opened = BuiltDataset(_wrap(train, pipeline, shard), shape, classes, kind, notes)
    return opened, val


def _wrap(table: MapDataset, pipeline: DataPipeline, shard: str | None) -> PipelinedDataset:
    return PipelinedDataset(
        table,
        shard=shard,
        shuffle_rows=pipeline.shuffle_rows,
        changes=pipeline.batches,
        depth=pipeline.depth,
        threads=pipeline.map_threads,
    )


def choose_sharding(pipeline: DataPipeline, source: BlockSource, row_size: int) -> str:
    """Returns the requested sharding, or chooses one by the size of the data."""
    if pipeline.shard_by != "auto":
        return pipeline.shard_by
    rows = sum(block.rows for block in source.blocks)
    if pipeline.cache_in == "memory" or rows * row_size <= _budget(pipeline) // 2:
        return "sample"
    return "row_group"


def _budget(pipeline: DataPipeline) -> int:
    return pipeline.memory_mb << 20


def _make_finish(
    pipeline: DataPipeline, first: Rows, options: FeatureOptions
) -> tuple[PixelScaling | None, BatchTransform]:
    x = first[0]
    scaling = None
    if x.dtype == np.uint8:
        scaling = PixelScaling(*(pipeline.scale or (255.0, (0.0,), (1.0,))))
    shape = x.shape[1:]
    if scaling is not None and len(shape) == 3 and len(scaling.mean) not in (1, shape[0]):
        raise UsageError(
            f"scale: {len(scaling.mean)} means were given for images with {shape[0]} channels"
        )
    finish = BatchTransform(
        options.dtype,
        dimensions=len(shape),
        scaling=scaling,
        augmentation=_augmentation(shape, options),
        seed=options.seed,
    )
    return scaling, finish


def _augmentation(
    shape: tuple[int, ...], options: FeatureOptions
) -> augmentation.Augmentation | None:
    if not options.augment:
        return None
    if len(shape) != 3:
        raise UsageError(f"augment: rows of shape {'x'.join(map(str, shape))} are not images")
    return augmentation.COLOR if shape[0] == 3 else augmentation.GRAY


def _count_classes(
    pipeline: DataPipeline, source: BlockSource, reader: BlockReader, first: Rows
) -> int | None:
    if pipeline.classes is not None:
        return pipeline.classes
    if first[1].dtype.kind == "f":
        return None
    known = source.count_classes()
    if known is not None:
        return known
    rows = sum(block.rows for block in source.blocks)
    if rows * row_bytes(first) > _budget(pipeline) // 2:
        return None
    return 1 + max(int(reader.read(block)[1].max()) for block in source.blocks)


def _make_streamed(
    pipeline: DataPipeline,
    reader: BlockReader,
    blocks: list[DataBlock],
    finish: BatchTransform,
    first: Rows,
) -> StreamingDataset:
    # Three eighths are for current and prefetched windows; the cache takes half, decoding the rest.
    return StreamingDataset(
        reader,
        blocks,
        finish,
        row_bytes=row_bytes(first),
        memory_bytes=_budget(pipeline) * 3 // 8,
        threads=max(READERS, pipeline.map_threads),
    )


def _hold_all(pipeline: DataPipeline, reader: BlockReader, first: Rows, shard: str) -> Rows:
    """Returns all rows: in memory, or in a copy on disk that the machine's processes share."""
    blocks = reader.source.blocks
    size = sum(block.rows for block in blocks) * row_bytes(first)
    where = pipeline.cache_in
    if where == "auto":
        where = "memory" if shard == "off" or size <= _budget(pipeline) else "disk"
    if where == "disk":
        from paceline.data.mapped_copy import open_mapped_copy

        return open_mapped_copy(pipeline, reader, first)
    count = sum(block.rows for block in blocks)
    x = np.empty((count, *first[0].shape[1:]), first[0].dtype)
    y = np.empty((count, *first[1].shape[1:]), first[1].dtype)
    read_all_blocks(reader, first, x, y)
    return x, y


def read_all_blocks(reader: BlockReader, first: Rows, x: Any, y: Any) -> None:
    """Reads all blocks into arrays, with at most `FETCHERS` of them in memory."""
    background = DaemonThreadPool(FETCHERS, "paceline-fetch")
    blocks = reader.source.blocks
    ahead: list[Future[Rows]] = []
    try:
        start = 0
        following = iter(blocks[1:])
        for number, block in enumerate(blocks):
            while len(ahead) < FETCHERS and (more := next(following, None)) is not None:
                ahead.append(background.submit(partial(reader.read, more)))
            rows = first if number == 0 else ahead.pop(0).result()
            x[start : start + block.rows], y[start : start + block.rows] = rows
            start += block.rows
    finally:
        background.close()
