"""`paceline data convert|get|list|show`."""

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from paceline.cli.commands import argument, command, print_table
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


@settings()
class ListOptions:
    data_dir: Annotated[
        Path | None, Option(metavar="DIR", default="$PACELINE_DATA or ~/.cache/paceline/data")
    ] = None
    """Directory of named datasets, as DIR/<dataset>/<files>."""


@settings()
class GetOptions:
    source: Annotated[str | None, Option(name="from", metavar="URL", default="its publisher")] = (
        None
    )
    """Directory or URL with the published files, instead of their publisher."""


@command
def get(
    name: Annotated[str, argument("Dataset name.")],
    /,
    *,
    options: GetOptions,
    where: ListOptions,
) -> None:
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn

    from paceline.data.download import download

    columns = TextColumn("{task.description}", markup=False), BarColumn(), DownloadColumn()
    console = Console(stderr=True)
    # Elsewhere than on a terminal, the bar would leave an empty line.
    with Progress(
        *columns, console=console, transient=True, disable=not console.is_terminal
    ) as bars:
        task = bars.add_task(name, total=None)

        def report(file: str, done: int, size: int) -> None:
            bars.update(task, description=file, completed=done, total=size)

        for path, fresh in download(name, where.data_dir, options.source, report):
            print(f"{path}: {'downloaded and verified' if fresh else 'already present'}")


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


@command
def list(*, options: ListOptions) -> None:
    from paceline.data.download import list_datasets

    rows = [
        {"dataset": each.name, "state": each.state, "directory": each.where, "note": each.note}
        for each in list_datasets(options.data_dir)
    ]
    print_table(rows, left=("dataset", "state", "directory", "note"))
