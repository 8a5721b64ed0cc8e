"""Tables of a report as data, written as HTML, Markdown, CSV and LaTeX."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from paceline.report import number_format
from paceline.report.summary_table import escape_markdown
from paceline.telemetry.metrics import Metric, Unit

KINDS = {
    Unit.SECONDS: "seconds",
    Unit.BYTES: "bytes",
    Unit.FRACTION: "share",
    Unit.COUNT: "number",
    Unit.LOSS: "loss",
}
"""Column kinds by unit."""


@dataclass(frozen=True, kw_only=True)
class Column:
    title: str
    kind: str = "text"
    """A key of `FORMATS`; kinds that end in `_spread` take a `Spread`."""

    def show(self, value: Any) -> str:
        if value is None:
            return number_format.NOTHING
        return FORMATS[self.kind](value)


FORMATS: dict[str, Callable[[Any], str]] = {
    "text": str,
    "number": number_format.format_number,
    "share": number_format.format_percent,
    "points": lambda x: f"{100 * x:+.2f} points",
    "seconds": number_format.format_seconds,
    "signed_seconds": lambda x: ("+" if x >= 0 else "−") + number_format.format_seconds(abs(x)),  # noqa: RUF001
    "bytes": number_format.format_bytes,
    "ratio": number_format.format_ratio,
    "p_value": lambda p: f"{p:.3f}" if p >= 0.001 else "< 0.001",
    "share_spread": number_format.format_accuracy_spread,
    "seconds_spread": number_format.format_seconds_spread,
    "number_spread": number_format.format_number_spread,
    "loss": number_format.format_loss,
    "loss_spread": number_format.format_loss_spread,
    "bytes_spread": number_format.format_bytes_spread,
}


@dataclass(frozen=True, kw_only=True)
class ReportTable:
    """A table of raw cells, and the format of each column."""

    name: str
    """Base name of its files."""
    title: str
    columns: tuple[Column, ...]
    rows: list[list[Any]]
    note: str = ""

    def without_empty_columns(self) -> ReportTable:
        """Returns the table without columns that have no values."""
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
        """Returns CSV with plain numbers; a spread becomes three columns."""
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
            "% requires \\usepackage{booktabs}",
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
    """Quotes text that a spreadsheet would evaluate as a formula."""
    return f"'{cell}" if isinstance(cell, str) and cell[:1] in "=+-@" and cell else cell


LATEX = {
    "\\": r"\textbackslash{}", "&": r"\&", "%": r"\%", "$": r"\$", "#": r"\#", "_": r"\_",
    "{": r"\{", "}": r"\}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}",
    "±": r"$\pm$", "×": r"$\times$", "−": r"$-$", "–": "--", "→": r"$\to$",  # noqa: RUF001
}  # fmt: skip


def escape_latex(text: str) -> str:
    return "".join(LATEX.get(c, c) for c in number_format.to_single_line(text))


def metric_column(metric: Metric) -> Column:
    """Returns the column of a metric; its cells are spreads if the metric has `spread`."""
    kind = KINDS[metric.unit]
    return Column(title=metric.title, kind=f"{kind}_spread" if metric.spread else kind)
