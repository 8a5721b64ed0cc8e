"""The table of strategies: in the terminal, as Markdown, and as rows for the HTML report."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from paceline.report import number_format
from paceline.report.comparison import compare_results

Comparable = Mapping[str, Any] | Sequence[Mapping[str, Any]]
"""A comparison, as `compare_results` gives it, or the results themselves."""

COLUMNS = (
    "strategy",
    "workers",
    "runs",
    "test acc",
    "val acc",
    "seconds",
    "vs first",
    "samples/s",
    "updates",
    "mean staleness",
    "bytes of uncoded",
    "switch pause",
)
LEFT_COLUMNS = 1
"""How many columns hold words, set to the left; the others hold numbers."""

DISPENSABLE = ("updates", "val acc", "samples/s", "runs", "workers", "mean staleness")
"""What a narrow terminal does without, least important first."""
STRATEGY_WIDTH = 16
"""Below this a strategy's name is folded beyond recognition."""
GAP_WIDTH = 2


def results_table(comparison_or_results: Comparable, *, width: int | None = None) -> Table:
    """The table for a terminal `width` columns wide (this one's, unless told).

    ± is the sample standard deviation over seeds. On a narrow terminal the columns that matter
    least are left out, and named under the table: better than numbers folded over four lines.
    """
    columns, rows = nonempty_columns(comparison_or_results)
    widths = [measure_column(name, [row[i] for row in rows]) for i, name in enumerate(columns)]
    widest = width or Console().width
    left_out = choose_hidden_columns(columns, widths, widest)
    kept = [i for i, name in enumerate(columns) if name not in left_out]
    notes = [describe_table(comparison_or_results)]
    if left_out:
        notes.append(f"Left out for want of width: {', '.join(left_out)}.")
    table = Table(
        caption=" ".join(filter(None, notes)),
        caption_justify="left",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        pad_edge=False,
    )
    for i in kept:
        if i < LEFT_COLUMNS:
            table.add_column(columns[i], overflow="fold")
        else:
            table.add_column(columns[i], justify="right", width=widths[i])
    for row in rows:
        # Text, not str: a strategy's brackets are not console markup.
        table.add_row(*(Text(number_format.to_single_line(row[i])) for i in kept))
    return table


def measure_column(name: str, cells: Sequence[str]) -> int:
    """Characters a column needs: its cells whole, its heading broken between words."""
    return max(map(len, [*name.split(), *cells]))


def choose_hidden_columns(columns: Sequence[str], widths: Sequence[int], widest: int) -> list[str]:
    """The columns to leave out, least important first, until the rest fits."""
    needed = dict(zip(columns, widths, strict=True))
    needed["strategy"] = min(needed["strategy"], STRATEGY_WIDTH)
    left_out: list[str] = []
    for name in DISPENSABLE:
        if sum(needed.values()) + GAP_WIDTH * (len(needed) + 1) <= widest:
            break
        if needed.pop(name, None) is not None:
            left_out.append(name)
    return left_out


def as_markdown(comparison_or_results: Comparable) -> str:
    columns, rows = nonempty_columns(comparison_or_results)
    aligned = [":---" if i < LEFT_COLUMNS else "---:" for i in range(len(columns))]
    lines = [columns, aligned, *([escape_markdown(cell) for cell in row] for row in rows)]
    text = "\n".join("| " + " | ".join(line) + " |" for line in lines)
    return f"{text}\n\n{describe_table(comparison_or_results)}\n"


def nonempty_columns(comparison_or_results: Comparable) -> tuple[list[str], list[list[str]]]:
    """Columns and rows without the columns that say nothing: empty, or one against itself."""
    rows = make_rows(comparison_or_results)
    used = [
        i
        for i, name in enumerate(COLUMNS)
        if any(row[i] != number_format.NOTHING for row in rows)
        and (name != "vs first" or len(rows) > 1)
    ]
    return [COLUMNS[i] for i in used], [[row[i] for i in used] for row in rows]


def make_rows(comparison_or_results: Comparable) -> list[list[str]]:
    """One row a strategy, one text a column."""
    comparison = as_comparison(comparison_or_results)
    return [make_row(entry) for entry in comparison["strategies"]]


def make_row(entry: Mapping[str, Any]) -> list[str]:
    label = entry["label"]
    if entry["virtual"] and "virtual" not in label:
        label += " (virtual)"
    return [
        label,
        describe_workers(entry),
        format_run_counts(entry),
        number_format.format_accuracy_spread(entry["test_acc"]),
        number_format.format_accuracy_spread(entry["val_acc"]),
        number_format.format_seconds_spread(entry["seconds"]),
        number_format.format_ratio(entry["seconds_over_first_strategy_seconds"]),
        number_format.format_number(entry["samples_per_s"]["mean"]),
        number_format.format_number(entry["updates"]["mean"]),
        number_format.format_number(entry["staleness_mean"]["mean"]),
        number_format.format_percent(entry["bytes_over_uncoded"]["mean"]),
        number_format.format_seconds(entry["switch_pause_s"]["mean"]),
    ]


def as_comparison(comparison_or_results: Comparable) -> Mapping[str, Any]:
    if isinstance(comparison_or_results, Mapping):
        return comparison_or_results
    return compare_results(comparison_or_results)


def describe_table(comparison_or_results: Comparable) -> str:
    """What the figures mean, and what they leave out."""
    comparison = as_comparison(comparison_or_results)
    entries = comparison["strategies"]
    parts = []
    if any(entry["seconds"]["std"] is not None for entry in entries):
        parts.append("± is the standard deviation over seeds.")
    if len(entries) > 1:
        parts.append("vs first: seconds divided by those of the first strategy, below 1 is faster.")
    if any(entry["virtual"] for entry in entries):
        parts.append("Virtual: simulated time, not measured.")
    if comparison["runs_failed"]:
        parts.append(
            f"{comparison['runs_failed']} of {comparison['runs_total']} runs did not finish "
            "and are not in the means."
        )
    return " ".join(parts)


def describe_workers(entry: Mapping[str, Any]) -> str:
    if entry["workers"] is None:
        return number_format.NOTHING
    servers = entry["servers"]
    return f"{entry['workers']} + {servers} ps" if servers else str(entry["workers"])


def format_run_counts(entry: Mapping[str, Any]) -> str:
    if entry["runs_failed"]:
        return f"{entry['runs_done']} of {entry['runs_total']}"
    return str(entry["runs_done"])


def escape_markdown(cell: str) -> str:
    for mark in "\\|*_`<[]":
        cell = cell.replace(mark, "\\" + mark)
    return number_format.to_single_line(cell)
