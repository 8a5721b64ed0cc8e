"""The summary table of strategies, for the terminal, Markdown and HTML."""

from __future__ import annotations

from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from paceline.report import number_format
from paceline.report.comparison import (
    Comparison,
    StrategyEntry,
    compare_results,
    spread_of,
)
from paceline.telemetry.metrics import ALWAYS_SHOWN, View, metrics_in
from paceline.telemetry.schema import RunResult

Comparable = Comparison | Sequence[RunResult]
"""A comparison as `compare_results` returns it, or the results themselves."""

STRATEGY, WORKERS, RUNS, RATIO = "strategy", "workers", "runs", "time vs. first"
LEFT_COLUMNS = 1
"""Number of text columns, aligned left; the others hold numbers."""
PRIORITIES = {STRATEGY: ALWAYS_SHOWN, WORKERS: 50, RUNS: 40, RATIO: ALWAYS_SHOWN}
"""Priorities of the columns that are not metrics; see `Metric.priority`."""
STRATEGY_WIDTH = 16
"""The strategy column is not made narrower than this."""
GAP_WIDTH = 2


def results_table(comparison_or_results: Comparable, *, width: int | None = None) -> Table:
    """Returns the table for a terminal that is `width` columns wide; by default the current one.

    ± is the sample standard deviation over seeds. If the terminal is too narrow, the columns with
    the lowest priority are hidden and listed below the table.
    """
    columns, rows = nonempty_columns(comparison_or_results)
    widths = [measure_column(name, [row[i] for row in rows]) for i, name in enumerate(columns)]
    hidden = choose_hidden_columns(columns, widths, width or Console().width)
    kept = [i for i, name in enumerate(columns) if name not in hidden]
    notes = [describe_table(comparison_or_results)]
    if hidden:
        notes.append(f"Hidden columns (terminal too narrow): {', '.join(hidden)}.")
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
        # Text, not str: brackets in a strategy are not console markup.
        table.add_row(*(Text(number_format.to_single_line(row[i])) for i in kept))
    return table


def measure_column(name: str, cells: Sequence[str]) -> int:
    """Returns the width of a column: its cells unbroken, its heading wrapped between words."""
    return max(map(len, [*name.split(), *cells]))


def choose_hidden_columns(columns: Sequence[str], widths: Sequence[int], widest: int) -> list[str]:
    """Returns the columns to hide, lowest priority first, until the rest fits."""
    needed = dict(zip(columns, widths, strict=True))
    needed[STRATEGY] = min(needed[STRATEGY], STRATEGY_WIDTH)
    priorities = {**PRIORITIES, **{m.title: m.priority for m in metrics_in(View.SUMMARY)}}
    hidden: list[str] = []
    for name in sorted(columns, key=priorities.__getitem__):
        fits = sum(needed.values()) + GAP_WIDTH * (len(needed) + 1) <= widest
        if fits or priorities[name] >= ALWAYS_SHOWN:
            break
        del needed[name]
        hidden.append(name)
    return hidden


def as_markdown(comparison_or_results: Comparable) -> str:
    columns, rows = nonempty_columns(comparison_or_results)
    aligned = [":---" if i < LEFT_COLUMNS else "---:" for i in range(len(columns))]
    lines = [columns, aligned, *([escape_markdown(cell) for cell in row] for row in rows)]
    text = "\n".join("| " + " | ".join(line) + " |" for line in lines)
    return f"{text}\n\n{describe_table(comparison_or_results)}\n"


def nonempty_columns(comparison_or_results: Comparable) -> tuple[list[str], list[list[str]]]:
    """Returns column titles and rows, without columns that are empty or compare with themselves."""
    entries = as_comparison(comparison_or_results)["strategies"]
    cells = [make_cells(entry) for entry in entries]
    used = [
        name
        for name in (cells[0] if cells else {})
        if any(row[name] != number_format.NOTHING for row in cells)
        and (name != RATIO or len(cells) > 1)
    ]
    return used, [[row[name] for name in used] for row in cells]


def make_cells(entry: StrategyEntry) -> dict[str, str]:
    """Returns the text of each column of one strategy, in order."""
    label = entry["label"]
    if entry["virtual"] and "virtual" not in label:
        label += " (virtual)"
    cells = {STRATEGY: label, WORKERS: describe_workers(entry), RUNS: format_run_counts(entry)}
    for metric in metrics_in(View.SUMMARY):
        spread = spread_of(entry, metric.key)
        if metric.spread_in_summary:
            cells[metric.title] = number_format.SPREAD_FORMATS[metric.unit](spread)
        else:
            cells[metric.title] = number_format.format_metric(metric, spread["mean"])
        if metric.key == "seconds":
            ratio = entry["seconds_over_first_strategy_seconds"]
            cells[RATIO] = number_format.format_ratio(ratio)
    return cells


def as_comparison(comparison_or_results: Comparable) -> Comparison:
    if isinstance(comparison_or_results, dict):
        return comparison_or_results
    return compare_results(comparison_or_results)


def describe_table(comparison_or_results: Comparable) -> str:
    """Returns the caption: how to read the numbers, and which runs are not included."""
    comparison = as_comparison(comparison_or_results)
    entries = comparison["strategies"]
    parts = []
    if any(entry["seconds"]["std"] is not None for entry in entries):
        parts.append("± is the standard deviation over seeds.")
    if len(entries) > 1:
        parts.append("time vs. first: below 1 is faster than the first strategy.")
    if any(entry["virtual"] for entry in entries):
        parts.append("Virtual: simulated time, not measured.")
    if comparison["runs_failed"]:
        parts.append(
            f"{comparison['runs_failed']} of {comparison['runs_total']} runs did not finish "
            "and are not included in the means."
        )
    return " ".join(parts)


def describe_workers(entry: StrategyEntry) -> str:
    if entry["workers"] is None:
        return number_format.NOTHING
    servers = entry["servers"]
    return f"{entry['workers']} + {servers} ps" if servers else str(entry["workers"])


def format_run_counts(entry: StrategyEntry) -> str:
    if entry["runs_failed"]:
        return f"{entry['runs_done']} of {entry['runs_total']}"
    return str(entry["runs_done"])


def escape_markdown(cell: str) -> str:
    for mark in "\\|*_`<[]":
        cell = cell.replace(mark, "\\" + mark)
    return number_format.to_single_line(cell)
