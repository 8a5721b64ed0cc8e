"""Tables of a report for one task: accuracy, time, resources, model parts and significance."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

from paceline.report import number_format
from paceline.report.comparison import StrategyEntry, spread_of
from paceline.report.run_groups import RunGroup
from paceline.report.run_loader import ReportRun
from paceline.report.stats import SIGNIFICANCE_LEVEL, Spread, as_finite, mean_and_std, welch_test
from paceline.report.summary_table import describe_workers
from paceline.report.tables import KINDS, Column, ReportTable, metric_column
from paceline.report.time_to_accuracy import choose_target_accuracy, time_to_accuracy_rows
from paceline.telemetry.metrics import RESOURCES, View, metrics_in
from paceline.telemetry.numbers import as_mapping
from paceline.telemetry.schema import ProcessResources


def list_tables(task: RunGroup, target: float | None = None) -> list[ReportTable]:
    """Returns the tables of one task that have rows."""
    found = [
        make_accuracy_table(task),
        make_time_table(task),
        make_time_to_accuracy_table(task, target),
        make_resource_table(task),
        make_model_parts_table(task),
        make_significance_table(task),
    ]
    return [sheet.without_empty_columns() for sheet in found if sheet is not None and sheet.rows]


def metric_cells(entry: StrategyEntry, view: View) -> list[Spread | float | None]:
    """Returns the cells of the metrics in a view, for the columns of `metric_column`."""
    spreads = [(metric, spread_of(entry, metric.key)) for metric in metrics_in(view)]
    return [spread if metric.spread else spread["mean"] for metric, spread in spreads]


def make_accuracy_table(task: RunGroup) -> ReportTable:
    return ReportTable(
        name="accuracy",
        title="Accuracy and loss",
        columns=(
            Column(title="strategy"),
            Column(title="runs", kind="number"),
            *map(metric_column, metrics_in(View.ACCURACY)),
        ),
        rows=[
            [entry["label"], entry["runs_done"], *metric_cells(entry, View.ACCURACY)]
            for entry in task.entries
        ],
        note="Mean ± standard deviation over the seeds of finished runs. Training metrics are "
        "those of the last epoch, measured during training.",
    )


def make_time_table(task: RunGroup) -> ReportTable:
    several = len(task.entries) > 1
    rows = [
        [
            entry["label"],
            describe_workers(entry),
            entry["seconds_over_first_strategy_seconds"] if several else None,
            entry["seconds_minus_first_strategy_seconds"] if several and number else None,
            *metric_cells(entry, View.TIME),
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
            Column(title="time vs. first", kind="ratio"),
            Column(title="difference to first", kind="signed_seconds"),
            *map(metric_column, metrics_in(View.TIME)),
        ),
        rows=rows,
        note=f"The first strategy is {first}. A ratio below 1 is faster." if several else "",
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
            if row.seconds["mean"] is not None and base is not None and row is not first
            else None,
            row.samples,
            row.updates,
        ]
        for row in found
    ]
    why = "" if target is not None else ", the highest multiple of 0.5% that every run reached"
    return ReportTable(
        name="target",
        title=f"Time to a validation accuracy of {number_format.format_percent(chosen, 1)}",
        columns=(
            Column(title="strategy"),
            Column(title="runs that reached it"),
            Column(title="seconds", kind="seconds_spread"),
            Column(title="time vs. first", kind="ratio"),
            Column(title="difference to first", kind="signed_seconds"),
            Column(title="samples", kind="number_spread"),
            Column(title="updates", kind="number_spread"),
        ),
        rows=rows,
        note=f"From the start of the run to the end of the first epoch that reached it{why}. "
        f"The first strategy is {first.label}; a ratio below 1 is faster.",
    )


ROLES = {"worker": "workers", "server": "servers", "run": "coordinator"}


def make_resource_table(task: RunGroup) -> ReportTable:
    rows: list[list[object]] = []
    for entry in task.entries:
        runs = [run for run in task.runs_of(entry) if run.is_done]
        for role, word in ROLES.items():
            used = list_resources(runs, role)
            if used:
                cells = [mean_and_std(m.value(u) for u in used)[m.aggregate] for m in RESOURCES]
                rows.append([entry["label"], word, *cells])
    return ReportTable(
        name="resources",
        title="CPU, memory and network by role",
        columns=(
            Column(title="strategy"),
            Column(title="role"),
            *(Column(title=metric.title, kind=KINDS[metric.unit]) for metric in RESOURCES),
        ),
        rows=rows,
        note="Per process of the role: means over processes and runs; peaks are the busiest second "
        "of any process. Intervals below 0.5 s count only for means, so the peak rates of a short "
        "run can be below its means.",
    )


def make_model_parts_table(task: RunGroup) -> ReportTable:
    """Lists the part of a split model on each worker, and how long its stage waited."""
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
            Column(title="expected", kind="share"),
        ),
        rows=rows,
        note="Fraction of a stage's steps spent waiting for micro-batches, and the value expected "
        "for equal stages: (stages - 1) / (micro-batches + stages - 1).",
    )


def list_resources(runs: Sequence[ReportRun], role: str) -> list[ProcessResources]:
    """Returns the resource usage of all processes of a role."""
    found = []
    for run in runs:
        for who, used in as_mapping(run.result.get("resources")).items():
            if who.partition("-")[0] == role:
                found.append(cast(ProcessResources, as_mapping(used)))
    return found


SIGNIFICANCE = {
    True: "significant",
    False: "not significant",
    None: "unknown (needs two seeds each)",
}


def make_significance_table(task: RunGroup) -> ReportTable:
    """Tests the difference of every strategy to the first."""
    rows: list[list[object]] = []
    first, rest = task.entries[0], task.entries[1:]
    for measure, word in (("test_acc", "test accuracy"), ("seconds", "seconds")):
        for entry in rest:
            a, b = spread_of(entry, measure), spread_of(first, measure)
            if a["mean"] is None or b["mean"] is None:
                continue
            difference, p_value, significant = welch_test(a, b, comparisons=len(rest))
            amount = (
                f"{100 * difference:+.2f} points"
                if measure == "test_acc"
                else Column(title="", kind="signed_seconds").show(difference)
            )
            rows.append(
                [
                    word,
                    entry["label"],
                    amount,
                    min(a["n"], b["n"]),
                    p_value,
                    SIGNIFICANCE[significant],
                ]
            )
    return ReportTable(
        name="claims",
        title=f"Significance of the difference to {first['label']}",
        columns=(
            Column(title="metric"),
            Column(title="strategy"),
            Column(title="difference"),
            Column(title="seeds", kind="number"),
            Column(title="p-value", kind="p_value"),
            Column(title="result"),
        ),
        rows=rows,
        note="P-values of Welch's t test, multiplied by the number of strategies compared "
        f"({max(1, len(rest))}); a difference is significant below {SIGNIFICANCE_LEVEL}.",
    )
