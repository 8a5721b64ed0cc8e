"""The summary table of strategies: the same columns in the terminal and in reports."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from paceline.report import number_format
from paceline.report.comparison import Comparison, StrategyEntry, spread_of
from paceline.report.stats import Spread
from paceline.report.tables import Column, ReportTable, make_table
from paceline.telemetry.metrics import ALWAYS_SHOWN, Metric, View, metrics_in

STRATEGY, WORKERS, RUNS, RATIO = "strategy", "workers", "runs", "time vs. first"
PRIORITIES = {STRATEGY: ALWAYS_SHOWN, WORKERS: 50, RUNS: 40, RATIO: ALWAYS_SHOWN}
"""Priorities of the columns that are not metrics; see `Metric.priority`."""
STRATEGY_WIDTH = 16
"""The strategy column is not made narrower than this."""
GAP_WIDTH = 2


def results_table(comparison: Comparison, *, width: int | None = None) -> Table:
    """Returns the table for a terminal that is `width` columns wide; by default the current one.

    ± is the sample standard deviation over seeds. If the terminal is too narrow, the columns with
    the lowest priority are hidden and listed below the table.
    """
    summary = make_summary_table(comparison)
    columns, rows = summary.headers, summary.formatted_rows()
    # The width of a column: its cells unbroken, its heading wrapped between words.
    widths = [
        max(map(len, [*name.split(), *(row[i] for row in rows)])) for i, name in enumerate(columns)
    ]
    hidden = choose_hidden_columns(columns, widths, width or Console().width)
    kept = [i for i, name in enumerate(columns) if name not in hidden]
    notes = [summary.note]
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
        if summary.columns[i].kind == "text":
            table.add_column(columns[i], overflow="fold")
        else:
            table.add_column(columns[i], justify="right", width=widths[i])
    for row in rows:
        # Text, not str: brackets in a strategy are not console markup.
        table.add_row(*(Text(number_format.to_single_line(row[i])) for i in kept))
    return table


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


def make_summary_table(comparison: Comparison) -> ReportTable:
    """Returns the table without columns that are empty or compare a strategy with itself."""
    entries = comparison["strategies"]
    records = [make_cells(entry, several=len(entries) > 1) for entry in entries]
    table = make_table("summary", "Summary", records, describe_table(comparison))
    return table.without_empty_columns()


def make_cells(entry: StrategyEntry, *, several: bool) -> dict[Column, Any]:
    label = entry["label"]
    if entry["virtual"] and "virtual" not in label:
        label += " (virtual)"
    done, failed = entry["runs_done"], entry["runs_failed"]
    cells: dict[Column, Any] = {
        Column(STRATEGY): label,
        Column(WORKERS, "numeral"): describe_workers(entry),
        Column(RUNS, "numeral"): f"{done} of {entry['runs_total']}" if failed else done,
    }
    for metric in metrics_in(View.SUMMARY):
        cells |= metric_cell(metric, spread_of(entry, metric.key), metric.spread_in_summary)
        if metric.key == "seconds":
            ratio = entry["seconds_over_first_strategy_seconds"]
            cells[Column(RATIO, "ratio")] = ratio if several else None
    return cells


def metric_cell(metric: Metric, spread: Spread, has_spread: bool) -> dict[Column, Any]:
    """Returns the column of a metric with its cell: mean and deviation, or only the mean."""
    if has_spread:
        return {Column(metric.title, f"{metric.unit.value}_spread"): spread}
    return {Column(metric.title, metric.unit.value): spread["mean"]}


def describe_table(comparison: Comparison) -> str:
    """Returns the caption: how to read the numbers, and which runs are not included."""
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
