"""Writes a report as HTML and Markdown, with its figures and tables as separate files."""

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from paceline.errors import UsageError
from paceline.report.document import MakeOpening, ReportDocument, make_content
from paceline.report.html import render_report
from paceline.report.runs import ReportRun, load_runs
from paceline.report.tables import escape_markdown
from paceline.telemetry.run_folder import replace_text

SUFFIXES = (".html", ".htm", ".md")


def write_report(
    folders: Sequence[Path],
    *outs: Path,
    title: str,
    target: float | None = None,
    published: bool = False,
    figures: Path | None = None,
    tables: Path | None = None,
    make_opening: MakeOpening | None = None,
) -> list[Path]:
    """Writes the report of the runs in the folders to each file; returns all paths written.

    A folder that is not a run is searched recursively. Failed, unfinished and interrupted runs are
    included, with a description of what is missing. Files are replaced atomically. Figures and
    tables are written to directories, if requested. `make_opening` returns what the report begins
    with, from its tasks.

    Raises:
        UsageError: A folder contains no run, or a file cannot be written.
    """
    for out in outs:
        if out.suffix not in SUFFIXES:
            raise UsageError(f"-o {out}: the file name must end in .html or .md")
    if figures is not None:
        from paceline.report.figures import require_matplotlib, write_figures

        require_matplotlib()
    content = make_content(
        load_runs(folders),
        title=title,
        target=target,
        published=published,
        make_opening=make_opening,
    )
    pictures: dict[str, Path] = {}
    if figures is not None:
        make_folder(figures)
        write_figures(content.figures, figures)
        pictures = {name: figures / f"{name}.svg" for name in content.figures}
    for out in outs:
        if out.suffix == ".md":
            write_text(out, render_markdown(content, pictures, out.parent))
        else:
            write_text(out, render_report(content))
    if tables is not None:
        make_folder(tables)
        for name, sheet in content.sheets.items():
            write_text(tables / f"{name}.csv", sheet.to_csv())
            write_text(tables / f"{name}.tex", sheet.to_latex())
    return [*outs, *(folder for folder in (figures, tables) if folder is not None)]


def make_folder(path: Path) -> None:
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(
            f"{path} cannot be created ({error.strerror}); choose another directory"
        ) from None


def write_text(out: Path, text: str) -> None:
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        replace_text(out, text)
    except OSError as error:
        raise UsageError(
            f"the report cannot be written to {out} ({error.strerror}); choose another file"
        ) from None


def render_markdown(content: ReportDocument, pictures: Mapping[str, Path], base: Path) -> str:
    """`pictures`: files by the name of their figure; linked relative to `base`."""
    lines = [f"# {escape_markdown(content.title)}", "", content.facts, ""]
    problems = list(list_problems(content.runs))
    if problems:
        lines += ["Incomplete:", "", *problems, ""]
    opening = content.opening
    lines += [f"- {escape_markdown(text)}" for text in opening.statements]
    for sheet in opening.sheets:
        lines += ["", f"## {sheet.title}", "", sheet.to_markdown()]
    for name, heading, _ in opening.figures:
        if name in pictures:
            link = os.path.relpath(pictures[name], base)
            lines += ["", f"![{escape_markdown(heading)}]({link})"]
    lines += [""] if opening.statements or opening.sheets else []
    for section in content.sections:
        lines += [f"## {escape_markdown(section.task.name)}", ""]
        if section.findings:
            lines += [*(f"- {escape_markdown(text)}" for text in section.findings), ""]
        for sheet in section.sheets:
            lines += [f"### {sheet.title}", "", sheet.to_markdown(), ""]
        for name, heading, _ in section.figures:
            if section.prefix + name in pictures:
                link = os.path.relpath(pictures[section.prefix + name], base)
                lines += [f"![{escape_markdown(heading)}]({link})", ""]
    for sheet in content.run_sheets:
        lines += [f"## {sheet.title}", "", sheet.to_markdown(), ""]
    return "\n".join(lines).rstrip() + "\n"


def list_problems(runs: Sequence[ReportRun]) -> Iterator[str]:
    for run in runs:
        if run.is_done and not run.missing:
            continue
        error = [str(run.result["error"])] if run.result.get("error") else []
        text = "; ".join([*error, *run.missing])
        yield f"- **{escape_markdown(run.name)}** {run.status}: {escape_markdown(text)}"
