"""`paceline report`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def report(
    folders: Annotated[list[Path], typer.Argument(metavar="DIR...", help="Run folders.")],
    out: Annotated[Path, typer.Option("-o", "--out", help="The HTML file.")] = Path("report.html"),
    title: Annotated[str, typer.Option(help="The page's title.")] = "Paceline report",
) -> None:
    from paceline.report.html import write_report

    typer.echo(f"report: {write_report(folders, out, title=title)}")
