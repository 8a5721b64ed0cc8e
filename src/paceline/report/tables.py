"""Tables of a report as data, and as Markdown, CSV and LaTeX."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from paceline.report import number_format
from paceline.report.number_format import NOTHING


@dataclass(frozen=True)
class Column:
    title: str
    kind: str = "text"
    """A key of `FORMATS`; kinds that end in `_spread` take a `Spread`."""

    @property
    def is_spread(self) -> bool:
        return self.kind.endswith("_spread")

    def show(self, value: Any) -> str:
        return NOTHING if value is None else FORMATS[self.kind](value)


FORMATS: dict[str, Callable[[Any], str]] = {
    "text": str,
    "numeral": str,  # Aligned as a number: "2 + 1 ps".
    "points": lambda x: f"{100 * x:+.2f} points",
    "signed_seconds": lambda x: ("+" if x >= 0 else "−") + number_format.format_seconds(abs(x)),  # noqa: RUF001
    "ratio": lambda x: f"× {x:.2f}",  # noqa: RUF001
    "p_value": lambda p: f"{p:.3f}" if p >= 0.001 else "< 0.001",
    # By the unit of a metric.
    "count": number_format.format_number,
    "fraction": number_format.format_percent,
    "seconds": number_format.format_seconds,
    "bytes": number_format.format_bytes,
    "loss": number_format.format_loss,
    "count_spread": partial(number_format.format_spread, number_format.format_number),
    "fraction_spread": number_format.format_accuracy_spread,
    "seconds_spread": number_format.format_seconds_spread,
    "bytes_spread": partial(number_format.format_spread, number_format.format_bytes),
    "loss_spread": number_format.format_loss_spread,
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
        shown = list(zip(*self.formatted_rows(), strict=True))
        used = [i for i, cells in enumerate(shown) if any(cell != NOTHING for cell in cells)]
        return replace(
            self,
            columns=tuple(self.columns[i] for i in used),
            rows=[[row[i] for i in used] for row in self.rows],
        )

    @property
    def headers(self) -> list[str]:
        return [column.title for column in self.columns]

    def align(self, left: str, right: str) -> list[str]:
        """Returns a mark per column: text is aligned left, numbers right."""
        return [left if column.kind == "text" else right for column in self.columns]

    def formatted_rows(self) -> list[list[str]]:
        return [
            [column.show(cell) for column, cell in zip(self.columns, row, strict=True)]
            for row in self.rows
        ]

    def to_markdown(self) -> str:
        cells = [[escape_markdown(cell) for cell in row] for row in self.formatted_rows()]
        table = (self.headers, self.align(":---", "---:"), *cells)
        lines = ["| " + " | ".join(line) + " |" for line in table]
        return "\n".join(lines) + (f"\n\n{self.note}" if self.note else "")

    def to_csv(self) -> str:
        """Returns CSV with plain numbers; a spread becomes three columns."""
        parts = ("mean", "std", "n")
        heads: list[str] = []
        for column in self.columns:
            heads += [f"{column.title} {p}" for p in parts] if column.is_spread else [column.title]
        out = io.StringIO()
        writer = csv.writer(out, lineterminator="\n")
        writer.writerow(heads)
        for row in self.rows:
            line: list[Any] = []
            for column, cell in zip(self.columns, row, strict=True):
                if column.is_spread:
                    line += [(cell or {}).get(part) for part in parts]
                else:
                    line.append(escape_spreadsheet_formula(cell))
            writer.writerow(line)
        return out.getvalue()

    def to_latex(self) -> str:
        rows = [" & ".join(map(escape_latex, row)) + " \\\\" for row in self.formatted_rows()]
        lines = [
            "% requires \\usepackage{booktabs}",
            "\\begin{table}",
            "\\centering",
            f"\\caption{{{escape_latex(self.title)}}}",
            f"\\begin{{tabular}}{{{''.join(self.align('l', 'r'))}}}",
            "\\toprule",
            " & ".join(map(escape_latex, self.headers)) + " \\\\",
            "\\midrule",
            *rows,
            "\\bottomrule",
            "\\end{tabular}",
            "\\end{table}",
        ]
        return "\n".join(lines) + "\n"


def make_table(
    name: str, title: str, records: Sequence[Mapping[Column, Any]], note: str = ""
) -> ReportTable:
    """Returns a table with one row per record; the records have the same columns."""
    columns = tuple(records[0]) if records else ()
    rows = [list(record.values()) for record in records]
    return ReportTable(name=name, title=title, columns=columns, rows=rows, note=note)


def escape_spreadsheet_formula(cell: Any) -> Any:
    """Quotes text that a spreadsheet would evaluate as a formula."""
    return f"'{cell}" if isinstance(cell, str) and cell.startswith(tuple("=+-@")) else cell


def escape_markdown(cell: str) -> str:
    for mark in "\\|*_`<[]":
        cell = cell.replace(mark, "\\" + mark)
    return number_format.to_single_line(cell)


LATEX: dict[str, str | int | None] = {
    "\\": r"\textbackslash{}", "&": r"\&", "%": r"\%", "$": r"\$", "#": r"\#", "_": r"\_",
    "{": r"\{", "}": r"\}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}",
    "±": r"$\pm$", "×": r"$\times$", "−": r"$-$", "–": "--", "→": r"$\to$",  # noqa: RUF001
}  # fmt: skip


def escape_latex(text: str) -> str:
    return number_format.to_single_line(text).translate(str.maketrans(LATEX))
