"""Tables of a report: of one task, and of all runs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

from paceline.report import number_format
from paceline.report.comparison import StrategyEntry, spread_of
from paceline.report.run_groups import (
    RunGroup,
    choose_target_accuracy,
    finished_or_all,
    group_by_label,
    time_to_accuracy_rows,
)
from paceline.report.run_loader import ReportRun
from paceline.report.stats import (
    SIGNIFICANCE_LEVEL,
    difference_or_none,
    mean_and_std,
    ratio_or_none,
    welch_test,
)
from paceline.report.summary_table import describe_workers, metric_cell
from paceline.report.tables import Column, ReportTable, make_table
from paceline.telemetry.metrics import RESOURCES, View, metrics_in
from paceline.telemetry.schema import ProcessResources, as_finite, as_mapping

Record = dict[Column, Any]
"""A row of a table: its cells by column."""

STRATEGY = Column("strategy")
RATIO = Column("time vs. first", "ratio")
DIFFERENCE = Column("difference to first", "signed_seconds")
ROLES = {"worker": "workers", "server": "servers", "run": "coordinator"}
STAGES = ("start", "read", "prepare", "train", "evaluate", "save")
SIGNIFICANCE = {
    True: "significant",
    False: "not significant",
    None: "unknown (needs two seeds each)",
}


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


def metric_cells(entry: StrategyEntry, view: View) -> Record:
    cells: Record = {}
    for metric in metrics_in(view):
        cells |= metric_cell(metric, spread_of(entry, metric.key), metric.spread)
    return cells


def make_accuracy_table(task: RunGroup) -> ReportTable:
    records = [
        {STRATEGY: entry["label"], Column("runs", "count"): entry["runs_done"]}
        | metric_cells(entry, View.ACCURACY)
        for entry in task.entries
    ]
    note = (
        "Mean ± standard deviation over the seeds of finished runs. Training metrics are those of "
        "the last epoch, measured during training."
    )
    return make_table("accuracy", "Accuracy and loss", records, note)


def make_time_table(task: RunGroup) -> ReportTable:
    several = len(task.entries) > 1
    records: list[Record] = [
        {
            STRATEGY: entry["label"],
            Column("workers"): describe_workers(entry),
            RATIO: entry["seconds_over_first_strategy_seconds"] if several else None,
            DIFFERENCE: entry["seconds_minus_first_strategy_seconds"] if number else None,
            **metric_cells(entry, View.TIME),
        }
        for number, entry in enumerate(task.entries)
    ]
    first = task.comparison["first_strategy"]
    note = f"The first strategy is {first}. A ratio below 1 is faster." if several else ""
    return make_table("time", "Time and work", records, note)


def make_time_to_accuracy_table(task: RunGroup, target: float | None) -> ReportTable | None:
    chosen = choose_target_accuracy(task) if target is None else target
    if chosen is None:
        return None
    found = time_to_accuracy_rows(task, chosen)
    if not any(row.reached for row in found):
        return None
    first = next((row for row in found if row.seconds["mean"] is not None), found[0])
    base = first.seconds["mean"]
    records: list[Record] = [
        {
            STRATEGY: row.label,
            Column("runs that reached it"): f"{row.reached} of {row.runs}",
            Column("seconds", "seconds_spread"): row.seconds,
            RATIO: ratio_or_none(row.seconds["mean"], base),
            DIFFERENCE: None if row is first else difference_or_none(row.seconds["mean"], base),
            Column("samples", "count_spread"): row.samples,
            Column("updates", "count_spread"): row.updates,
        }
        for row in found
    ]
    why = "" if target is not None else ", the highest multiple of 0.5% that every run reached"
    return make_table(
        "target",
        f"Time to a validation accuracy of {number_format.format_percent(chosen, 1)}",
        records,
        f"From the start of the run to the end of the first epoch that reached it{why}. "
        f"The first strategy is {first.label}; a ratio below 1 is faster.",
    )


def make_resource_table(task: RunGroup) -> ReportTable:
    records: list[Record] = []
    for entry in task.entries:
        for role, word in ROLES.items():
            used = list_resources(task.done_runs_of(entry), role)
            if used:
                cells = {
                    Column(m.title, m.unit.value): mean_and_std(map(m.value, used))[m.aggregate]
                    for m in RESOURCES
                }
                records.append({STRATEGY: entry["label"], Column("role"): word, **cells})
    return make_table(
        "resources",
        "CPU, memory and network by role",
        records,
        "Per process of the role: means over processes and runs; peaks are the busiest second "
        "of any process. Intervals below 0.5 s count only for means, so the peak rates of a short "
        "run can be below its means.",
    )


def list_resources(runs: Sequence[ReportRun], role: str) -> list[ProcessResources]:
    """Returns the resource usage of all processes of a role."""
    return [
        cast(ProcessResources, as_mapping(used))
        for run in runs
        for who, used in as_mapping(run.result.get("resources")).items()
        if who.partition("-")[0] == role
    ]


def make_model_parts_table(task: RunGroup) -> ReportTable:
    """Lists the part of a split model on each worker, and how long its stage waited."""
    records: list[Record] = []
    for entry in task.entries:
        of_runs = [as_mapping(run.result.get("parts")) for run in task.done_runs_of(entry)]
        for worker in sorted({worker for parts in of_runs for worker in parts}):
            parts = [as_mapping(each.get(worker)) for each in of_runs]
            cut = parts[0].get("cut")
            weights, waited = (
                mean_and_std(p.get(name) for p in parts)["mean"]
                for name in ("weight_bytes", "bubble")
            )
            records.append(
                {
                    STRATEGY: entry["label"],
                    Column("worker"): worker.replace("-", " "),
                    Column("stage or part", "count"): parts[0].get("stage", parts[0].get("part")),
                    Column("cut before"): ", ".join(map(str, cut)) if cut else None,
                    Column("weights", "bytes"): weights,
                    Column("waited", "fraction"): waited,
                    Column("expected", "fraction"): as_finite(parts[0].get("bubble_formula")),
                }
            )
    return make_table(
        "parts",
        "Parts of the model",
        records,
        "Fraction of a stage's steps spent waiting for micro-batches, and the value expected "
        "for equal stages: (stages - 1) / (micro-batches + stages - 1).",
    )


def make_significance_table(task: RunGroup) -> ReportTable:
    """Tests the difference of every strategy to the first."""
    first, rest = task.entries[0], task.entries[1:]
    kinds = {"test_acc": ("test accuracy", "points"), "seconds": ("seconds", "signed_seconds")}
    records: list[Record] = []
    for measure, (word, kind) in kinds.items():
        for entry in rest:
            a, b = spread_of(entry, measure), spread_of(first, measure)
            if a["mean"] is None or b["mean"] is None:
                continue
            difference, p_value, significant = welch_test(a, b, comparisons=len(rest))
            records.append(
                {
                    Column("metric"): word,
                    STRATEGY: entry["label"],
                    Column("difference"): Column("", kind).show(difference),
                    Column("seeds", "count"): min(a["n"], b["n"]),
                    Column("p-value", "p_value"): p_value,
                    Column("result"): SIGNIFICANCE[significant],
                }
            )
    return make_table(
        "claims",
        f"Significance of the difference to {first['label']}",
        records,
        "P-values of Welch's t test, multiplied by the number of strategies compared "
        f"({max(1, len(rest))}); a difference is significant below {SIGNIFICANCE_LEVEL}.",
    )


def make_switch_table(runs: Sequence[ReportRun]) -> ReportTable:
    records: list[Record] = []
    for run in runs:
        for switch in run.switches:
            epoch, at_s = run.locate_switch(switch)
            records.append(
                {
                    Column("run"): run.name,
                    Column("samples", "count"): as_finite(switch.get("samples")),
                    Column("epoch", "numeral"): f"{epoch:.2f}",
                    Column("at", "seconds"): at_s,
                    Column("from"): switch.get("from"),
                    Column("to"): switch.get("to"),
                    Column("pause", "seconds"): as_finite(switch.get("pause_s")),
                    Column("drain", "seconds"): as_finite(switch.get("drain_s")),
                    Column("reason"): switch.get("reason") or None,
                }
            )
    return make_table("switches", "Switches", records)


def make_stage_table(runs: Sequence[ReportRun]) -> ReportTable:
    """Lists the mean seconds per stage and strategy."""
    records: list[Record] = []
    for label, group in group_by_label(runs).items():
        chosen = finished_or_all(group)
        stages = [as_mapping(run.result.get("stages")) for run in chosen]
        if any(stages):
            means = {name: mean_and_std(s.get(name) for s in stages)["mean"] for name in STAGES}
            means["total"] = mean_and_std(run.result.get("seconds") for run in chosen)["mean"]
            cells = {Column(name, "seconds"): mean for name, mean in means.items()}
            records.append({STRATEGY: label, **cells})
    note = "Mean over finished runs, or over all runs if none finished."
    return make_table("stages", "Stages", records, note)


def make_run_table(runs: Sequence[ReportRun]) -> ReportTable:
    records: list[Record] = [
        {
            Column("run"): run.name,
            STRATEGY: run.label,
            Column("seed", "numeral"): run.result.get("seed"),
            Column("status"): run.status + (", virtual" if run.result.get("virtual") else ""),
            **{Column(m.title, m.unit.value): m.value(run.result) for m in metrics_in(View.RUNS)},
        }
        for run in runs
    ]
    return make_table("runs", "Runs", records)


def make_version_table(runs: Sequence[ReportRun]) -> ReportTable:
    versions = [
        as_mapping(run.result.get("versions")) or as_mapping(run.config.get("versions"))
        for run in runs
    ]
    records: list[Record] = []
    for name in dict.fromkeys(name for found in versions for name in found):
        kinds = dict.fromkeys(str(found[name]) for found in versions if name in found)
        records.append({Column("name"): name, Column("version"): ", ".join(kinds)})
    return make_table("versions", "Configuration and versions", records)
