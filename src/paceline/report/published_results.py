"""Compares runs with published results, as ratios because the machines differ.

`published/results.json` and `published/curves.json` hold what four studies printed (each says on
which machines); nothing in them was measured here.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, cast

from paceline.report import charts
from paceline.report.comparison import StrategyEntry, mean_metric
from paceline.report.runs import ReportRun, RunGroup
from paceline.report.stats import difference_or_none, mean_and_std, ratio_or_none
from paceline.report.tables import Column, ReportTable, make_table
from paceline.telemetry.schema import as_finite

MODELS = {
    # Depth 50 by its name, but with the parameters of depth 56.
    "resnet_cifar10": ("resnet50", "resnet56"),
    "densenet_fashion_mnist": ("densenet-bc-40-12",),
    "mnist": ("mlp-300-100",),
    "fashion_mnist": ("mlp-128",),
    "kmnist": ("mlp-128",),
}

FOLDER = Path(__file__).parent / "published"


@dataclass(frozen=True, kw_only=True)
class PublishedRun:
    """One published run and its printed results."""

    study: str
    models: tuple[str, ...]
    """Settings of ours that match the study."""
    data: str
    arm: str
    """For example allreduce, ps, or switch(allreduce, ps, at=25%)."""
    batch: int | None
    figures: Mapping[str, float]

    @property
    def measure(self) -> str:
        return "test_acc" if "test_acc" in self.figures else "val_acc"


@cache
def read_published_json(name: str) -> dict[str, Any]:
    return cast(dict[str, Any], json.loads((FOLDER / f"{name}.json").read_text(encoding="utf-8")))


def list_published_runs() -> list[PublishedRun]:
    """Returns every published run with a strategy that Paceline has."""
    facts = read_published_json("results")
    rows = []
    switching = facts["strategy_switch_cpu_cluster"]
    for key, work in switching["workloads"].items():
        for name, figures in work["results"].items():
            data, batch = work["dataset"], work["global_batch"]
            rows.append(("strategy_switch_cpu_cluster", key, data, name, batch, figures))
    for row in facts["ps_vs_allreduce_mlp"]["results"]:
        key, name, batch = row["dataset"], row["strategy"], row["batch"]
        figures = {k: row[k] for k in ("test_acc", "seconds")}
        curve = find_curve(key, name, batch)
        if curve:
            figures["train_acc"] = curve[-1]
        rows.append(("ps_vs_allreduce_mlp", key, key, name, batch, figures))
    return [
        PublishedRun(
            study=study,
            models=MODELS[key],
            data=normalize_label(data),
            arm=strategy_of_arm(name),
            batch=batch,
            figures=figures,
        )
        for study, key, data, name, batch, figures in rows
    ]


def strategy_of_arm(word: str) -> str:
    word = {"ps_async": "ps"}.get(word, word)
    return re.sub(r"^switch_(\d+)$", r"switch(allreduce, ps, at=\1%)", word)


def normalize_label(name: str) -> str:
    return re.sub(r"[-_\s]", "", name.lower())


def find_curve(data: str, strategy: str, batch: int) -> list[float]:
    """Returns the printed training accuracy by epoch; values above 1 are errors of the source."""
    wanted = (normalize_label(data), strategy, batch)
    for row in read_published_json("curves")["per_epoch_train_acc"]:
        if (normalize_label(row["dataset"]), row["strategy"], row["batch"]) == wanted:
            return [float(x) for x in row["train_acc"]]
    return []


def find_published(task: RunGroup) -> list[tuple[StrategyEntry, PublishedRun]]:
    """Returns each entry with the published run of the same model, data, strategy and batch."""
    found, published = [], list_published_runs()
    # The name of a task has the batch as given in the study: global, or per worker.
    named = re.search(r"batch (\d+)", task.name)
    for entry in task.entries:
        batches = (int(named.group(1)) if named else None, entry["batch"], None)
        ours = normalize_label(str(entry["data"])), strategy_family(entry["strategy"])
        same = [row for row in published if entry["model"] in row.models and row.batch in batches]
        found += [(entry, row) for row in same if (row.data, row.arm) == ours][:1]
    return found


def strategy_family(strategy: str) -> str:
    """Returns the strategy without options that the studies do not have."""
    text = re.sub(r"ps\([^()]*\)", "ps", strategy)
    return re.sub(r"allreduce\([^()]*\)", "allreduce", text)


def make_published_tables(task: RunGroup) -> list[ReportTable]:
    """Compares ratios of time and points of accuracy, each relative to its own first strategy."""
    pairs = find_published(task)
    if len(pairs) < 2:
        return []
    (first, base), study = pairs[0], pairs[0][1].study
    records = []
    for entry, row in pairs:
        measure = row.measure
        theirs, ours = row.figures.get("seconds"), entry["seconds"]["mean"]
        printed, mine = row.figures.get(measure), mean_metric(entry, measure)
        ratio = ratio_or_none(theirs, base.figures.get("seconds"))
        our_ratio = ratio_or_none(ours, first["seconds"]["mean"])
        difference = difference_or_none(printed, base.figures.get(measure))
        our_difference = difference_or_none(mine, mean_metric(first, measure))
        records.append(
            {
                Column("strategy"): entry["label"],
                Column("seconds, published", "seconds"): theirs,
                Column("seconds, here", "seconds"): ours,
                Column("over the first, published", "ratio"): ratio,
                Column("over the first, here", "ratio"): our_ratio,
                Column("accuracy, published", "fraction"): printed,
                Column("accuracy, here", "fraction"): mine,
                Column("minus the first, published", "points"): difference,
                Column("minus the first, here", "points"): our_difference,
            }
        )
    cluster = read_published_json("results")[study]["cluster"]
    count = cluster.get("workers") or cluster.get("machines")
    cpu = cluster.get("cpu") or f"{cluster.get('cpu_cores')} cores each"
    note = (
        f"The first strategy is {first['label']}. Published on other machines "
        f"({count} machines, {cpu}): compare the ratios and the differences, never the seconds. "
        "The published figures are of one run each."
    )
    title = f"Comparison with published results ({study})"
    return [make_table("published", title, records, note)]


def sentences_on_published(task: RunGroup) -> list[str]:
    """States whether the published order of strategies holds here."""
    pairs = find_published(task)
    found = []
    for entry, row in pairs[1:]:
        first, base = pairs[0]
        printed = difference_or_none(row.figures.get(row.measure), base.figures.get(row.measure))
        mine = difference_or_none(mean_metric(entry, row.measure), mean_metric(first, row.measure))
        if printed is not None and mine is not None:
            found.append(
                f"Published: {entry['label']} {100 * printed:+.2f} points of accuracy against "
                f"{first['label']}; here {100 * mine:+.2f} points."
            )
    return found


def draw_published(task: RunGroup) -> charts.Figure | None:
    """Draws training accuracy by epoch with the published curves; None without any."""
    traces: list[charts.Trace] = []
    drawn: set[str] = set()
    for number, (entry, row) in enumerate(find_published(task)):
        printed = find_curve(row.data, {"ps": "ps_async"}.get(row.arm, row.arm), row.batch or 0)
        ours = average_curve(task.done_runs_of(entry))
        if not printed or not ours:
            continue
        curves = [(f"{entry['label']}, here", ours, charts.DASHES[0], 2.5)]
        if row.arm not in drawn:  # Several of our runs may match one published curve.
            drawn.add(row.arm)
            printed = [min(1.0, x) for x in printed]
            curves.insert(0, (f"{row.arm}, published", printed, charts.DASHES[1], 1.5))
        colour = charts.STRATEGY_COLOURS[number % len(charts.STRATEGY_COLOURS)]
        for name, values, dash, width in curves:
            line = {"color": colour, "dash": dash, "width": width}
            epochs = list(range(1, len(values) + 1))
            traces.append(charts.make_scatter(name, epochs, values, "lines", line=line))
    if not traces:
        return None
    x = charts.make_axis("epochs", rangemode="tozero")
    y = charts.make_axis("training accuracy", **charts.PERCENT_AXIS)
    return charts.make_figure(traces, 340, x, y, hovermode="closest")


def average_curve(runs: Sequence[ReportRun]) -> list[float]:
    """Returns the mean training accuracy by epoch, up to the shortest run."""
    rows = [[as_finite(row.get("train_acc")) for row in run.history] for run in runs]
    means = [mean_and_std(values)["mean"] for values in zip(*filter(None, rows), strict=False)]
    return [mean for mean in means if mean is not None]
