"""`paceline data convert|show`."""

from __future__ import annotations

from typing import Annotated

import typer

from paceline.cli import options as opt

app = typer.Typer(
    name="data",
    help="Lay a data set where a cluster reads it; look at data by URL.",
    no_args_is_help=True,
    rich_markup_mode=None,
)


@app.command("convert", help="Write a named data set as Parquet or TFRecord files.")
def convert(
    name: Annotated[str, typer.Argument(metavar="SET", help="A data set by name.")],
    url: Annotated[str, typer.Argument(metavar="URL", help="The folder to write.")],
    format: Annotated[str, typer.Option(help="parquet or tfrecord.")] = "parquet",
    files: Annotated[int, typer.Option(help="Training files.")] = 8,
    data_dir: opt.DataDir = None,
    compress: Annotated[
        bool, typer.Option("--compress", help="TFRecord by gzip, Parquet by zstd.")
    ] = False,
    force: Annotated[bool, typer.Option("--force", help="Write over a set that is there.")] = False,
) -> None:
    from paceline.data.conversion import convert as write

    facts = write(
        name,
        url,
        form=format,
        files=files,
        data_dir=data_dir,
        compress=compress,
        force=force,
    )
    rows = ", ".join(f"{part} {count:,}" for part, count in facts["parts"].items())
    typer.echo(f"{facts['name']} as {facts['format']} in {url}: {rows} rows")


@app.command("show", help="What lies at a URL: files, rows, blocks, features and classes.")
def show(
    url: Annotated[str, typer.Argument(metavar="URL", help="A file, a folder or a pattern.")],
    features: opt.Features = None,
    label: opt.Label = None,
    format: opt.Format = None,
    shape: opt.Shape = None,
) -> None:
    from paceline.data.discovery import list_splits, open_source_for
    from paceline.data.pipeline import parse_shape, read

    pipeline = read(
        url,
        features=features or (),
        label=label,
        format=format,
        shape=parse_shape(shape) if shape else None,
    )
    pipeline, parts = list_splits(pipeline)
    for part, files in parts.items():
        source = open_source_for(pipeline, files)
        size = sum(file.size for file in source.files)
        line = f"{part}: {len(source.files):,} files, {size:,} bytes"
        if source.blocks:
            rows = sum(block.rows for block in source.blocks)
            largest = max(block.rows for block in source.blocks)
            first = source.read(source.blocks[0])[0]
            line += (
                f", {rows:,} rows in {len(source.blocks):,} blocks of up to {largest:,}; a row is "
                f"{'x'.join(map(str, first.shape[1:]))} of {first.dtype}"
            )
        typer.echo(line)
