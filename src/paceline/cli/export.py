"""`paceline export`."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer


class ExportFormat(StrEnum):
    chrome = "chrome"
    csv = "csv"
    tensorboard = "tensorboard"


def export(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="A run's folder.")],
    form: Annotated[
        ExportFormat, typer.Option("--as", help="chrome: a trace for Perfetto; csv; tensorboard.")
    ],
    out: Annotated[Path | None, typer.Option("-o", "--out", help="Where to. [inside DIR]")] = None,
    follow: Annotated[
        bool, typer.Option("--follow", help="tensorboard: go on while the run does.")
    ] = False,
) -> None:
    from paceline.errors import UsageError

    if follow and form is not ExportFormat.tensorboard:
        raise UsageError(f"--follow goes with --as tensorboard alone, not with --as {form}")
    if form is ExportFormat.chrome:
        from paceline.report.chrome_trace import write_trace

        typer.echo(f"written: {write_trace(folder, out or folder / 'trace.json')}")
    elif form is ExportFormat.csv:
        from paceline.report.csv_export import write_csv_files

        for path in write_csv_files(folder, out or folder / "csv"):
            typer.echo(f"written: {path}")
    else:
        from paceline.report.tensorboard import write_tensorboard

        typer.echo(
            f"written: {write_tensorboard(folder, out or folder / 'tensorboard', follow=follow)}"
        )
