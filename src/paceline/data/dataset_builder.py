"""From a pipeline to a table: list the files, look at the first block, choose how to hold the rest.

| shard | rows are held | order of an epoch |
|---|---|---|
| `off` | all, in the memory of every worker | seed and epoch |
| `sample` | all: in memory if they fit, else in one mapped copy a machine | seed and epoch |
| `row_group`, `file` | a few blocks at a time | seed, epoch and the recorded shard plan |

`auto` is `sample` where all rows fit into half of the memory allowed, else `row_group`.
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
"""Threads that read a whole set at the start: mostly they wait for the store."""
LEAST_BLOCKS = 10
"""Of fewer blocks a tenth cannot be held out."""


@dataclass(frozen=True)
class BuiltDataset:
    """A table and what a model by name has to know of it."""

    table: MapDataset
    shape: tuple[int, ...]
    classes: int | None
    kind: Kind
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class FeatureOptions:
    """How rows become features; the same for all parts of a set."""

    dtype: str = "float32"
    augment: bool = False
    seed: int = 0


def build_splits(
    name: str, pipeline: DataPipeline, val: DataPipeline | None, taking: FeatureOptions
) -> DatasetSplits:
    """A data set by URL: its parts as its description divides them, or a tenth held out.

    Raises DataError or UsageError, in one line, for whatever is wrong with it.
    """
    pipeline, parts = list_splits(pipeline)
    hold_out = val is None and "val" not in parts
    opened, held = _open_part(pipeline, parts["train"], taking, hold_out=hold_out)
    plain = replace(taking, augment=False)
    others: dict[str, MapDataset | None] = {"val": held, "test": None}
    for part in ("val", "test"):
        if part in parts:
            others[part] = _open_part(pipeline, parts[part], plain)[0].table
    if val is not None and opened.kind == "text":
        raise UsageError(
            f"{name}: a text's characters are numbered by all of it: leave --val-data out, a tenth "
            "is held out"
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
    like: DataPipeline, pipeline: DataPipeline, taking: FeatureOptions, first: BuiltDataset
) -> MapDataset:
    """Validation data, read as the training data is; raises DataError if its rows differ."""
    pipeline = apply_metadata(pipeline, read_metadata(pipeline.urls[0]))
    wanted = pipeline.wanted
    for name in ("features", "label", "shape", "fill"):
        if not getattr(wanted, name):
            wanted = replace(wanted, **{name: getattr(like.wanted, name)})
    pipeline = replace(
        pipeline,
        wanted=wanted,
        scale=pipeline.scale or like.scale,
        maps=pipeline.maps or like.maps,
    )
    opened, _ = _open_part(pipeline, list_data_files(pipeline), taking)
    if opened.shape != first.shape:
        raise DataError(
            f"{pipeline.urls[0]}: rows of shape {opened.shape}, but of {first.shape} in training"
        )
    return opened.table


def build_dataset(pipeline: DataPipeline, taking: FeatureOptions) -> BuiltDataset:
    """A pipeline by itself, all its rows; raises as `open_set`."""
    pipeline, parts = list_splits(pipeline)
    return _open_part(pipeline, parts["train"], taking)[0]


def _open_part(
    pipeline: DataPipeline,
    files: tuple[StoredFile, ...],
    taking: FeatureOptions,
    *,
    hold_out: bool = False,
) -> tuple[BuiltDataset, MapDataset | None]:
    source = open_source_for(pipeline, files)
    made = getattr(source, "as_opened", None)
    if made is not None:
        # A format whose rows are not those of its files, such as windows of a text.
        whole, part = made(hold_out)
        return replace(whole, table=_wrap(whole.table, pipeline, None)), part
    reader = BlockReader(source, pipeline.maps)
    first = reader.read(source.blocks[0])
    scaling, finish = _make_finish(pipeline, first, taking)
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
            dtype=taking.dtype,
            rows=None if len(kept) == len(y) else kept,
            scaling=scaling,
            augmentation=_augmentation(shape, taking),
            seed=taking.seed,
        )
        if len(held):
            val = ArrayDataset(x, y, dtype=taking.dtype, rows=held, scaling=scaling)
    else:
        blocks, held_blocks = list(source.blocks), []
        if hold_out and len(blocks) >= LEAST_BLOCKS:
            order = hashing.split_holdout(len(blocks), len(blocks) // 10)
            blocks, held_blocks = ([source.blocks[i] for i in part] for part in order)
            notes = (f"validation: {len(held_blocks)} of {len(source.blocks)} blocks",)
        elif hold_out:
            notes = (f"no validation: only {len(blocks)} blocks to hold one out of",)
        if pipeline.cache_in == "memory":
            reader.kept = MemoryBlockCache(_budget(pipeline) // 2)
        elif pipeline.cache_in == "disk":
            from paceline.data.mapped_copy import name_copy

            reader.stored = DiskBlockCache(array_cache.root() / name_copy(pipeline, reader))
        train = _make_streamed(pipeline, reader, blocks, finish, first)
        if held_blocks:
            _, plain = _make_finish(pipeline, first, replace(taking, augment=False))
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
    """How reading is divided: what was asked for, or what the size of the data suggests."""
    if pipeline.shard_by != "auto":
        return pipeline.shard_by
    rows = sum(block.rows for block in source.blocks)
    if pipeline.cache_in == "memory" or rows * row_size <= _budget(pipeline) // 2:
        return "sample"
    return "row_group"


def _budget(pipeline: DataPipeline) -> int:
    return pipeline.memory_mb << 20


def _make_finish(
    pipeline: DataPipeline, first: Rows, taking: FeatureOptions
) -> tuple[PixelScaling | None, BatchTransform]:
    x = first[0]
    scaling = None
    if x.dtype == np.uint8:
        scaling = PixelScaling(*(pipeline.scale or (255.0, (0.0,), (1.0,))))
    shape = x.shape[1:]
    if scaling is not None and len(shape) == 3 and len(scaling.mean) not in (1, shape[0]):
        raise UsageError(f"scale: {len(scaling.mean)} means for images of {shape[0]} channels")
    finish = BatchTransform(
        taking.dtype,
        dimensions=len(shape),
        scaling=scaling,
        augmentation=_augmentation(shape, taking),
        seed=taking.seed,
    )
    return scaling, finish


def _augmentation(
    shape: tuple[int, ...], taking: FeatureOptions
) -> augmentation.Augmentation | None:
    if not taking.augment:
        return None
    if len(shape) != 3:
        raise UsageError(
            f"rows of shape {'x'.join(map(str, shape))} cannot be augmented: only images can"
        )
    return augmentation.COLOUR if shape[0] == 3 else augmentation.GREY


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
    # Three eighths are for the windows in use and to come; a cache takes half, decoding the rest.
    return StreamingDataset(
        reader,
        blocks,
        finish,
        row_bytes=row_bytes(first),
        memory_bytes=_budget(pipeline) * 3 // 8,
        threads=max(READERS, pipeline.map_threads),
    )


def _hold_all(pipeline: DataPipeline, reader: BlockReader, first: Rows, shard: str) -> Rows:
    """Every row: in memory, or in a copy on this machine's disk that its processes share."""
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
    """Read all blocks into arrays, several at a time, no more of them in memory than that."""
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
