"""Declarative input pipelines: read, shuffle, map, batch, cache, prefetch, shard.

    from paceline.data import read

    train = (
        read("s3://bucket/train/*.parquet", features="image", label="label", shape=(3, 32, 32))
        .shuffle(50_000)            # shuffle buffer in rows; 0 keeps the order of the files
        .map(whiten, threads=2)     # a function of (features, labels), on any number of rows
        .batch(mix_up)              # the same on complete batches, never cached
        .cache("disk")              # "memory", "disk" or "none"
        .prefetch(4)                # batches to prefetch; tuned automatically if omitted
        .shard("row_group")         # "file", "row_group", "sample", "off" or "auto"
    )
    Job(model="resnet20", data=(train, val, None))

Nothing is read until a worker opens the pipeline, except that a job inspects the files, their
description and the first file before it starts, without torch.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from typing import Any, Literal, get_args

from paceline.data import stores, tfds
from paceline.data.blocks import FORMATS, BlockSource, ColumnSelection, check_format, guess_format
from paceline.data.dataset import PixelScale
from paceline.data.stores import Files
from paceline.errors import DataError, UsageError, suggest_name

Shard = Literal["auto", "file", "row_group", "sample", "off"]
Cache = Literal["auto", "memory", "disk", "none"]
Change = Callable[[Any, Any], tuple[Any, Any]]

SHUFFLE_ROWS = 50_000
MEMORY_MB = 512
"""Memory limit per worker for data: rows in use, prefetched and cached."""
FACTS = "dataset.json"
"""Description that `paceline data convert` writes next to the files of a dataset."""
PARTS = ("train", "val", "test")
OTHER = "other"
_SPLITS = {**{part: part for part in PARTS}, "validation": "val", "valid": "val", "dev": "val"}
_SPLITS["t10k"] = "test"
"""Parts by the name of a split in files and directories of other programs."""


@dataclass(frozen=True, kw_only=True)
class DataPipeline:
    """An input pipeline, created by `read`. Every method returns a modified copy."""

    urls: tuple[str, ...]
    selection: ColumnSelection = ColumnSelection()
    format: str | None = None
    classes: int | None = None
    scale: PixelScale | None = None
    """Scaling of bytes: full scale, then mean and standard deviation per channel."""
    shuffle_rows: int = SHUFFLE_ROWS
    maps: tuple[Change, ...] = ()
    map_threads: int = 1
    batches: tuple[Change, ...] = ()
    cache_in: Cache = "auto"
    depth: int | None = None
    """Batches to prefetch; None is tuned during the run."""
    shard_by: Shard = "auto"
    memory_mb: int = MEMORY_MB
    notes: tuple[str, ...] = ()
    """Caveats in the dataset's description."""

    @property
    def memory_bytes(self) -> int:
        return self.memory_mb << 20

    def shuffle(self, rows: int = SHUFFLE_ROWS) -> DataPipeline:
        """Shuffles within a buffer of `rows`, with blocks in a new order per epoch; 0 disables it.

        With `shard("sample")`, all rows are shuffled regardless of `rows`.
        """
        if rows < 0:
            raise UsageError(f"shuffle({rows}): must be a number of rows, or 0 to keep their order")
        return replace(self, shuffle_rows=rows)

    def map(self, change: Change, *, threads: int = 1) -> DataPipeline:
        """Applies a function of (features, labels), both torch tensors, to rows.

        The function receives any number of rows and must treat each independently. Several threads
        process several blocks concurrently. A cache in memory stores its result.
        """
        if threads < 1:
            raise UsageError(f"map(threads={threads}): must be at least 1")
        return replace(self, maps=(*self.maps, change), map_threads=max(threads, self.map_threads))

    def batch(self, change: Change) -> DataPipeline:
        """Applies a function to each complete, scaled batch; the result is never cached.

        The batch size is set by the job.
        """
        return replace(self, batches=(*self.batches, change))

    def cache(self, where: Cache = "memory") -> DataPipeline:
        """Caches decoded rows in the memory of the process or on the local disk."""
        _check(where, get_args(Cache), "cache")
        return replace(self, cache_in=where)

    def prefetch(self, batches: int | None = None) -> DataPipeline:
        """Prefetches this many batches; 0 disables it; None tunes the number during the run."""
        if batches is not None and batches < 0:
            raise UsageError(f"prefetch({batches}): must not be negative")
        return replace(self, depth=batches)

    def shard(self, by: Shard) -> DataPipeline:
        """Sets how the data is sharded across workers."""
        _check(by, get_args(Shard), "shard")
        return replace(self, shard_by=by)

    def memory(self, megabytes: int) -> DataPipeline:
        """Sets the memory limit of this data per worker."""
        if megabytes < 16:
            raise UsageError(f"memory({megabytes}): must be at least 16 MB")
        return replace(self, memory_mb=megabytes)


def read(
    url: str | Sequence[str],
    *,
    features: str | Sequence[str] = (),
    label: str | None = None,
    format: str | None = None,
    shape: Sequence[int] | None = None,
    classes: int | None = None,
    scale: tuple[float, Sequence[float], Sequence[float]] | None = None,
    fill: float | None = None,
    skip_empty: bool = False,
) -> DataPipeline:
    """Creates a pipeline that reads one or more URLs: files, directories or patterns of one format.

    Args:
        features: feature columns, concatenated. Default: all columns except the label.
        label: label column. Default: "label", if there is such a column.
        format: file format. Default: inferred from the file names.
        shape: shape of one row of features. Default: as stored.
        classes: number of classes; labels are 0 to classes - 1. Default: inferred from the data.
        scale: scaling of bytes, (full, means, deviations). Default: (255, 0, 1).
        fill: value that replaces nulls. Default: nulls are an error.
        skip_empty: skip files without rows instead of raising an error.
    """
    urls = (url,) if isinstance(url, str) else tuple(url)
    if not urls or not all(isinstance(one, str) and one for one in urls):
        raise UsageError(f"read({url!r}): a URL is required")
    if isinstance(features, str):
        features = [name.strip() for name in features.split(",") if name.strip()]
    return DataPipeline(
        urls=tuple(stores.make_absolute(one) for one in urls),
        selection=ColumnSelection(
            tuple(features), label, tuple(shape) if shape else None, fill, skip_empty
        ),
        format=check_format(format) if format is not None else None,
        classes=classes,
        scale=None if scale is None else (scale[0], tuple(scale[1]), tuple(scale[2])),
    )


def parse_shape(text: str) -> tuple[int, ...]:
    """Parses a shape such as `1x28x28`. Raises UsageError."""
    try:
        shape = tuple(int(part) for part in text.lower().split("x"))
    except ValueError:
        shape = ()
    if not shape or min(shape) < 1:
        raise UsageError(f"shape {text!r}: must have the form 1x28x28")
    return shape


def _check(value: str, known: tuple[str, ...], what: str) -> None:
    if value not in known:
        raise UsageError(f"{what}({value!r}): {suggest_name(str(value), known)}")


def read_metadata(url: str) -> dict[str, Any]:
    """Returns the dataset's description; empty if there is none."""
    location = stores.join_url(stores.parent_url(url), FACTS)
    content = stores.read_if_exists(location)
    try:
        facts = {} if content is None else json.loads(content)
    except ValueError as error:
        raise DataError(f"{location}: is not JSON ({error})") from None
    return facts if isinstance(facts, dict) else {}


def fill_settings(pipeline: DataPipeline, other: DataPipeline, *names: str) -> DataPipeline:
    """Takes columns, scaling and the settings `names` from `other` where they are not set."""

    def unset(mine: Any, theirs: Any, names: Sequence[str]) -> dict[str, Any]:
        empty = (name for name in names if getattr(mine, name) in (None, ()))
        return {name: getattr(theirs, name) for name in empty}

    given = pipeline.selection
    columns = unset(given, other.selection, ("features", "label", "shape", "fill", "images"))
    settings = unset(pipeline, other, ("scale", *names))
    return replace(pipeline, selection=replace(given, **columns), **settings)


def describe(pipeline: DataPipeline) -> tuple[DataPipeline, Files, dict[str, Any]]:
    """Returns the pipeline, its data files, and the dataset's description.

    Settings that the user did not give are those of the description.
    """
    files = tuple(file for url in pipeline.urls for file in stores.list_files(url))
    if written := tfds.find_description(pipeline.urls[0], files):
        facts, files = written
    else:
        facts = read_metadata(pipeline.urls[0])
        files = tuple(file for file in files if not file.name.endswith(".json"))
    if not files:
        raise DataError(f"{pipeline.urls[0]}: contains a description, but no data files")
    features, shape, images = (
        tuple(facts.get(name) or ()) for name in ("features", "shape", "images")
    )
    if pipeline.selection.features:
        shape = ()  # That of other features, perhaps.
    full, mean, std = facts.get("scale") or (0, (), ())
    described = DataPipeline(
        urls=pipeline.urls,
        selection=ColumnSelection(features, facts.get("label"), shape or None, images=images),
        scale=(float(full), tuple(mean), tuple(std)) if full else None,
        format=facts.get("format"),
        classes=facts.get("classes"),
        notes=tuple(facts.get("notes") or ()),
    )
    return fill_settings(pipeline, described, "format", "classes", "notes"), files, facts


def list_splits(pipeline: DataPipeline) -> tuple[DataPipeline, dict[str, Files]]:
    """Returns the files of each split, if their names or directories are those of splits.

    Otherwise, and if some file belongs to no known split, all are training data.
    """
    pipeline, files, facts = describe(pipeline)
    if len(files) == 1 and (pipeline.format or files[0].name.rpartition(".")[2]) == "npz":
        from paceline.data import npz

        inside = npz.list_parts(files[0], PARTS)
        if inside and not pipeline.selection.features:
            return pipeline, {part: (replace(files[0], part=part),) for part in inside}
    parts: dict[str, Files] = {}
    for file in files:
        part = _part_of(file.url)
        parts[part] = (*parts.get(part, ()), file)
    if "train" not in parts or (OTHER in parts and not facts):
        return pipeline, {"train": files}
    return pipeline, {part: parts[part] for part in PARTS if part in parts}


def _part_of(url: str) -> str:
    """Returns the part of a file by its name (`val-00001.parquet`) or its directories."""
    *folders, name = url.split("/")
    prefix = re.split(r"[-_.]", name, maxsplit=1)[0]
    candidates = [tfds.split_of(name) or prefix, *reversed(folders[-2:])]
    return next((_SPLITS[word.lower()] for word in candidates if word.lower() in _SPLITS), OTHER)


def open_source(pipeline: DataPipeline, files: Files, limit: int | None = None) -> BlockSource:
    """Opens the first `limit` files, or all, as where opening reads none of them.

    Their names suggest the format if none is set.
    """
    form = check_format(pipeline.format or guess_format(pipeline.urls[0], files))
    module, _, name = FORMATS[form][0].partition(":")
    found = getattr(import_module(f"paceline.data.{module}"), name)
    source: BlockSource = found(
        files[:limit] if found.reads_when_opened else files, pipeline.selection
    )
    return source


def check_source(pipeline: DataPipeline) -> None:
    """Checks the first file, so that a run fails before a process is started."""
    pipeline, parts = list_splits(pipeline)
    open_source(pipeline, parts["train"], limit=1)
