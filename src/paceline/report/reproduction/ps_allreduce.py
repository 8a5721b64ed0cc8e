"""The study of parameter servers on nine machines: accuracy, seconds and resources by batch."""

from collections.abc import Sequence
from typing import Any

from paceline.report.machine_series import METRICS
from paceline.report.published_results import MODELS, average_curve, find_curve
from paceline.report.reproduction.matching import (
    PublishedSettings,
    Reproduced,
    describe_mismatch,
    group_workloads,
    mean_seconds,
    study_facts,
)
from paceline.report.reproduction.switch import measure_cluster
from paceline.report.stats import difference_or_none, ratio_or_none
from paceline.report.tables import Column, ReportTable, make_table

STUDY = "ps_vs_allreduce_mlp"
WORKERS = {"ps_async": 6, "allreduce": 9}
MONITORED = {
    "CPU busy, %": ("cpu_percent", "cpu_percent"),
    "memory used, GB": ("memory_gb", "memory_gb"),
    "network in, MB/s": ("network_in_m", "network_in"),
}
"""Our metrics; the published ranges and their means, which are printed twice."""


def find_result(row: Reproduced) -> Any:
    wanted = (row.workload, row.arm, row.batch)
    for found in study_facts(STUDY)["results"]:
        if (found["dataset"], found["strategy"], found["batch"]) == wanted:
            return found
    return {}


def make_tables(rows: Sequence[Reproduced]) -> list[ReportTable]:
    found = []
    for workload, members in group_workloads(rows).items():
        found += [make_result_table(workload, members), make_curve_table(workload, members)]
    found.append(make_resource_table(rows))
    return [table for table in found if table.rows]


def make_result_table(workload: str, rows: Sequence[Reproduced]) -> ReportTable:
    records = []
    epochs = study_facts(STUDY)["epochs"]
    for row in rows:
        theirs = find_result(row)
        base = next((r for r in rows if r.batch == row.batch and r.arm == "allreduce"), None)
        published = find_result(base).get("seconds") if base else None
        curve = find_curve(workload, row.arm, row.batch)
        accuracy, last = theirs.get("test_acc"), min(1.0, curve[-1]) if curve else None
        settings = PublishedSettings(
            *(workload, epochs, WORKERS[row.arm], row.batch),
            batch_is_per_worker=True,
            models=MODELS[workload],
        )
        ours = row.mean("test_acc")
        records.append(
            {
                Column("batch", "count"): row.batch,
                Column("strategy"): row.label,
                Column("test accuracy, published", "fraction"): accuracy,
                Column("test accuracy, here", "fraction"): ours,
                Column("training minus test, published", "points"): difference_or_none(
                    last, accuracy
                ),
                Column("training minus test, here", "points"): difference_or_none(
                    row.mean("train_acc"), ours
                ),
                Column("seconds, published", "seconds"): theirs.get("seconds"),
                Column("seconds, here", "seconds"): row.mean("seconds"),
                Column("over all-reduce, published", "ratio"): ratio_or_none(
                    theirs.get("seconds"), published
                ),
                Column("over all-reduce, here", "ratio"): ratio_or_none(
                    row.mean("seconds"), mean_seconds(base)
                ),
                Column("updates, here", "count"): row.mean("updates"),
                Column("differs in"): describe_mismatch(row, settings),
            }
        )
    return make_table(
        f"published-{workload}",
        f"{workload}: published and here",
        records,
        "One published run per cell. Six machines trained under the parameter server and nine "
        "under all-reduce, probably with the batch per worker, so that all-reduce made about nine "
        "times fewer updates. The published times of all-reduce on Fashion-MNIST are not "
        "plausible: the same network took 146 and 75 s on KMNIST.",
    ).without_empty_columns()


def make_curve_table(workload: str, rows: Sequence[Reproduced]) -> ReportTable:
    """Lists the accuracy by epoch; a published value above 1 is shown as printed."""
    curves: dict[str, list[float]] = {}
    impossible = False
    for row in rows:
        printed = find_curve(workload, row.arm, row.batch)
        impossible = impossible or any(value > 1 for value in printed)
        curves[f"{row.arm} {row.batch}, published"] = printed
        curves[f"{row.arm} {row.batch}, here"] = average_curve(row.runs)
    records = [
        {
            Column("epoch", "count"): epoch + 1,
            **{
                Column(name, "fraction"): values[epoch] if epoch < len(values) else None
                for name, values in curves.items()
            },
        }
        for epoch in range(max(map(len, curves.values()), default=0))
    ]
    note = "Published: the accuracy at the end of the epoch, of training as far as is known."
    if impossible:
        note += " A value above 100% is an error of the source, shown as printed."
    return make_table(
        f"published-{workload}-epochs", f"{workload}: accuracy by epoch", records, note
    ).without_empty_columns()


def make_resource_table(rows: Sequence[Reproduced]) -> ReportTable:
    by_title = {metric.title: metric for metric in METRICS}
    ranges = {
        (r["dataset"], r["strategy"], r["batch"]): r for r in study_facts(STUDY)["resource_ranges"]
    }
    records = []
    for row in rows:
        theirs = ranges.get((row.workload, row.arm, row.batch), {})
        for title, (key, _) in MONITORED.items():
            ours = measure_cluster(by_title[title], row)
            printed = theirs.get(key, {})
            records.append(
                {
                    Column("data"): row.workload,
                    Column("batch", "count"): row.batch,
                    Column("strategy"): row.label,
                    Column("metric"): title,
                    **{
                        Column(f"{n}, published", "count"): printed.get(n)
                        for n in ("min", "mean", "max")
                    },
                    **{
                        Column(f"{n}, here", "count"): ours[n] if ours else None
                        for n in ("min", "mean", "max")
                    },
                }
            )
    return make_table(
        "published-resources",
        "CPU, memory and network: published and here",
        records,
        "Published: a cluster of nine machines; the unit of network is printed as M, probably "
        "MB/s. Here: all machines together during training. Processes of one machine exchange data "
        "through memory, which is not network.",
    ).without_empty_columns()
