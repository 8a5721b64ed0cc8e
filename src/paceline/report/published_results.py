"""Compares runs with published results, as ratios because the machines differ.

`published/results.json` and `published/curves.json` hold what four studies printed (each says on
which machines); nothing in them was measured here.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from paceline.report.charts import DASHES, STRATEGY_COLOURS, Figure, Trace, escape_plotly
from paceline.report.comparison import StrategyEntry, spread_of
from paceline.report.run_groups import RunGroup
from paceline.report.run_loader import ReportRun
from paceline.report.stats import as_finite, mean_and_std
from paceline.report.tables import Column, ReportTable

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


@cache
def read_published_json(name: str) -> dict[str, Any]:
    value = json.loads((FOLDER / f"{name}.json").read_text(encoding="utf-8"))
    assert isinstance(value, dict)
    return value


def list_published_runs() -> list[PublishedRun]:
    """Returns every published run with a strategy that Paceline has."""
    facts = read_published_json("results")
    rows = []
    study = "strategy_switch_cpu_cluster"
    for key, work in facts[study]["workloads"].items():
        for name, figures in work["results"].items():
            rows.append(
                PublishedRun(
                    study=study,
                    models=MODELS[key],
                    data=normalize_label(work["dataset"]),
                    arm=strategy_of_arm(name),
                    batch=work["global_batch"],
                    figures=figures,
                )
            )
    study = "ps_vs_allreduce_mlp"
    for row in facts[study]["results"]:
        figures = {k: row[k] for k in ("test_acc", "seconds")}
        curve = find_curve(row["dataset"], row["strategy"], row["batch"])
        if curve:
            figures["train_acc"] = curve[-1]
        rows.append(
            PublishedRun(
                study=study,
                models=MODELS[row["dataset"]],
                data=normalize_label(row["dataset"]),
                arm=strategy_of_arm(row["strategy"]),
                batch=row["batch"],
                figures=figures,
            )
        )
    return rows


def strategy_of_arm(word: str) -> str:
    share = re.fullmatch(r"switch_(\d+)", word)
    if share:
        return f"switch(allreduce, ps, at={share.group(1)}%)"
    return {"ps_async": "ps"}.get(word, word)


def normalize_label(name: str) -> str:
    return re.sub(r"[-_\s]", "", name.lower())


def find_curve(data: str, strategy: str, batch: int) -> list[float]:
    """Returns the printed training accuracy by epoch; values above 1 are errors of the source."""
    for row in read_published_json("curves")["per_epoch_train_acc"]:
        if (normalize_label(row["dataset"]), row["strategy"], row["batch"]) == (
            normalize_label(data),
            strategy,
            batch,
        ):
            return [float(x) for x in row["train_acc"]]
    return []


def find_published(task: RunGroup) -> list[tuple[StrategyEntry, PublishedRun]]:
    """Returns each entry with the published run of the same model, data, strategy and batch."""
    found = []
    rows = list_published_runs()
    for entry in task.entries:
        runs = task.runs_of(entry)
        named = read_batch(task.name)
        for row in rows:
            same = (
                entry["model"] in row.models
                and row.data == normalize_label(str(entry["data"]))
                and row.arm == strategy_family(entry["strategy"])
            )
            if same and (row.batch in (named, entry["batch"]) or row.batch is None) and runs:
                found.append((entry, row))
                break
    return found


def read_batch(task: str) -> int | None:
    """Returns the batch as given in the study: global, or per worker."""
    said = re.search(r"batch (\d+)", task)
    return int(said.group(1)) if said else None


def strategy_family(strategy: str) -> str:
    """Returns the strategy without options that the studies do not have."""
    text = re.sub(r"ps\([^()]*\)", "ps", strategy)
    return re.sub(r"allreduce\([^()]*\)", "allreduce", text)


def make_published_tables(task: RunGroup) -> list[ReportTable]:
    """Compares ratios of time and points of accuracy, each relative to its own first strategy."""
    pairs = find_published(task)
    if len(pairs) < 2:
        return []
    first, base = pairs[0]
    rows = []
    for entry, row in pairs:
        ours, theirs = entry["seconds"]["mean"], row.figures.get("seconds")
        measure = "test_acc" if "test_acc" in row.figures else "val_acc"
        mine, printed = spread_of(entry, measure)["mean"], row.figures.get(measure)
        rows.append(
            [
                entry["label"],
                theirs,
                ours,
                ratio_or_none(theirs, base.figures.get("seconds")),
                ratio_or_none(ours, first["seconds"]["mean"]),
                printed,
                mine,
                difference_or_none(printed, base.figures.get(measure)),
                difference_or_none(mine, spread_of(first, measure)["mean"]),
            ]
        )
    study = pairs[0][1].study
    return [
        ReportTable(
            name="published",
            title=f"Comparison with published results ({study})",
            columns=(
                Column(title="strategy"),
                Column(title="seconds, published", kind="seconds"),
                Column(title="seconds, here", kind="seconds"),
                Column(title="over the first, published", kind="ratio"),
                Column(title="over the first, here", kind="ratio"),
                Column(title="accuracy, published", kind="share"),
                Column(title="accuracy, here", kind="share"),
                Column(title="minus the first, published", kind="points"),
                Column(title="minus the first, here", kind="points"),
            ),
            rows=rows,
            note=f"The first strategy is {first['label']}. Published on other machines "
            f"({describe_study_hardware(study)}): "
            "compare the ratios and the differences, never the seconds. The published figures are "
            "of one run each.",
        )
    ]


def ratio_or_none(a: float | None, b: float | None) -> float | None:
    return a / b if a is not None and b else None


def difference_or_none(a: float | None, b: float | None) -> float | None:
    return a - b if a is not None and b is not None else None


def describe_study_hardware(study: str) -> str:
    """Describes the machines of a study."""
    cluster = read_published_json("results")[study]["cluster"]
    count = cluster.get("workers") or cluster.get("machines")
    cpu = cluster.get("cpu") or f"{cluster.get('cpu_cores')} cores each"
    return f"{count} machines, {cpu}"


def sentences_on_published(task: RunGroup) -> list[str]:
    """States whether the published order of strategies holds here."""
    pairs = find_published(task)
    if len(pairs) < 2:
        return []
    found = []
    first, base = pairs[0]
    for entry, row in pairs[1:]:
        measure = "test_acc" if "test_acc" in row.figures else "val_acc"
        printed = difference_or_none(row.figures.get(measure), base.figures.get(measure))
        mine = difference_or_none(
            spread_of(entry, measure)["mean"], spread_of(first, measure)["mean"]
        )
        if printed is None or mine is None:
            continue
        found.append(
            f"Published: {entry['label']} {100 * printed:+.2f} points of accuracy against "
            f"{first['label']}; here {100 * mine:+.2f} points."
        )
    return found


def draw_published(task: RunGroup) -> Figure | None:
    """Draws training accuracy by epoch with the published curves; None without any."""
    traces: list[Trace] = []
    drawn: set[str] = set()
    for number, (entry, row) in enumerate(find_published(task)):
        printed = find_curve(row.data, {"ps": "ps_async"}.get(row.arm, row.arm), row.batch or 0)
        ours = average_curve(task.runs_of(entry))
        if not printed or not ours:
            continue
        colour = STRATEGY_COLOURS[number % len(STRATEGY_COLOURS)]
        curves = [(f"{entry['label']}, here", ours, DASHES[0], 2.5)]
        if row.arm not in drawn:  # Several of our runs may match one published curve.
            drawn.add(row.arm)
            printed = [min(1.0, x) for x in printed]
            curves.insert(0, (f"{row.arm}, published", printed, DASHES[1], 1.5))
        for name, values, dash, width in curves:
            traces.append(
                {
                    "type": "scatter",
                    "mode": "lines",
                    "name": escape_plotly(name),
                    "x": list(range(1, len(values) + 1)),
                    "y": values,
                    "line": {"color": colour, "dash": dash, "width": width},
                    "hovertemplate": "%{y} at %{x}<extra>%{fullData.name}</extra>",
                }
            )
    if not traces:
        return None
    layout = {
        "height": 340,
        "xaxis": {"title": {"text": "epochs"}, "rangemode": "tozero"},
        "yaxis": {
            "title": {"text": "training accuracy"},
            "tickformat": ".1~%",
            "automargin": True,
        },
        "margin": {"l": 10, "r": 12, "t": 12, "b": 44},
        "showlegend": False,
        "hovermode": "closest",
    }
    return {"data": traces, "layout": layout}


def average_curve(runs: Sequence[ReportRun]) -> list[float]:
    """Returns the mean training accuracy by epoch over finished runs, up to the shortest."""
    rows = [[as_finite(row.get("train_acc")) for row in run.history] for run in runs if run.is_done]
    rows = [row for row in rows if row]
    if not rows:
        return []
    means = [mean_and_std(values)["mean"] for values in zip(*rows, strict=False)]
    return [mean for mean in means if mean is not None]
