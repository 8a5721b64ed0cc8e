"""Writes a report in all requested formats."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from paceline.errors import UsageError
from paceline.report.document import make_content
from paceline.report.html import render_report, write_text
from paceline.report.markdown import render_markdown
from paceline.report.run_loader import load_runs

KINDS = (".html", ".htm", ".md")


def write_report_files(
    folders: Sequence[Path],
    outs: Sequence[Path],
    *,
    title: str,
    target: float | None = None,
    published: bool = False,
    figures: Path | None = None,
    tables: Path | None = None,
) -> list[Path]:
    """Writes the requested formats and returns their paths; raises UsageError as `write_report`."""
    for out in outs:
        if out.suffix not in KINDS:
            raise UsageError(f"-o {out}: the file name must end in .html or .md")
    if figures is not None:
        from paceline.report.figures import require_matplotlib

        require_matplotlib()
    content = make_content(load_runs(folders), title=title, target=target, published=published)
    pictures: dict[str, Path] = {}
    written: list[Path] = []
    if figures is not None:
        from paceline.report.figures import write_figures

        make_folder(figures)
        write_figures(content.figures, figures)
        pictures = {name: figures / f"{name}.svg" for name in content.figures}
    for out in outs:
        if out.suffix == ".md":
            text = render_markdown(content, pictures, out.parent)
        else:
            text = render_report(content)
        written.append(write_text(out, text))
    if tables is not None:
        make_folder(tables)
        for name, sheet in content.sheets.items():
            write_text(tables / f"{name}.csv", sheet.to_csv())
            write_text(tables / f"{name}.tex", sheet.to_latex())
    return [*written, *(folder for folder in (figures, tables) if folder is not None)]


def make_folder(path: Path) -> None:
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(
            f"{path} cannot be created ({error.strerror}); choose another directory"
        ) from None
