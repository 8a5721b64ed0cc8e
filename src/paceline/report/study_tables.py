"""Tables of strategies and runs: the summary, also for the terminal, and those of a report."""

from collections.abc import Mapping, Sequence
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from paceline.report import number_format, stats
from paceline.report.comparison import Comparison, StrategyEntry, spread_of
from paceline.report.machines import make_machine_table
from paceline.report.runs import ReportRun, RunGroup, finished_or_all, group_by_label
from paceline.report.tables import Column, ReportTable, make_table
from paceline.report.terminal_text import fit_terminal
from paceline.telemetry.metrics import ALWAYS_SHOWN, RESOURCES, Metric, View, metrics_in
from paceline.telemetry.phase_clock import STAGES
from paceline.telemetry.schema import as_finite, as_mapping

Record = dict[Column, Any]
"""A row of a table: its cells by column."""

STRATEGY = Column("strategy")
RATIO = Column("time vs. first", "ratio")
TRAIN_RATIO = Column("train vs. first", "ratio")
DIFFERENCE = Column("difference to first", "signed_seconds")
WORKERS = Column("workers", "numeral")
RUNS = Column("runs", "numeral")
PRIORITIES = {STRATEGY: ALWAYS_SHOWN, WORKERS: 50, RUNS: 40, RATIO: ALWAYS_SHOWN, TRAIN_RATIO: 8}
"""Priorities of the columns that are not metrics; see `Metric.priority`."""
STRATEGY_WIDTH = 16
"""The strategy column is not made narrower than this."""
GAP_WIDTH = 2
ROLES = {"worker": "workers", "server": "servers", "run": "coordinator"}
SIGNIFICANCE = {
    True: "significant",
    False: "not significant",
    None: "unknown (needs two seeds each)",
}


def results_table(comparison: Comparison, *, width: int | None = None) -> Table:
    """Returns the table for a terminal that is `width` columns wide; by default the current one.

    ± is the sample standard deviation over seeds. If the terminal is too narrow, the columns with
    the lowest priority are hidden and listed below the table.
    """
    summary = make_summary_table(comparison)
    columns = [fit_terminal(name) for name in summary.headers]
    rows = [[fit_terminal(cell) for cell in row] for row in summary.formatted_rows()]
    # The width of a column: its cells unbroken, its heading wrapped between words.
    widths = [
        max(map(len, [*name.split(), *(row[i] for row in rows)])) for i, name in enumerate(columns)
    ]
    hidden = choose_hidden_columns(columns, widths, width or Console().width)
    kept = [i for i, name in enumerate(columns) if name not in hidden]
    notes = [summary.note]
    if hidden:
        listed = sorted(hidden, key=lambda name: name == fit_terminal(TRAIN_RATIO.title))
        notes.append(f"Hidden columns (terminal too narrow): {', '.join(listed)}.")
    table = Table(
        caption=fit_terminal(" ".join(filter(None, notes))),
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
    needed[STRATEGY.title] = min(needed[STRATEGY.title], STRATEGY_WIDTH)
    priorities = {column.title: priority for column, priority in PRIORITIES.items()}
    priorities |= {m.title: m.priority for m in metrics_in(View.SUMMARY)}
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


def make_cells(entry: StrategyEntry, *, several: bool) -> Record:
    label = entry["label"]
    if entry["virtual"] and "virtual" not in label:
        label += " (virtual)"
    done, failed = entry["runs_done"], entry["runs_failed"]
    cells: Record = {
        STRATEGY: label,
        WORKERS: describe_workers(entry),
        RUNS: f"{done} of {entry['runs_total']}" if failed else done,
    }
    for metric in metrics_in(View.SUMMARY):
        cells |= metric_cell(metric, spread_of(entry, metric.key), metric.spread_in_summary)
        if metric.key == "seconds":
            cells |= ratio_cells(entry, several=several)
    return cells


def ratio_cells(entry: StrategyEntry, *, several: bool) -> Record:
    """Returns the time as a ratio to the first strategy: of the whole run, and of training alone.

    Startup and evaluation of short runs hide differences of training.
    """
    if not several:
        return {RATIO: None, TRAIN_RATIO: None}
    return {
        RATIO: entry["seconds_over_first_strategy_seconds"],
        TRAIN_RATIO: entry["train_seconds_over_first_strategy_train_seconds"],
    }


def metric_cell(metric: Metric, spread: stats.Spread, has_spread: bool) -> Record:
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


def list_tables(task: RunGroup, target: float | None = None) -> list[ReportTable]:
    """Returns the tables of one task that have rows."""
    found = [
        make_accuracy_table(task),
        make_time_table(task),
        make_time_to_accuracy_table(task, target),
        make_resource_table(task),
        make_machine_table(task),
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
            **ratio_cells(entry, several=several),
            DIFFERENCE: entry["seconds_minus_first_strategy_seconds"] if number else None,
            **metric_cells(entry, View.TIME),
        }
        for number, entry in enumerate(task.entries)
    ]
    first = task.comparison["first_strategy"]
    note = ""
    if several:
        note = (
            f"The first strategy is {first}. A ratio below 1 is faster; train vs. first compares "
            "the training stages alone, without startup, evaluation and saving."
        )
    return make_table("time", "Time and work", records, note)


def make_time_to_accuracy_table(task: RunGroup, target: float | None) -> ReportTable | None:
    chosen = task.choose_target_accuracy() if target is None else target
    if chosen is None:
        return None
    found = task.time_to_accuracy(chosen)
    if not any(row.reached for row in found):
        return None
    first = next((row for row in found if row.seconds["mean"] is not None), found[0])
    base = first.seconds["mean"]
    records: list[Record] = [
        {
            STRATEGY: row.label,
            Column("runs that reached it"): f"{row.reached} of {row.runs}",
            Column("seconds", "seconds_spread"): row.seconds,
            RATIO: stats.ratio_or_none(row.seconds["mean"], base),
            DIFFERENCE: None
            if row is first
            else stats.difference_or_none(row.seconds["mean"], base),
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
                    Column(m.title, m.unit.value): stats.mean_and_std(map(m.value, used))[
                        m.aggregate
                    ]
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


def list_resources(runs: Sequence[ReportRun], role: str) -> list[Mapping[str, Any]]:
    return [
        as_mapping(used)
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
                stats.mean_and_std(p.get(name) for p in parts)["mean"]
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
            difference, p_value, significant = stats.welch_test(a, b, comparisons=len(rest))
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
        f"({max(1, len(rest))}); a difference is significant below {stats.SIGNIFICANCE_LEVEL}.",
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
            means = {
                name: stats.mean_and_std(s.get(name) for s in stages)["mean"] for name in STAGES
            }
            means["total"] = stats.mean_and_std(run.result.get("seconds") for run in chosen)["mean"]
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
