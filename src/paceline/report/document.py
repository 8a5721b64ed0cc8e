"""Content of a report, independent of its format: findings, tables and figures per task."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from paceline.report import charts
from paceline.report.charts import Figure
from paceline.report.findings import list_findings
from paceline.report.machines import draw_machines
from paceline.report.published_results import (
    draw_published,
    make_published_tables,
    sentences_on_published,
)
from paceline.report.runs import ReportRun, RunGroup, split_tasks
from paceline.report.study_tables import (
    list_tables,
    make_run_table,
    make_stage_table,
    make_switch_table,
    make_version_table,
)
from paceline.report.tables import ReportTable

CURVES = {
    "val_acc": "Validation accuracy",
    "train_loss": "Training loss",
    "train_acc": "Training accuracy",
    "val_loss": "Validation loss",
}
"""Metrics drawn over epochs and over seconds."""


@dataclass(frozen=True, kw_only=True)
class ReportSection:
    """One task: runs that can be compared."""

    prefix: str
    """Prefix of its file names, if a report has several sections."""
    task: RunGroup
    findings: list[str]
    sheets: list[ReportTable]
    figures: list[tuple[str, str, Figure]]
    """Name, heading, figure."""


@dataclass(frozen=True, kw_only=True)
class ReportOpening:
    """The part of a report before its sections: statements, tables and figures over all runs."""

    statements: list[str] = field(default_factory=list)
    sheets: list[ReportTable] = field(default_factory=list)
    figures: list[tuple[str, str, Figure]] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class ReportDocument:
    title: str
    runs: list[ReportRun]
    facts: str
    sections: list[ReportSection]
    opening: ReportOpening = field(default_factory=ReportOpening)

    @property
    def figures(self) -> dict[str, Figure]:
        """By the name of their files."""
        first = {name: figure for name, _, figure in self.opening.figures}
        of_sections = {
            s.prefix + name: figure for s in self.sections for name, _, figure in s.figures
        }
        return {**first, **of_sections}

    @property
    def sheets(self) -> dict[str, ReportTable]:
        """By the name of their files."""
        of_sections = {s.prefix + sheet.name: sheet for s in self.sections for sheet in s.sheets}
        others = (*self.opening.sheets, *self.run_sheets)
        return {**of_sections, **{sheet.name: sheet for sheet in others}}

    @property
    def run_sheets(self) -> list[ReportTable]:
        """Tables over the runs of all sections; only those with rows."""
        tables = (make_switch_table, make_stage_table, make_run_table, make_version_table)
        return [sheet for table in tables if (sheet := table(self.runs)).rows]


MakeOpening = Callable[[Sequence[RunGroup]], ReportOpening]


def make_content(
    runs: Sequence[ReportRun],
    *,
    title: str,
    target: float | None = None,
    published: bool = False,
    make_opening: MakeOpening | None = None,
) -> ReportDocument:
    tasks = split_tasks(runs)
    sections = []
    for task in tasks:
        sheets, findings = list_tables(task, target), list_findings(task, target=target)
        if published:
            sheets += [sheet.without_empty_columns() for sheet in make_published_tables(task)]
            findings += sentences_on_published(task)
        sections.append(
            ReportSection(
                prefix=f"{make_file_name(task.name)}-" if len(tasks) > 1 else "",
                task=task,
                findings=findings,
                sheets=sheets,
                figures=list_figures(task, published=published),
            )
        )
    return ReportDocument(
        title=title,
        runs=list(runs),
        facts=summarize_runs(runs),
        sections=sections,
        opening=make_opening(tasks) if make_opening is not None else ReportOpening(),
    )


def summarize_runs(runs: Sequence[ReportRun]) -> str:
    facts = []
    for name in ("model", "data", "epochs"):
        kinds = list(dict.fromkeys(str(r.result[name]) for r in runs if r.result.get(name)))
        if kinds:
            facts.append(f"{name} {', '.join(kinds)}")
    facts.append(f"{len(runs)} run" + ("s" if len(runs) != 1 else ""))
    return " · ".join(facts)


def list_figures(task: RunGroup, *, published: bool) -> list[tuple[str, str, Figure]]:
    found: list[tuple[str, str, Figure | None]] = []
    for measure, word in CURVES.items():
        for against in ("epochs", "seconds"):
            figure = charts.draw_curves(task.runs, measure, against=against)
            name = f"{measure.replace('_', '-')}-{against}"
            found.append((name, f"{word} by {against}", figure))
    found.append(("frontier", "Accuracy vs. time", charts.draw_frontier(task)))
    if published:
        found.append(("published", "Training accuracy and published results", draw_published(task)))
    found += draw_machines(task)
    for number, (label, n, figure) in enumerate(charts.draw_phases(task.runs)):
        heading = f"{label} (mean of {n} runs)" if n > 1 else label
        found.append((f"phases-{number + 1}", heading, figure))
    found.append(("staleness", "Gradient staleness (updates)", charts.draw_staleness(task.runs)))
    return [(name, heading, figure) for name, heading, figure in found if figure is not None]


def make_file_name(text: str) -> str:
    return "".join(c if c.isalnum() else "-" for c in text.lower()).strip("-").replace("--", "-")
