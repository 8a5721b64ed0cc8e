"""`paceline report`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from paceline.cli.commands import argument, command
from paceline.errors import UsageError
from paceline.options import Option


@dataclass(frozen=True, kw_only=True)
class ReportOptions:
    out: Annotated[tuple[Path, ...], Option(short="o", metavar="FILE")] = (Path("report.html"),)
    """File to write, .html or .md. Repeatable."""
    title: str = "Paceline report"
    """Title of the report."""
    target: Annotated[
        float | None,
        Field(gt=0, le=1),
        Option(metavar="ACCURACY", default="highest that all runs reached"),
    ] = None
    """Validation accuracy for the time-to-accuracy comparison, 0 to 1."""
    against: Literal["published"] | None = None
    """Show the results of published studies next to these runs."""
    figures: Annotated[Path | None, Option(metavar="DIR")] = None
    """Write every chart as SVG and PNG to this directory."""
    tables: Annotated[Path | None, Option(metavar="DIR")] = None
    """Write every table as CSV and LaTeX to this directory."""


@command
def report(
    *folders: Annotated[Path, argument("Run folders, or directories of run folders.")],
    options: ReportOptions,
) -> None:
    from paceline.report.writer import write_report

    if not folders:
        raise UsageError("a run folder is required, for example `paceline report runs/first`")
    for path in write_report(
        folders,
        *options.out,
        title=options.title,
        target=options.target,
        published=options.against == "published",
        figures=options.figures,
        tables=options.tables,
    ):
        print(f"report: {path}")
