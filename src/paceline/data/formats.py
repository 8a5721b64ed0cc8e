"""Supported file formats: how each is recognized, and the function that opens it."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING

from paceline.data.stores import StoredFile
from paceline.errors import UsageError, suggest_name

if TYPE_CHECKING:
    from paceline.data.blocks import BlockSource, ColumnSelection

IMAGE_SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp")


@dataclass(frozen=True)
class Format:
    """A format. `opener` is "module:function" of (files, selection); suffixes are lower case."""

    opener: str
    suffixes: tuple[str, ...]


FORMATS: dict[str, Format] = {
    "parquet": Format("parquet:ParquetSource", (".parquet", ".pq")),
    "tfrecord": Format(
        "tfrecord:TFRecordSource",
        (".tfrecord", ".tfrecords", ".tfrecord.gz", ".tfrecords.gz", ".tfrecord.zlib"),
    ),
    "csv": Format("csv_source:CsvSource", (".csv", ".tsv", ".csv.gz", ".tsv.gz")),
    "idx": Format(
        "fixed_records:IdxSource", ("idx3-ubyte", "idx3-ubyte.gz", "idx1-ubyte", "idx1-ubyte.gz")
    ),
    "cifar": Format("fixed_records:CifarSource", (".bin",)),
    "images": Format("image_folder:ImageFolderSource", IMAGE_SUFFIXES),
    "text": Format("text:TextSource", (".txt",)),
}


def check_format(name: str) -> str:
    if name not in FORMATS:
        raise UsageError(f"unknown format {name!r}; {suggest_name(name, FORMATS)}")
    return name


def guess_format(url: str, files: tuple[StoredFile, ...]) -> str:
    """Returns the format by file names. Raises UsageError if it is unknown or ambiguous."""
    found = {_guess(file.name.lower()) for file in files}
    if len(found) == 1:
        (name,) = found
        if name is not None:
            return name
    known = sorted(name for name in found if name is not None)
    if len(known) > 1:
        raise UsageError(
            f"{url}: files of several formats ({', '.join(known)}); use a pattern such as "
            f"'*{FORMATS[known[0]].suffixes[0]}', or --format"
        )
    raise UsageError(
        f"{url}: cannot infer the format of {files[0].name}; use --format "
        f"({', '.join(sorted(FORMATS))})"
    )


def _guess(name: str) -> str | None:
    for known, form in FORMATS.items():
        if name.endswith(form.suffixes):
            return known
    return None


def open_source(
    form: str, files: tuple[StoredFile, ...], selection: ColumnSelection
) -> BlockSource:
    module, function = FORMATS[check_format(form)].opener.split(":")
    opener = getattr(import_module(f"paceline.data.{module}"), function)
    source: BlockSource = opener(files, selection)
    return source
