"""`paceline profile`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def profile(
    folders: Annotated[
        list[Path], typer.Argument(metavar="DIR [DIR]", help="One run, or two side by side.")
    ],
    top: Annotated[int, typer.Option(help="Operators to show.")] = 20,
    table: Annotated[Path | None, typer.Option("--csv", help="Write all of them there.")] = None,
) -> None:
    from rich.console import Console

    from paceline.errors import UsageError
    from paceline.report.operator_profile import make_table, read_profile, write_csv

    if len(folders) > 2:
        raise UsageError(f"{len(folders)} runs were named: name one, or two to put side by side")
    if top < 1:
        raise UsageError(f"--top is {top}: at least 1 is needed")
    profiles = [read_profile(folder) for folder in folders]
    Console().print(make_table(profiles, top))
    if table is not None:
        write_csv(profiles, table)
        typer.echo(f"written: {table}")
