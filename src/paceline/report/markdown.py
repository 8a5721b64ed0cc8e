"""The report as Markdown: the same tables and findings, with figures in separate files."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from paceline.report.document import ReportDocument
from paceline.report.run_loader import UNFINISHED, ReportRun
from paceline.report.summary_table import escape_markdown


def render_markdown(content: ReportDocument, pictures: dict[str, Path], base: Path) -> str:
    """`pictures`: files by the name of their figure; linked relative to `base`."""
    lines = [f"# {escape_markdown(content.title)}", "", content.facts, ""]
    lines += list_problems(content.runs)
    for section in content.sections:
        lines += [f"## {escape_markdown(section.title)}", ""]
        if section.findings:
            lines += [*(f"- {escape_markdown(text)}" for text in section.findings), ""]
        for sheet in section.sheets:
            lines += [f"### {sheet.title}", "", sheet.to_markdown(), ""]
        for name, heading, _ in section.figures:
            if section.prefix + name in pictures:
                link = os.path.relpath(pictures[section.prefix + name], base)
                lines += [f"![{escape_markdown(heading)}]({link})", ""]
    return "\n".join(lines).rstrip() + "\n"


def list_problems(runs: Sequence[ReportRun]) -> list[str]:
    lines = []
    for run in runs:
        if run.is_done and not run.missing:
            continue
        word = "unfinished" if run.status == UNFINISHED else run.status
        parts = [str(run.result["error"])] if run.result.get("error") else []
        text = "; ".join([*parts, *run.missing])
        lines.append(f"- **{escape_markdown(run.name)}** {word}: {escape_markdown(text)}")
    return ["Incomplete:", "", *lines, ""] if lines else []
