"""The table of metrics: one row per metric drives every view of it.

A row in `METRICS` adds a metric to comparison.json and, according to its `views`, to the terminal
table, the tables of reports, the dashboard, the Prometheus endpoint and docs/metrics.md. Regenerate
that page with `python -m paceline.telemetry.metrics > docs/metrics.md`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from functools import partial
from typing import Literal

from paceline.telemetry.events import RunProgress
from paceline.telemetry.schema import ProcessResources, RunResult, as_finite, as_mapping


class Unit(Enum):
    """Unit of a metric; determines its format in every view."""

    SECONDS = "seconds"
    BYTES = "bytes"
    FRACTION = "fraction"
    COUNT = "count"
    LOSS = "loss"


class View(Enum):
    """A place where metrics are shown; the value is its name in docs/metrics.md."""

    SUMMARY = "summary"
    """Terminal table and the summary of reports."""
    ACCURACY = "accuracy table"
    TIME = "time table"
    RUNS = "runs table"
    DASHBOARD = "dashboard"
    PROMETHEUS = "Prometheus"


ALWAYS_SHOWN = 100
"""Columns of this priority or higher are kept on any terminal."""


@dataclass(frozen=True, kw_only=True)
class Metric:
    """One metric of a run."""

    key: str
    """In result.json and comparison.json; a contract."""
    description: str
    """One sentence for docs/metrics.md and for Prometheus."""
    unit: Unit
    title: str = ""
    """Column heading; by default the words of `key`."""
    source: Callable[[RunResult], object] | None = None
    """Returns the value of a result; by default the result's value under `key`."""
    views: frozenset[View] = frozenset()
    better: Literal["higher", "lower"] | None = None
    priority: int = 0
    """A narrow terminal hides the columns with the lowest priority first."""
    spread: bool = True
    """Tables show mean ± standard deviation over seeds, not only the mean."""
    spread_in_summary: bool = False
    live: Callable[[RunProgress], float | None] | None = None
    """Returns the current value while the run is in progress, for Prometheus."""
    family: str | None = None
    """Name of the Prometheus family without prefix, if it is not `key`; a contract."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "title", self.title or self.key.replace("_", " "))

    def value(self, result: RunResult) -> float | None:
        """Returns the metric of a result; None if it was not measured."""
        return as_finite(result.get(self.key) if self.source is None else self.source(result))


def switch_seconds(result: RunResult, name: str) -> float | None:
    """Returns the sum over all switches; None without a switch, which is not a pause of 0."""
    rows = result.get("switches")
    if not isinstance(rows, list) or not rows:
        return None
    return sum(as_finite(as_mapping(row).get(name)) or 0.0 for row in rows)


def compression(result: RunResult) -> float | None:
    """Returns bytes sent / uncompressed bytes; None without a codec."""
    sent, before = as_finite(result.get("bytes_sent")), as_finite(result.get("bytes_before_codec"))
    return sent / before if sent and before and sent != before else None


_accuracy = partial(Metric, unit=Unit.FRACTION, better="higher")
_loss = partial(Metric, unit=Unit.LOSS, better="lower")
_duration = partial(Metric, unit=Unit.SECONDS, better="lower")
_size = partial(Metric, unit=Unit.BYTES, better="lower")

METRICS: tuple[Metric, ...] = (
    _accuracy(
        key="test_acc",
        description="Accuracy on the test set after training.",
        priority=ALWAYS_SHOWN,
        spread_in_summary=True,
        views=frozenset({View.SUMMARY, View.ACCURACY, View.RUNS, View.DASHBOARD}),
    ),
    _accuracy(
        key="val_acc",
        description="Accuracy on the validation set after the last epoch.",
        priority=20,
        spread_in_summary=True,
        views=frozenset({View.SUMMARY, View.ACCURACY, View.RUNS, View.DASHBOARD}),
    ),
    _accuracy(
        key="train_acc",
        description="Training accuracy of the last epoch, measured during training.",
        views=frozenset({View.ACCURACY, View.DASHBOARD}),
    ),
    _loss(
        key="test_loss",
        description="Loss on the test set after training.",
        views=frozenset({View.ACCURACY, View.DASHBOARD}),
    ),
    _loss(
        key="val_loss",
        description="Loss on the validation set after the last epoch.",
        views=frozenset({View.ACCURACY, View.DASHBOARD}),
    ),
    _loss(
        key="train_loss",
        description="Mean training loss of the current or last epoch.",
        views=frozenset({View.ACCURACY, View.DASHBOARD, View.PROMETHEUS}),
        live=lambda progress: progress.loss,
        family="loss",
    ),
    _duration(
        key="seconds",
        description="Total wall time, including startup and evaluation.",
        priority=ALWAYS_SHOWN,
        spread_in_summary=True,
        views=frozenset({View.SUMMARY, View.TIME, View.RUNS, View.DASHBOARD}),
    ),
    Metric(
        key="samples_per_s",
        title="samples/s",
        description="Training throughput, without startup and evaluation.",
        unit=Unit.COUNT,
        better="higher",
        priority=30,
        views=frozenset({View.SUMMARY, View.TIME, View.DASHBOARD}),
    ),
    Metric(
        key="samples",
        description="Samples whose gradients were applied.",
        unit=Unit.COUNT,
        views=frozenset({View.TIME, View.RUNS, View.DASHBOARD, View.PROMETHEUS}),
        live=lambda progress: progress.samples,
        family="samples_total",
    ),
    Metric(
        key="updates",
        description="Updates of the weights.",
        unit=Unit.COUNT,
        priority=10,
        views=frozenset({View.SUMMARY, View.TIME, View.DASHBOARD, View.PROMETHEUS}),
        live=lambda progress: progress.updates,
        family="updates_total",
    ),
    Metric(
        key="epochs",
        description="Epochs completed.",
        unit=Unit.COUNT,
        views=frozenset({View.PROMETHEUS}),
        live=lambda progress: progress.epoch,
        family="epoch",
    ),
    Metric(
        key="staleness_mean",
        title="mean staleness",
        description="Mean age of the weights a gradient was computed on, in updates.",
        unit=Unit.COUNT,
        source=lambda result: as_mapping(result.get("staleness")).get("mean"),
        better="lower",
        priority=60,
        views=frozenset({View.SUMMARY, View.TIME}),
    ),
    _size(
        key="bytes_sent",
        description="Payload bytes sent by all workers.",
        views=frozenset({View.RUNS, View.DASHBOARD}),
    ),
    Metric(
        key="bytes_over_uncoded",
        title="compression (bytes sent / uncompressed)",
        description="Bytes sent divided by their size without a codec; empty without a codec.",
        unit=Unit.FRACTION,
        source=compression,
        better="lower",
        priority=ALWAYS_SHOWN,
        views=frozenset({View.SUMMARY}),
    ),
    _duration(
        key="switch_pause_s",
        title="switch pause",
        description="Time without training during switches of strategy; empty without a switch.",
        source=lambda result: switch_seconds(result, "pause_s"),
        priority=ALWAYS_SHOWN,
        spread=False,
        views=frozenset({View.SUMMARY, View.TIME}),
    ),
    _duration(
        key="switch_drain_s",
        title="switch drain",
        description="Time spent waiting for batches in flight before switches of strategy.",
        source=lambda result: switch_seconds(result, "drain_s"),
    ),
    _size(
        key="peak_rss_bytes",
        title="peak memory",
        description="Largest resident memory of any worker.",
        views=frozenset({View.RUNS, View.DASHBOARD}),
    ),
)


def metrics_in(view: View) -> list[Metric]:
    """Returns the metrics of a view, in the order of the table."""
    return [metric for metric in METRICS if view in metric.views]


@dataclass(frozen=True)
class ResourceMetric:
    """One column of the resource table: usage of a process, aggregated over processes and runs."""

    title: str
    unit: Unit
    aggregate: Literal["mean", "max"]
    key: str
    """In `resources` of result.json."""
    is_rate: bool = False
    """The value is an amount, shown per second."""

    def value(self, resources: ProcessResources) -> float | None:
        value, seconds = as_finite(resources.get(self.key)), as_finite(resources.get("seconds"))
        if value is None or not self.is_rate:
            return value
        return value / seconds if seconds else None


RESOURCES = (
    ResourceMetric("CPU cores, mean", Unit.COUNT, "mean", "cpu_mean"),
    ResourceMetric("CPU cores, peak", Unit.COUNT, "max", "cpu_peak"),
    ResourceMetric("memory, mean", Unit.BYTES, "mean", "rss_mean"),
    ResourceMetric("memory, peak", Unit.BYTES, "max", "rss_peak"),
    ResourceMetric("received/s, mean", Unit.BYTES, "mean", "net_in", is_rate=True),
    ResourceMetric("received/s, peak", Unit.BYTES, "max", "net_in_peak"),
    ResourceMetric("sent/s, mean", Unit.BYTES, "mean", "net_out", is_rate=True),
    ResourceMetric("sent/s, peak", Unit.BYTES, "max", "net_out_peak"),
)


def render_docs() -> str:
    """Returns the text of docs/metrics.md."""
    lines = [
        "# Metrics",
        "",
        "Generated by `python -m paceline.telemetry.metrics > docs/metrics.md`; edit the table in",
        "`src/paceline/telemetry/metrics.py` instead.",
        "",
        "comparison.json has mean, standard deviation, minimum, maximum and count over seeds for",
        "each key. The terminal table, reports and the dashboard show the views listed here.",
        "Metrics of single processes and hosts are described in [telemetry.md](telemetry.md).",
        "",
        "| key | title | unit | better | views | Prometheus family | description |",
        "|---|---|---|---|---|---|---|",
    ]
    for metric in METRICS:
        views = ", ".join(view.value for view in View if view in metric.views)
        family = f"`paceline_{metric.family or metric.key}`" if metric.live is not None else ""
        lines.append(
            f"| `{metric.key}` | {metric.title} | {metric.unit.value} | {metric.better or ''} "
            f"| {views} | {family} | {metric.description} |"
        )
    lines += ["", "## Resources per role", "", "| title | unit | over processes and runs |"]
    lines += ["|---|---|---|"]
    lines += [f"| {m.title} | {m.unit.value} | {m.aggregate} |" for m in RESOURCES]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(render_docs(), end="")
