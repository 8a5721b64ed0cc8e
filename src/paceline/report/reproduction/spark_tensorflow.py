"""The study of Spark and TensorFlow: time, input, exchange and operators by batch."""

from collections.abc import Sequence
from typing import Any

from paceline.report.machine_series import METRICS
from paceline.report.reproduction.matching import (
    PublishedSettings,
    Reproduced,
    describe_mismatch,
    find_arm,
    group_workloads,
    study_facts,
)
from paceline.report.reproduction.operators import (
    exchange_seconds,
    input_seconds,
    our_operators,
    published_operators,
)
from paceline.report.reproduction.switch import measure_cluster
from paceline.report.stats import ratio_or_none
from paceline.report.tables import Column, ReportTable, make_table
from paceline.telemetry.schema import as_finite, as_mapping

STUDY = "spark_horovod_vs_tensorflow"
SYSTEMS = {"tensorflow": "TensorFlow", "spark": "Spark"}
MODELS = {"mnist": "cnn-keras", "cifar10": "resnet56v2"}
MONITORED = {"memory_gb": "memory used, GB", "cpu_percent": "CPU busy, %"}


def group_batches(rows: Sequence[Reproduced]) -> dict[int, list[Reproduced]]:
    groups: dict[int, list[Reproduced]] = {}
    for row in rows:
        groups.setdefault(row.batch, []).append(row)
    return groups


def make_tables(rows: Sequence[Reproduced]) -> list[ReportTable]:
    found = []
    for workload, members in group_workloads(rows).items():
        found += [
            make_time_table(workload, members),
            make_ratio_table(workload, members),
            make_operator_table(workload, members),
            make_resource_table(workload, members),
        ]
    return [table for table in found if table.rows]


def step_ms(row: Reproduced) -> float | None:
    """Returns milliseconds per step of the epochs without a profile, or else of all."""
    values = []
    for run in row.runs:
        settings = as_mapping(run.config.get("settings"))
        # TensorFlow, which is not profiled, traces its graph in the first epoch.
        default = "epoch=1" if "tensorflow" in as_mapping(run.result.get("versions")) else "epoch=0"
        profiled = str(settings.get("profile") or default).partition("=")[2].split("-")
        rows = [r for r in run.history if (as_finite(r.get("epoch")) or 0) > int(profiled[-1])]
        before = [r for r in run.history if r not in rows]
        if rows and before and row.entry["batch"]:
            seconds = as_finite(rows[-1].get("seconds")), as_finite(before[-1].get("seconds"))
            samples = as_finite(rows[-1].get("samples")), as_finite(before[-1].get("samples"))
            if None not in seconds and None not in samples:
                took, count = seconds[0] - seconds[1], samples[0] - samples[1]  # type: ignore[operator]
                values.append(1e3 * took * row.entry["batch"] / count if count else None)
    return row.average(values) or row.mean("step_ms")


def make_time_table(workload: str, rows: Sequence[Reproduced]) -> ReportTable:
    facts = study_facts(STUDY)
    read = facts["input_seconds"][workload]
    records = []
    for row in rows:
        settings = PublishedSettings(
            workload, facts["epochs"][workload], 3, row.batch, models=(MODELS[workload],)
        )
        records.append(
            {
                Column("batch, published", "count"): row.batch,
                Column("batch, here", "count"): row.entry["batch"],
                Column("arm"): row.label,
                Column("seconds, published"): "not legible",
                Column("seconds, here", "seconds"): row.mean("seconds"),
                Column("ms/step, here", "count"): step_ms(row),
                Column("read and transform, published", "seconds"): read.get(row.arm),
                Column("read, here", "seconds"): row.stage("read"),
                Column("evaluate, here", "seconds"): row.stage("evaluate"),
                Column("batch preparation per epoch", "seconds"): input_seconds(row),
                Column("its share of training", "fraction"): ratio_or_none(
                    input_seconds(row), training_seconds(row)
                ),
                Column("exchange per epoch", "seconds"): exchange_seconds(row),
                Column("differs in"): describe_mismatch(row, settings),
            }
        )
    return make_table(
        f"published-{workload}",
        f"{workload}: time by batch",
        records,
        "The published seconds of training, steps and evaluation are only drawn, and not legible. "
        "Reading was measured once per system, for all batches. Here, ms/step is that of the "
        "epochs without a profile, and exchange is what computation does not hide, with waiting. "
        "Arms named TensorFlow are TensorFlow itself on this machine: their first epoch, in which "
        "it traces its graph, is not in ms/step, their batch preparation is that of an epoch "
        "without training, and their exchange is not measured.",
    ).without_empty_columns()


def training_seconds(row: Reproduced) -> float | None:
    """Returns the seconds of the stage `train` per epoch."""
    values = []
    for run in row.runs:
        seconds = as_finite(as_mapping(run.result.get("stages")).get("train"))
        epochs = run.result.get("epochs") or 0
        values.append(seconds / epochs if seconds and epochs else None)
    return row.average(values)


def make_ratio_table(workload: str, rows: Sequence[Reproduced]) -> ReportTable:
    facts = study_facts(STUDY)
    batches = facts["cluster_batches"][workload]
    records = []
    for batch, members in group_batches(rows).items():
        place = batches.index(batch) if batch in batches else None
        plain, rowwise, spark, tensorflow, generator = (
            find_arm(members, arm)
            for arm in (
                "tensorflow",
                "generator",
                "spark",
                "tensorflow_here",
                "tensorflow_generator",
            )
        )

        def printed(name: str, place: int | None = place) -> Any:
            return None if place is None else facts[name][workload][place]

        records.append(
            {
                Column("batch, published", "count"): batch,
                Column("batch preparation, Spark / TensorFlow", "ratio"): printed(
                    "batch_preparation_ratio_spark_over_tf"
                ),
                Column("dataset operators, Spark / TensorFlow", "ratio"): printed(
                    "dataset_op_ratio_spark_over_tf"
                ),
                Column("here: row by row / batches", "ratio"): ratio_or_none(
                    input_seconds(rowwise), input_seconds(plain)
                ),
                Column("here: TensorFlow, row by row / batches", "ratio"): ratio_or_none(
                    input_seconds(generator), input_seconds(tensorflow)
                ),
                Column("all-reduce, Horovod / TensorFlow", "count"): printed(
                    "allreduce_ratio_horovod_over_tf_first"
                ),
                Column("corrected", "count"): printed("allreduce_ratio_horovod_over_tf_corrected"),
                Column("here: exchange, on Spark / plain", "count"): ratio_or_none(
                    exchange_seconds(spark), exchange_seconds(plain)
                ),
                Column("Adadelta, Spark / TensorFlow", "ratio"): printed(
                    "adadelta_ratio_spark_over_tf"
                ),
                Column("here: optimizer, on Spark / plain", "ratio"): ratio_or_none(
                    our_operators(spark).get("optimizer"),
                    our_operators(plain).get("optimizer"),
                ),
            }
        )
    return make_table(
        f"published-{workload}-ratios",
        f"{workload}: ratios of input, exchange and optimizer",
        records,
        "Published tables 5.5 to 5.9 print the ratio of all-reduce the other way round; here it is "
        "always Spark over TensorFlow. The corrected ratio adds the parts that Horovod hides. "
        "The cause of slow input is our reading: a generator of rows, which the arm row by row "
        "stands for. Both of our systems use the same all-reduce.",
    ).without_empty_columns()


def make_operator_table(workload: str, rows: Sequence[Reproduced]) -> ReportTable:
    records = []
    for batch, members in group_batches(rows).items():
        printed = {
            name: published_operators(workload, batch, key)
            for name, key in (("Spark", "spark_horovod"), ("TensorFlow", "tensorflow"))
        }
        ours = {row.label: us for row in members if (us := our_operators(row))}
        names = dict.fromkeys(n for us in (*printed.values(), *ours.values()) for n in us)
        for category in names:
            cells: dict[Column, object] = {
                Column("batch, published", "count"): batch,
                Column("category"): category,
            }
            for name, us in printed.items():
                cells[Column(f"{name}, published", "seconds")] = seconds_of(us, category)
            cells[Column("Spark / TensorFlow", "ratio")] = ratio_or_none(
                printed["Spark"].get(category), printed["TensorFlow"].get(category)
            )
            for name, us in ours.items():
                cells[Column(name, "seconds")] = seconds_of(us, category)
            records.append(cells)
    return make_table(
        f"published-{workload}-operators",
        f"{workload}: seconds of self time per epoch by category of operators",
        records,
        "Summed over threads, mean of the profiled epochs and of our workers. Names and limits of "
        "operators differ between TensorFlow and torch: compare categories within a system. Input "
        "is the time of preparing batches; operators that fit no category are under other.",
    ).without_empty_columns()


def seconds_of(us: dict[str, float], category: str) -> float | None:
    return us[category] / 1e6 if category in us else None


def make_resource_table(workload: str, rows: Sequence[Reproduced]) -> ReportTable:
    facts = study_facts(STUDY)
    by_title = {metric.title: metric for metric in METRICS}
    records = []
    for key, title in MONITORED.items():
        printed = facts[key][workload]
        for batch, members in group_batches(rows).items():
            for system, name in SYSTEMS.items():
                row = find_arm(members, system)
                ours = measure_cluster(by_title[title], row) if row is not None else None
                cells: dict[Column, object] = {
                    Column("metric"): title,
                    Column("batch, published", "count"): batch,
                    Column("system, published"): name,
                }
                for part in ("cluster", "master", "slave"):
                    value = printed[system][part]
                    if isinstance(value, list):
                        known = printed["batches"]
                        value = value[known.index(batch)] if batch in known else None
                    cells[Column(f"{part}, published", "count")] = value
                cells |= {
                    Column("arm"): row.label if row is not None else "omitted",
                    Column("mean, here", "count"): ours["mean"] if ours else None,
                    Column("max, here", "count"): ours["max"] if ours else None,
                }
                records.append(cells)
    return make_table(
        f"published-{workload}-resources",
        f"{workload}: memory and CPU",
        records,
        "Published without the processes of the store, in steps of 0.5 GB and 2.5%: read off "
        "plots. Here: all machines together, with everything that runs on them.",
    ).without_empty_columns()
