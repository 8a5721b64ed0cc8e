"""`paceline data convert|show`."""

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from paceline.cli.commands import argument, command
from paceline.options import Option, settings


@settings()
class ConvertOptions:
    format: Literal["parquet", "tfrecord"] = "parquet"
    """File format."""
    files: Annotated[int, Field(ge=1)] = 8
    """Number of training files."""
    data_dir: Annotated[Path | None, Option(metavar="DIR")] = None
    """Directory with the original files, as DIR/<dataset>/<files>."""
    compress: bool = False
    """Compress: TFRecord with gzip, Parquet with zstd."""
    force: bool = False
    """Overwrite existing files."""


@settings()
class ShowOptions:
    features: Annotated[str | None, Option(metavar="COLUMNS")] = None
    """Feature columns, comma-separated."""
    label: Annotated[str | None, Option(metavar="COLUMN")] = None
    """Label column."""
    format: Annotated[str | None, Option(default="by file suffix")] = None
    """File format, for example parquet, tfrecord or csv."""
    shape: Annotated[str | None, Option(metavar="SHAPE")] = None
    """Shape of one row of features, for example 1x28x28."""


@command
def convert(
    name: Annotated[str, argument("Dataset name.")],
    url: Annotated[str, argument("Directory or URL to write to.")],
    /,
    *,
    options: ConvertOptions,
) -> None:
    from paceline.data.conversion import convert as convert_dataset

    facts = convert_dataset(
        name,
        url,
        form=options.format,
        files=options.files,
        data_dir=options.data_dir,
        compress=options.compress,
        force=options.force,
    )
    rows = ", ".join(f"{part} {count:,}" for part, count in facts["parts"].items())
    print(f"wrote {facts['name']} as {facts['format']} to {url}: {rows} rows")


@command
def show(
    url: Annotated[str, argument("File, directory or pattern; a path or URL.")],
    /,
    *,
    options: ShowOptions,
) -> None:
    from paceline.data.pipeline import list_splits, open_source, parse_shape, read

    pipeline = read(
        url,
        features=options.features or (),
        label=options.label,
        format=options.format,
        shape=parse_shape(options.shape) if options.shape else None,
    )
    pipeline, parts = list_splits(pipeline)
    for part, files in parts.items():
        source = open_source(pipeline, files)
        size = sum(file.size for file in source.files)
        line = f"{part}: {len(source.files):,} files, {size:,} bytes"
        if source.blocks:
            rows = sum(block.rows for block in source.blocks)
            largest = max(block.rows for block in source.blocks)
            first = source.read(source.blocks[0])[0]
            line += (
                f", {rows:,} rows in {len(source.blocks):,} blocks of up to {largest:,}; features "
                f"per row: {'x'.join(map(str, first.shape[1:]))} {first.dtype}"
            )
        print(line)
