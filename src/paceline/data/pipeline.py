"""What is to be done with data on its way to a batch, as a value: read, shuffle, map, ... prefetch.

    from paceline.data import read

    train = (
        read("s3://bucket/train/*.parquet", features="image", label="label", shape=(3, 32, 32))
        .shuffle(50_000)            # rows that are mixed; 0 keeps the order of the files
        .map(whiten, threads=2)     # a function of (features, labels), any number of rows
        .batch(mix_up)              # the same on a whole batch, every time
        .cache("disk")              # "memory", "disk" or "none"
        .prefetch(4)                # batches made ahead; without a number tuned by itself
        .shard("row_group")         # who reads what: "file", "row_group", "sample", "off", "auto"
    )
    Job(model="resnet20", data=(train, val, None))

Nothing is read before a worker opens it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, get_args

from paceline.data.blocks import ColumnSelection
from paceline.data.formats import check_format
from paceline.data.stores import make_absolute
from paceline.errors import UsageError, suggest_name

Shard = Literal["auto", "file", "row_group", "sample", "off"]
Cache = Literal["auto", "memory", "disk", "none"]
Change = Callable[[Any, Any], tuple[Any, Any]]

SHUFFLE_ROWS = 50_000
MEMORY_MB = 512
"""What a worker's data may take: rows held, read ahead and cached."""


@dataclass(frozen=True, kw_only=True)
class DataPipeline:
    """Made by `read`; every method gives a changed copy."""

    urls: tuple[str, ...]
    wanted: ColumnSelection = field(default_factory=ColumnSelection)
    format: str | None = None
    classes: int | None = None
    scale: tuple[float, tuple[float, ...], tuple[float, ...]] | None = None
    """Of bytes: full scale, then mean and standard deviation by channel."""
    shuffle_rows: int = SHUFFLE_ROWS
    maps: tuple[Change, ...] = ()
    map_threads: int = 1
    batches: tuple[Change, ...] = ()
    cache_in: Cache = "auto"
    depth: int | None = None
    """Batches made ahead; None is tuned by itself."""
    shard_by: Shard = "auto"
    memory_mb: int = MEMORY_MB

    def shuffle(self, rows: int = SHUFFLE_ROWS) -> DataPipeline:
        """Mix so many rows at a time, from row groups or files drawn anew every epoch; 0: never.

        Where single samples are leased (`shard("sample")`) all rows are mixed, whatever `rows` is.
        """
        if rows < 0:
            raise UsageError(f"shuffle({rows}): a number of rows, or 0 to keep their order")
        return replace(self, shuffle_rows=rows)

    def map(self, change: Change, *, threads: int = 1) -> DataPipeline:
        """Change rows by a function of (features, labels), both torch tensors.

        It gets any number of rows at a time and must treat each by itself. Several threads change
        several blocks at once. Its result is what a cache in memory keeps.
        """
        if threads < 1:
            raise UsageError(f"map(threads={threads}): at least one is needed")
        return replace(self, maps=(*self.maps, change), map_threads=max(threads, self.map_threads))

    def batch(self, change: Change) -> DataPipeline:
        """Change each whole batch, after its rows are joined and scaled; never cached.

        How many rows make a batch is the job's to say.
        """
        return replace(self, batches=(*self.batches, change))

    def cache(self, where: Cache = "memory") -> DataPipeline:
        """Keep decoded rows: in this process's memory, or in files of this machine."""
        _check(where, get_args(Cache), "cache")
        return replace(self, cache_in=where)

    def prefetch(self, batches: int | None = None) -> DataPipeline:
        """Make so many batches ahead; 0: none; without a number as many as keep nobody waiting."""
        if batches is not None and batches < 0:
            raise UsageError(f"prefetch({batches}): a number of batches, or 0")
        return replace(self, depth=batches)

    def shard(self, by: Shard) -> DataPipeline:
        """How reading is divided among workers."""
        _check(by, get_args(Shard), "shard")
        return replace(self, shard_by=by)

    def memory(self, megabytes: int) -> DataPipeline:
        """What this data may take of a worker's memory."""
        if megabytes < 16:
            raise UsageError(f"memory({megabytes}): at least 16 MB are needed")
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
    """Data at one or several URLs: files, folders or patterns, all of one format.

    features: a column, or several that are put side by side; all but the label if not given.
    label: a column; "label" where there is such a one.
    format: by the files' names if not given.
    shape: of one row of features, where the files do not tell.
    classes: labels are 0 to classes - 1; read off the data if not given.
    scale: of bytes, (full, means, deviations); (255, 0, 1) if not given.
    fill: in place of nulls, which are refused otherwise.
    skip_empty: leave files without rows out in place of refusing them.
    """
    urls = (url,) if isinstance(url, str) else tuple(url)
    if not urls or not all(isinstance(one, str) and one for one in urls):
        raise UsageError(f"read({url!r}): a URL is needed")
    names = parse_column_names(features) if isinstance(features, str) else tuple(features)
    return DataPipeline(
        urls=tuple(make_absolute(one) for one in urls),
        wanted=ColumnSelection(names, label, tuple(shape) if shape else None, fill, skip_empty),
        format=check_format(format) if format is not None else None,
        classes=classes,
        scale=None if scale is None else (scale[0], tuple(scale[1]), tuple(scale[2])),
    )


def parse_column_names(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(",") if name.strip())


def parse_shape(text: str) -> tuple[int, ...]:
    """`1x28x28` as numbers; raises UsageError."""
    try:
        shape = tuple(int(part) for part in text.lower().split("x"))
    except ValueError:
        shape = ()
    if not shape or min(shape) < 1:
        raise UsageError(f"shape {text!r}: write it as 1x28x28")
    return shape


def _check(value: str, known: tuple[str, ...], what: str) -> None:
    if value not in known:
        raise UsageError(f"{what}({value!r}): {suggest_name(str(value), known)}")
