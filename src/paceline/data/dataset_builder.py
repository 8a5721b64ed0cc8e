"""Builds a dataset from a pipeline: lists the files, reads the first block, chooses the storage.

| shard | rows held in memory | order of an epoch |
|---|---|---|
| `off` | all, by every worker | seed and epoch |
| `sample` | all, if they fit; else one memory-mapped copy per machine | seed and epoch |
| `row_group`, `file` | a few blocks at a time | seed, epoch and the recorded shard plan |

`auto` selects `sample` if all rows fit into half of the memory limit, else `row_group`.
"""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from paceline.data import array_cache, hashing, streaming
from paceline.data.blocks import Array, BlockSource, DataBlock, Rows, row_bytes
from paceline.data.dataset import (
    DatasetSplits,
    FeatureOptions,
    Kind,
    MapDataset,
    Validation,
    scale_pixels,
)
from paceline.data.in_memory import ArrayDataset, BatchTransform, PixelScaling, choose_augmentation
from paceline.data.pipeline import DataPipeline, describe, fill_settings, list_splits, open_source
from paceline.data.stores import Files
from paceline.data.streaming import BlockReader, StreamingDataset
from paceline.errors import DataError, UsageError

NO_VALIDATION = Validation(0)


def build_splits(
    name: str, pipeline: DataPipeline, val: DataPipeline | None, options: FeatureOptions
) -> DatasetSplits:
    """Builds a dataset from a URL, split by its description, or with a tenth held out.

    Raises a one-line DataError or UsageError.
    """
    pipeline, parts = list_splits(pipeline)
    wanted = options.validation
    if wanted is not None:
        parts.pop("val", None)
        if wanted.uses_test and "test" not in parts:
            raise UsageError(f"{name}: validation test requires test data, and there is none")
    held = NO_VALIDATION if val is not None or "val" in parts else wanted or Validation()
    source = open_source(pipeline, parts["train"])
    _check_label(pipeline, source)
    found = build_from_source(pipeline, source, options, held)
    plain = replace(options, augment=False)
    others = {"val": found.val, "test": None} | {
        part: _open_part(pipeline, files, plain).train
        for part, files in parts.items()
        if part != "train"
    }
    if val is not None:
        if found.kind == "text":
            raise UsageError(
                f"{name}: --val-data is not supported for text, whose character codes depend on "
                "the whole file; remove it, and a tenth is held out"
            )
        others["val"] = _build_matching(pipeline, val, plain, found.input_shape)
    elif wanted is not None and wanted.uses_test:
        others["val"] = others["test"]
    return replace(found, name=name, val=others["val"], test=others["test"])


def _check_label(pipeline: DataPipeline, source: BlockSource) -> None:
    """Raises UsageError if nothing can be predicted; a function of the pipeline may add labels."""
    if source.columns and source.selection.label is None and not pipeline.maps:
        raise UsageError(
            f"{pipeline.urls[0]}: no column is named label; choose one of "
            f"{', '.join(source.columns)} with --label"
        )


def build_dataset(pipeline: DataPipeline, options: FeatureOptions) -> DatasetSplits:
    """Builds a dataset with all rows of a pipeline in `train`. Raises like `build_splits`."""
    pipeline, parts = list_splits(pipeline)
    return _open_part(pipeline, parts["train"], options)


def _build_matching(
    like: DataPipeline, pipeline: DataPipeline, options: FeatureOptions, shape: tuple[int, ...]
) -> MapDataset:
    """Builds validation data like the training data. Raises DataError if the shapes differ."""
    pipeline, files, _ = describe(pipeline)
    found = _open_part(fill_settings(pipeline, like, "maps"), files, options)
    if found.input_shape != shape:
        raise DataError(
            f"{pipeline.urls[0]}: rows have the shape {found.input_shape}, but {shape} in training"
        )
    return found.train


def _open_part(
    pipeline: DataPipeline,
    files: Files,
    options: FeatureOptions,
    validation: Validation = NO_VALIDATION,
) -> DatasetSplits:
    """Returns the rows of some files in `train`, without those in `val`."""
    return build_from_source(pipeline, open_source(pipeline, files), options, validation)


def build_from_source(
    pipeline: DataPipeline,
    source: BlockSource,
    options: FeatureOptions,
    validation: Validation = NO_VALIDATION,
) -> DatasetSplits:
    """Builds a dataset with all rows of a source in `train`, without those in `val`."""
    hold_out = bool(validation.held_out)
    derived = source.derive_splits(hold_out)
    if derived is not None:
        return replace(derived, train=streaming.PipelinedDataset(derived.train, pipeline))
    reader = BlockReader(source, pipeline.maps)
    first = reader.read(source.blocks[0])
    shape = first[0].shape[1:]
    scaling = _choose_scaling(pipeline, first[0], options.scaling)
    plain: dict[str, Any] = {"dtype": options.dtype, "scaling": scaling}
    augmented = {**plain, "augmentation": choose_augmentation(shape, options), "seed": options.seed}
    classes = _count_classes(pipeline, reader, first)
    shard: str = pipeline.shard_by
    if shard == "auto":
        small = source.row_count * row_bytes(first) <= pipeline.memory_bytes // 2
        shard = "sample" if small or pipeline.cache_in == "memory" else "row_group"
    train: MapDataset
    val: MapDataset | None = None
    notes: tuple[str, ...] = ()
    if shard in ("sample", "off"):
        x, y = _hold_all(pipeline, reader, first, shard)
        kept = None
        if hold_out and (count := validation.count(len(y))):
            kept, held = hashing.split_holdout(len(y), count)
            val = ArrayDataset(x, y, rows=held, **plain)
        train = ArrayDataset(x, y, rows=kept, **augmented)
    else:
        stream = partial(
            StreamingDataset,
            reader,
            row_bytes=row_bytes(first),
            # For current and prefetched windows; the cache takes half, decoding the rest.
            memory_bytes=pipeline.memory_bytes * 3 // 8,
            threads=max(streaming.READERS, pipeline.map_threads),
        )
        blocks: Sequence[DataBlock] = source.blocks
        if pipeline.cache_in == "memory":
            reader.kept = streaming.MemoryBlockCache(pipeline.memory_bytes // 2)
        elif pipeline.cache_in == "disk":
            folder = array_cache.root() / array_cache.name_copy(pipeline, reader)
            reader.stored = array_cache.DiskBlockCache(folder)
        share: float = validation.held_out  # Of the blocks, which are held out as a whole.
        if isinstance(validation.held_out, int):
            share = validation.count(source.row_count) / source.row_count
        if count := int(len(blocks) * share):
            order = hashing.split_holdout(len(blocks), count)
            blocks, held_blocks = ([source.blocks[i] for i in part] for part in order)
            notes = (f"validation: {len(held_blocks)} of {len(source.blocks)} blocks",)
            val = stream(held_blocks, BatchTransform(**plain, dimensions=len(shape)))
        elif hold_out:
            notes = (f"no validation: {len(blocks)} blocks are too few to hold one out",)
        train = stream(blocks, BatchTransform(**augmented, dimensions=len(shape)))
    train = streaming.PipelinedDataset(train, pipeline, shard)
    kind: Kind = "image" if len(shape) == 3 else "table"
    return DatasetSplits("", shape, classes, kind, train, val, None, (*pipeline.notes, *notes))


def _choose_scaling(pipeline: DataPipeline, x: Array, given: str | None) -> PixelScaling | None:
    if x.dtype != np.uint8:
        if given is not None:
            raise UsageError(f"scaling {given}: the features are not pixels, but {x.dtype} values")
        return None
    scaling = PixelScaling(*scale_pixels("".join(pipeline.urls[:1]), pipeline.scale, given))
    if x.ndim == 4 and len(scaling.mean) not in (1, x.shape[1]):
        raise UsageError(
            f"scale: {len(scaling.mean)} means were given for images with {x.shape[1]} channels"
        )
    return scaling


def _count_classes(pipeline: DataPipeline, reader: BlockReader, first: Rows) -> int | None:
    source = reader.source
    if pipeline.classes is not None or first[1].dtype.kind == "f":
        return pipeline.classes
    known = source.count_classes()
    if known is not None or source.row_count * row_bytes(first) > pipeline.memory_bytes // 2:
        return known
    return 1 + max(int(reader.read(block)[1].max()) for block in source.blocks)


def _hold_all(pipeline: DataPipeline, reader: BlockReader, first: Rows, shard: str) -> Rows:
    """Returns all rows: in memory, or in a copy on disk that the machine's processes share."""
    count = reader.source.row_count
    where = pipeline.cache_in
    if where == "auto":
        fits = shard == "off" or count * row_bytes(first) <= pipeline.memory_bytes
        where = "memory" if fits else "disk"
        # Images are decoded once per machine, if a copy can be written and would become outdated.
        stamped = all(file.stamp for file in reader.source.files)
        if fits and reader.source.decodes_images and stamped and not pipeline.maps:
            with suppress(DataError):
                return array_cache.open_mapped_copy(pipeline, reader, first)
    if where == "disk":
        return array_cache.open_mapped_copy(pipeline, reader, first)
    x, y = (np.empty((count, *part.shape[1:]), part.dtype) for part in first)
    reader.read_all(first, x, y)
    return x, y
