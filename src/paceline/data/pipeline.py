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

Nothing is read until a worker opens the pipeline.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

from paceline.data.blocks import ColumnSelection, check_format
from paceline.data.stores import make_absolute
from paceline.errors import UsageError, suggest_name

Shard = Literal["auto", "file", "row_group", "sample", "off"]
Cache = Literal["auto", "memory", "disk", "none"]
Change = Callable[[Any, Any], tuple[Any, Any]]

SHUFFLE_ROWS = 50_000
MEMORY_MB = 512
"""Memory limit per worker for data: rows in use, prefetched and cached."""


@dataclass(frozen=True, kw_only=True)
class DataPipeline:
    """An input pipeline, created by `read`. Every method returns a modified copy."""

    urls: tuple[str, ...]
    selection: ColumnSelection = ColumnSelection()
    format: str | None = None
    classes: int | None = None
    scale: tuple[float, tuple[float, ...], tuple[float, ...]] | None = None
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
        urls=tuple(make_absolute(one) for one in urls),
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
