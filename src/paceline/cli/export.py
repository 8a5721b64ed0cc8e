"""`paceline export`."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer


class Form(StrEnum):
    chrome = "chrome"
    csv = "csv"
    tensorboard = "tensorboard"


def export(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="A run's folder.")],
    form: Annotated[
        Form, typer.Option("--as", help="chrome: a trace for Perfetto; csv; tensorboard.")
    ],
    out: Annotated[Path | None, typer.Option("-o", "--out", help="Where to. [inside DIR]")] = None,
    follow: Annotated[
        bool, typer.Option("--follow", help="tensorboard: go on while the run does.")
    ] = False,
) -> None:
    from paceline.errors import UsageError

    if follow and form is not Form.tensorboard:
        raise UsageError(f"--follow goes with --as tensorboard alone, not with --as {form}")
    if form is Form.chrome:
        from paceline.report.trace import write_trace

        typer.echo(f"written: {write_trace(folder, out or folder / 'trace.json')}")
    elif form is Form.csv:
        from paceline.report.tables import write_tables

        for path in write_tables(folder, out or folder / "csv"):
            typer.echo(f"written: {path}")
    else:
        from paceline.report.board import write_board

        typer.echo(f"written: {write_board(folder, out or folder / 'tensorboard', follow=follow)}")
