"""Supported file formats: how each is recognized, and the source that reads it."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from paceline.data.stores import StoredFile
from paceline.errors import UsageError, suggest_name

if TYPE_CHECKING:
    from paceline.data.blocks import BlockSource, ColumnSelection

FORMATS: dict[str, tuple[str, tuple[str, ...]]] = {
    "parquet": ("parquet:ParquetSource", (".parquet", ".pq")),
    "tfrecord": (
        "tfrecord:TFRecordSource",
        (".tfrecord", ".tfrecords", ".tfrecord.gz", ".tfrecords.gz", ".tfrecord.zlib"),
    ),
    "csv": ("csv_source:CsvSource", (".csv", ".tsv", ".csv.gz", ".tsv.gz")),
    "idx": (
        "fixed_records:IdxSource",
        ("idx3-ubyte", "idx3-ubyte.gz", "idx1-ubyte", "idx1-ubyte.gz"),
    ),
    "cifar": ("fixed_records:CifarSource", (".bin",)),
    "images": (
        "image_folder:ImageFolderSource",
        (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp"),
    ),
    "text": ("text:TextSource", (".txt",)),
}
"""The "module:class" of each source, called with files and selection, and lower-case suffixes."""


def check_format(name: str) -> str:
    if name not in FORMATS:
        raise UsageError(f"unknown format {name!r}; {suggest_name(name, FORMATS)}")
    return name


def guess_format(url: str, files: tuple[StoredFile, ...]) -> str:
    """Returns the format by file names. Raises UsageError if it is unknown or ambiguous."""
    names = [file.name.lower() for file in files]
    known = sorted(
        form for form, (_, suffixes) in FORMATS.items() if any(n.endswith(suffixes) for n in names)
    )
    if len(known) > 1:
        raise UsageError(
            f"{url}: files of several formats ({', '.join(known)}); use a pattern such as "
            f"'*{FORMATS[known[0]][1][0]}', or --format"
        )
    if not known or not all(name.endswith(FORMATS[known[0]][1]) for name in names):
        raise UsageError(
            f"{url}: cannot infer the format of {files[0].name}; use --format "
            f"({', '.join(sorted(FORMATS))})"
        )
    return known[0]


def open_source(
    form: str, files: tuple[StoredFile, ...], selection: ColumnSelection
) -> BlockSource:
    module, _, name = FORMATS[check_format(form)][0].partition(":")
    source: BlockSource = getattr(import_module(f"paceline.data.{module}"), name)(files, selection)
    return source
