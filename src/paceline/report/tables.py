"""The tables of a report as data: written as HTML, Markdown, CSV and LaTeX from the same cells."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from paceline.report import number_format
from paceline.report.comparison import as_mapping
from paceline.report.run_groups import RunGroup
from paceline.report.run_loader import ReportRun
from paceline.report.stats import as_finite, mean_and_std, welch_test
from paceline.report.summary_table import describe_workers, escape_markdown
from paceline.report.time_to_accuracy import choose_target_accuracy, time_to_accuracy_rows


@dataclass(frozen=True, kw_only=True)
class Column:
    title: str
    kind: str = "text"
    """text, number, share, seconds, bytes, ratio; and of spreads: share_spread, seconds_spread,
    number_spread, loss_spread."""

    def show(self, value: Any) -> str:
        if value is None:
            return number_format.NOTHING
        text: str = SHOW[self.kind](value)
        return text


def show_number_spread(spread: Any) -> str:
    if spread["mean"] is None:
        return number_format.NOTHING
    text = number_format.format_number(spread["mean"])
    return text if not spread["std"] else f"{text} ± {number_format.format_number(spread['std'])}"


def show_loss_spread(spread: Any) -> str:
    if spread["mean"] is None:
        return number_format.NOTHING
    text = f"{spread['mean']:.4f}"
    return text if spread["std"] is None else f"{text} ± {spread['std']:.4f}"


SHOW: dict[str, Any] = {
    "text": str,
    "number": number_format.format_number,
    "share": number_format.format_percent,
    "points": lambda x: f"{100 * x:+.2f} points",
    "seconds": number_format.format_seconds,
    "signed_seconds": lambda x: ("+" if x >= 0 else "−") + number_format.format_seconds(abs(x)),  # noqa: RUF001
    "bytes": number_format.format_bytes,
    "ratio": number_format.format_ratio,
    "chance": lambda p: f"{p:.3f}" if p >= 0.001 else "< 0.001",
    "share_spread": number_format.format_accuracy_spread,
    "seconds_spread": number_format.format_seconds_spread,
    "number_spread": show_number_spread,
    "loss_spread": show_loss_spread,
}


@dataclass(frozen=True, kw_only=True)
class ReportTable:
    """A table: raw cells in `rows`, a way to show each column."""

    name: str
    """Of the files it is written to."""
    title: str
    columns: tuple[Column, ...]
    rows: list[list[Any]]
    note: str = ""

    def without_empty_columns(self) -> ReportTable:
        """Without the columns that say nothing."""
        used = [
            i for i, column in enumerate(self.columns)
            if any(column.show(row[i]) != number_format.NOTHING for row in self.rows)
        ]  # fmt: skip
        return ReportTable(
            name=self.name,
            title=self.title,
            columns=tuple(self.columns[i] for i in used),
            rows=[[row[i] for i in used] for row in self.rows],
            note=self.note,
        )

    @property
    def headers(self) -> list[str]:
        return [column.title for column in self.columns]

    @property
    def words(self) -> list[str]:
        return [column.title for column in self.columns if column.kind == "text"]

    def formatted_rows(self) -> list[list[str]]:
        return [
            [column.show(cell) for column, cell in zip(self.columns, row, strict=True)]
            for row in self.rows
        ]

    def to_markdown(self) -> str:
        marks = [":---" if column.kind == "text" else "---:" for column in self.columns]
        cells = [[escape_markdown(cell) for cell in row] for row in self.formatted_rows()]
        lines = ["| " + " | ".join(line) + " |" for line in (self.headers, marks, *cells)]
        return "\n".join(lines) + (f"\n\n{self.note}" if self.note else "")

    def to_csv(self) -> str:
        """Plain numbers; a spread becomes three columns."""
        out = io.StringIO()
        writer = csv.writer(out, lineterminator="\n")
        heads: list[str] = []
        for column in self.columns:
            if column.kind.endswith("_spread"):
                heads += [f"{column.title} {part}" for part in ("mean", "std", "n")]
            else:
                heads.append(column.title)
        writer.writerow(heads)
        for row in self.rows:
            line: list[Any] = []
            for column, cell in zip(self.columns, row, strict=True):
                if column.kind.endswith("_spread"):
                    spread = cell or {}
                    line += [spread.get("mean"), spread.get("std"), spread.get("n")]
                else:
                    line.append(escape_spreadsheet_formula(cell))
            writer.writerow(line)
        return out.getvalue()

    def to_latex(self) -> str:
        form = "".join("l" if column.kind == "text" else "r" for column in self.columns)
        lines = [
            "% needs \\usepackage{booktabs}",
            "\\begin{table}",
            "\\centering",
            f"\\caption{{{escape_latex(self.title)}}}",
            f"\\begin{{tabular}}{{{form}}}",
            "\\toprule",
            " & ".join(map(escape_latex, self.headers)) + " \\\\",
            "\\midrule",
            *(" & ".join(map(escape_latex, row)) + " \\\\" for row in self.formatted_rows()),
            "\\bottomrule",
            "\\end{tabular}",
            "\\end{table}",
        ]
        return "\n".join(lines) + "\n"


def escape_spreadsheet_formula(cell: Any) -> Any:
    """A text that a spreadsheet would take for a formula is made a text."""
    return f"'{cell}" if isinstance(cell, str) and cell[:1] in "=+-@" and cell else cell


LATEX = {
    "\\": r"\textbackslash{}", "&": r"\&", "%": r"\%", "$": r"\$", "#": r"\#", "_": r"\_",
    "{": r"\{", "}": r"\}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}",
    "±": r"$\pm$", "×": r"$\times$", "−": r"$-$", "–": "--", "→": r"$\to$",  # noqa: RUF001
}  # fmt: skip


def escape_latex(text: str) -> str:
    return "".join(LATEX.get(c, c) for c in number_format.to_single_line(text))


def list_tables(task: RunGroup, target: float | None = None) -> list[ReportTable]:
    """The studies' tables of one task, those with something in them."""
    found = [
        make_accuracy_table(task),
        make_time_table(task),
        make_time_to_accuracy_table(task, target),
        make_resource_table(task),
        make_model_parts_table(task),
        make_significance_table(task),
    ]
    return [sheet.without_empty_columns() for sheet in found if sheet is not None and sheet.rows]


def make_accuracy_table(task: RunGroup) -> ReportTable:
    measures = ("train_acc", "val_acc", "test_acc", "train_loss", "val_loss", "test_loss")
    rows = [
        [entry["label"], entry["runs_done"], *(entry[measure] for measure in measures)]
        for entry in task.entries
    ]
    accuracy, loss = "share_spread", "loss_spread"
    return ReportTable(
        name="accuracy",
        title="Accuracy and loss",
        columns=(
            Column(title="strategy"),
            Column(title="runs", kind="number"),
            Column(title="train acc", kind=accuracy),
            Column(title="val acc", kind=accuracy),
            Column(title="test acc", kind=accuracy),
            Column(title="train loss", kind=loss),
            Column(title="val loss", kind=loss),
            Column(title="test loss", kind=loss),
        ),
        rows=rows,
        note="Mean ± standard deviation over seeds of the runs that are done. Training figures are "
        "those of the last epoch, measured while training on it.",
    )


def make_time_table(task: RunGroup) -> ReportTable:
    several = len(task.entries) > 1
    rows = [
        [
            entry["label"],
            describe_workers(entry),
            entry["seconds"],
            entry["seconds_over_first_strategy_seconds"] if several else None,
            entry["seconds_minus_first_strategy_seconds"] if several and number else None,
            entry["samples"],
            entry["updates"],
            entry["samples_per_s"],
            entry["staleness_mean"],
            entry["switch_pause_s"]["mean"],
        ]
        for number, entry in enumerate(task.entries)
    ]
    first = task.comparison["first_strategy"]
    return ReportTable(
        name="time",
        title="Time and work",
        columns=(
            Column(title="strategy"),
            Column(title="workers"),
            Column(title="seconds", kind="seconds_spread"),
            Column(title="seconds over the first's", kind="ratio"),
            Column(title="seconds minus the first's", kind="signed_seconds"),
            Column(title="samples", kind="number_spread"),
            Column(title="updates", kind="number_spread"),
            Column(title="samples/s", kind="number_spread"),
            Column(title="mean staleness", kind="number_spread"),
            Column(title="switch pause", kind="seconds"),
        ),
        rows=rows,
        note=f"The first is {first}. A ratio below 1 is faster." if several else "",
    )


def make_time_to_accuracy_table(task: RunGroup, target: float | None) -> ReportTable | None:
    chosen = choose_target_accuracy(task) if target is None else target
    if chosen is None:
        return None
    found = time_to_accuracy_rows(task, chosen)
    if not any(row.reached for row in found):
        return None
    first = next((row for row in found if row.seconds["mean"] is not None), found[0])
    base = first.seconds["mean"]
    rows = [
        [
            row.label,
            f"{row.reached} of {row.runs}",
            row.seconds,
            row.seconds["mean"] / base if row.seconds["mean"] is not None and base else None,
            row.seconds["mean"] - base
            if row.seconds["mean"] is not None and row is not first
            else None,
            row.samples,
            row.updates,
        ]
        for row in found
    ]
    why = "" if target is not None else ", the highest half percent that every run reached"
    return ReportTable(
        name="target",
        title=f"Time to a validation accuracy of {number_format.format_percent(chosen, 1)}",
        columns=(
            Column(title="strategy"),
            Column(title="runs that reached it"),
            Column(title="seconds", kind="seconds_spread"),
            Column(title="over the first's", kind="ratio"),
            Column(title="minus the first's", kind="signed_seconds"),
            Column(title="samples", kind="number_spread"),
            Column(title="updates", kind="number_spread"),
        ),
        rows=rows,
        note=f"From the start of the run to the end of the first epoch with it{why}. "
        f"The first is {first.label}; a ratio below 1 is faster.",
    )


ROLES = {"worker": "workers", "server": "servers", "run": "coordinator"}


def make_resource_table(task: RunGroup) -> ReportTable:
    rows = []
    for entry in task.entries:
        runs = [run for run in task.runs_of(entry) if run.is_done]
        for role, word in ROLES.items():
            used = list_resources(runs, role)
            if not used:
                continue
            seconds = [as_finite(u.get("seconds")) or 0.0 for u in used]
            rates = {
                name: [
                    (as_finite(u.get(name)) or 0.0) / s
                    for u, s in zip(used, seconds, strict=True)
                    if s > 0
                ]
                for name in ("net_in", "net_out")
            }

            def most(name: str, used: list[Any] = used) -> float | None:
                known = [as_finite(u.get(name)) for u in used]
                return max((x for x in known if x is not None), default=None)

            rows.append(
                [
                    entry["label"],
                    word,
                    mean_and_std(u.get("cpu_mean") for u in used)["mean"],
                    most("cpu_peak"),
                    mean_and_std(u.get("rss_mean") for u in used)["mean"],
                    most("rss_peak"),
                    mean_and_std(rates["net_in"])["mean"],
                    most("net_in_peak"),
                    mean_and_std(rates["net_out"])["mean"],
                    most("net_out_peak"),
                ]
            )
    return ReportTable(
        name="resources",
        title="Processor, memory and network by role",
        columns=(
            Column(title="strategy"),
            Column(title="role"),
            Column(title="cores, mean", kind="number"),
            Column(title="cores, peak", kind="number"),
            Column(title="memory, mean", kind="bytes"),
            Column(title="memory, peak", kind="bytes"),
            Column(title="in a second, mean", kind="bytes"),
            Column(title="in, peak", kind="bytes"),
            Column(title="out a second, mean", kind="bytes"),
            Column(title="out, peak", kind="bytes"),
        ),
        rows=rows,
        note="Of one process of the role: means over processes and runs, peaks the busiest second "
        "of any.",
    )


def make_model_parts_table(task: RunGroup) -> ReportTable:
    """What each worker held of a model that was split, and how long its stages waited."""
    rows = []
    for entry in task.entries:
        runs = [run for run in task.runs_of(entry) if run.is_done]
        for worker in sorted({w for run in runs for w in as_mapping(run.result.get("parts"))}):
            parts = [as_mapping(as_mapping(run.result.get("parts")).get(worker)) for run in runs]
            stage, cut = parts[0].get("stage", parts[0].get("part")), parts[0].get("cut")
            rows.append(
                [
                    entry["label"],
                    worker.replace("-", " "),
                    stage,
                    ", ".join(map(str, cut)) if cut else None,
                    mean_and_std(p.get("weight_bytes") for p in parts)["mean"],
                    mean_and_std(p.get("bubble") for p in parts)["mean"],
                    as_finite(parts[0].get("bubble_formula")),
                ]
            )
    return ReportTable(
        name="parts",
        title="Parts of the model",
        columns=(
            Column(title="strategy"),
            Column(title="worker"),
            Column(title="stage or part", kind="number"),
            Column(title="cut before"),
            Column(title="weights", kind="bytes"),
            Column(title="waited", kind="share"),
            Column(title="by the formula", kind="share"),
        ),
        rows=rows,
        note="A stage's share of its steps in which it waited for micro-batches, beside what equal "
        "stages wait: (stages - 1) / (micro-batches + stages - 1).",
    )


def list_resources(runs: Sequence[ReportRun], role: str) -> list[Any]:
    found = []
    for run in runs:
        for who, used in as_mapping(run.result.get("resources")).items():
            if who.partition("-")[0] == role:
                found.append(as_mapping(used))
    return found


CLAIMS = {
    True: "the seeds allow the claim",
    False: "within the spread of the seeds",
    None: "one seed on a side: cannot be told",
}


def make_significance_table(task: RunGroup) -> ReportTable:
    """Every strategy against the first: do the seeds allow to say that they differ?"""
    rows = []
    first, rest = task.entries[0], task.entries[1:]
    for measure, word in (("test_acc", "test accuracy"), ("seconds", "seconds")):
        for entry in rest:
            a, b = entry[measure], first[measure]
            if a["mean"] is None or b["mean"] is None:
                continue
            difference, chance, sure = welch_test(a, b, comparisons=len(rest))
            amount = (
                f"{100 * difference:+.2f} points"
                if measure == "test_acc"
                else Column(title="", kind="signed_seconds").show(difference)
            )
            rows.append([word, entry["label"], amount, min(a["n"], b["n"]), chance, CLAIMS[sure]])
    return ReportTable(
        name="claims",
        title=f"What the seeds allow to say against {first['label']}",
        columns=(
            Column(title="measure"),
            Column(title="strategy"),
            Column(title="difference"),
            Column(title="seeds", kind="number"),
            Column(title="chance", kind="chance"),
            Column(title="verdict"),
        ),
        rows=rows,
        note="Chance: how often seeds alone would give a difference this large (Welch's t test), "
        f"times the number of strategies compared ({max(1, len(rest))}); below 0.05 it is claimed.",
    )
