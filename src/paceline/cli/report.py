"""`paceline report`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from paceline.errors import UsageError


def report(
    folders: Annotated[list[Path], typer.Argument(metavar="DIR...", help="Run folders.")],
    out: Annotated[
        list[Path] | None,
        typer.Option("-o", "--out", help="FILE.html or FILE.md; may be repeated. [report.html]"),
    ] = None,
    title: Annotated[str, typer.Option(help="The report's title.")] = "Paceline report",
    target: Annotated[
        float | None,
        typer.Option(help="A validation accuracy, 0 to 1, to time. [what all runs reached]"),
    ] = None,
    against: Annotated[
        str | None, typer.Option(help="published: the studies' figures beside these.")
    ] = None,
    figures: Annotated[
        Path | None, typer.Option(help="A folder for every picture as SVG and PNG.")
    ] = None,
    tables: Annotated[
        Path | None, typer.Option(help="A folder for every table as CSV and LaTeX.")
    ] = None,
) -> None:
    from paceline.report.writer import write_report_files

    if target is not None and not 0 < target <= 1:
        raise UsageError(f"--target is {target:g}: an accuracy above 0 and up to 1 is needed")
    if against not in (None, "published"):
        raise UsageError(f"--against is {against!r}: known: published")
    for path in write_report_files(
        folders,
        out or [Path("report.html")],
        title=title,
        target=target,
        published=against == "published",
        figures=figures,
        tables=tables,
    ):
        typer.echo(f"report: {path}")
