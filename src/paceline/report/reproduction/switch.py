"""The study of switches: two networks, five arms, and the monitor's plots of two of them."""

from collections.abc import Sequence
from typing import Any

from paceline.report.machine_series import METRICS, MachineMetric
from paceline.report.machines import CLUSTER, summarize
from paceline.report.published_results import MODELS
from paceline.report.reproduction.matching import (
    PublishedSettings,
    Reproduced,
    describe_mismatch,
    find_arm,
    group_workloads,
    mean_seconds,
    study_facts,
)
from paceline.report.stats import Spread, ratio_or_none
from paceline.report.tables import Column, ReportTable, make_table

STUDY = "strategy_switch_cpu_cluster"
MEASURES = {
    "train_acc": "fraction",
    "val_acc": "fraction",
    "train_loss": "loss",
    "val_loss": "loss",
}
TITLES = {
    "train_acc": "training accuracy",
    "val_acc": "validation accuracy",
    "train_loss": "training loss",
    "val_loss": "validation loss",
}
MONITORED = {
    "CPU user, %": ("cpu_percent", "user"),
    "CPU system, %": ("cpu_percent", "system"),
    "network in, MB/s": ("network_in_mb_s",),
    "network out, MB/s": ("network_out_mb_s",),
    "memory used, GB": ("memory_use_gb",),
    "memory cached, GB": ("memory_cache_gb",),
}
"""Our metrics, and the path of the published ones."""


def interpolate_seconds(arm: str, allreduce: float | None, ps: float | None) -> float | None:
    """Returns ps + share x (allreduce - ps) for a switch: a baseline without any model."""
    kind, _, percent = arm.partition("_")
    if kind != "switch" or allreduce is None or ps is None:
        return None
    return ps + int(percent) / 100 * (allreduce - ps)


def make_tables(rows: Sequence[Reproduced]) -> list[ReportTable]:
    found = []
    for workload, members in group_workloads(rows).items():
        facts = study_facts(STUDY)["workloads"][workload]
        found += [
            make_result_table(workload, members, facts),
            make_monitor_table(workload, members, facts),
        ]
    return [table for table in found if table.rows]


def make_result_table(workload: str, rows: Sequence[Reproduced], facts: Any) -> ReportTable:
    results = facts["results"]
    first, last = find_arm(rows, "allreduce"), find_arm(rows, "ps_async")
    settings = PublishedSettings(
        facts["dataset"], facts["epochs"], 5, facts["global_batch"], models=MODELS[workload]
    )
    records = []
    for row in rows:
        theirs = results[row.arm]
        cells: dict[Column, object] = {Column("strategy"): row.label}
        for key, kind in MEASURES.items():
            cells[Column(f"{TITLES[key]}, published", kind)] = theirs[key]
            cells[Column(f"{TITLES[key]}, here", kind)] = row.mean(key)
        ours, base = row.mean("seconds"), mean_seconds(first)
        train, train_base = row.stage("train"), first.stage("train") if first is not None else None
        line = interpolate_seconds(
            row.arm, results["allreduce"]["seconds"], results["ps_async"]["seconds"]
        )
        our_line = interpolate_seconds(row.arm, base, mean_seconds(last))
        cells |= {
            Column("seconds, published", "seconds"): theirs["seconds"],
            Column("seconds, here", "seconds"): ours,
            Column("over all-reduce, published", "ratio"): ratio_or_none(
                theirs["seconds"], results["allreduce"]["seconds"]
            ),
            Column("over all-reduce, here", "ratio"): ratio_or_none(ours, base),
            Column("training only, here", "ratio"): ratio_or_none(train, train_base),
            Column("straight line, published", "seconds"): line,
            Column("straight line, here", "seconds"): our_line,
            Column("differs in"): describe_mismatch(row, settings),
        }
        records.append(cells)
    return make_table(
        f"published-{workload}",
        f"{facts['model'].partition(',')[0]} on {facts['dataset']}: published and here",
        records,
        "Straight line: ps + share x (all-reduce - ps), which needs no simulation and no model. "
        "Published losses of all-reduce and ps cannot be compared: probably only one of them "
        "includes the L2 term. One published run each, on five machines.",
    ).without_empty_columns()


def make_monitor_table(workload: str, rows: Sequence[Reproduced], facts: Any) -> ReportTable:
    """Compares minimum, mean and maximum of the cluster with the published plots."""
    records = []
    by_title = {metric.title: metric for metric in METRICS}
    for arm, monitor in facts["monitor"].items():
        row = find_arm(rows, arm)
        for title, path in MONITORED.items():
            theirs = monitor
            for key in path:
                theirs = theirs[key]
            ours = measure_cluster(by_title[title], row) if row is not None else None
            records.append(
                {
                    Column("strategy"): row.label if row is not None else arm,
                    Column("metric"): title,
                    **{
                        Column(f"{n}, published", "count"): theirs[n]
                        for n in ("min", "mean", "max")
                    },
                    **{
                        Column(f"{n}, here", "count"): ours[n] if ours else None
                        for n in ("min", "mean", "max")
                    },
                }
            )
    return make_table(
        f"published-{workload}-monitor",
        f"Cluster monitor, {facts['dataset']}: published and here",
        records,
        "Published: a cluster of five machines over a window that includes rest. Here: during "
        "training, all machines together. Absolute values of other machines do not compare.",
    ).without_empty_columns()


def measure_cluster(metric: MachineMetric, row: Reproduced) -> Spread | None:
    """Returns the spread of all machines, or of the only one."""
    found = summarize(metric, row.runs)
    return found.get(CLUSTER) or next(iter(found.values()), None)
