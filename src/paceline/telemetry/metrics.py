"""The table of metrics: one row per metric drives every view of it.

A row in `METRICS` adds a metric to comparison.json and, according to its `views`, to the terminal
table, the tables of reports, the dashboard, the Prometheus endpoint and docs/metrics.md. Regenerate
that page with `python -m paceline.telemetry.metrics > docs/metrics.md`.
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import KW_ONLY, dataclass
from enum import Enum
from functools import partial
from typing import Literal

from paceline.telemetry.events import RunProgress
from paceline.telemetry.schema import RunResult, as_finite, as_mapping


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


SUMMARY, ACCURACY, TIME, RUNS, DASHBOARD, PROMETHEUS = View

ALWAYS_SHOWN = 100
"""Columns of this priority or higher are kept on any terminal."""


@dataclass(frozen=True)
class Metric:
    """One metric of a run."""

    key: str
    """In result.json and comparison.json; a contract."""
    description: str
    """One sentence for docs/metrics.md and for Prometheus."""
    _: KW_ONLY
    unit: Unit
    views: Collection[View] = ()
    title: str = ""
    """Column heading; by default the words of `key`."""
    source: Callable[[RunResult], object] | None = None
    """Returns the value of a result; by default the result's value under `key`."""
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


def train_seconds(result: RunResult) -> float | None:
    """Returns the duration of the training stage; None if stages were not recorded."""
    return as_finite(as_mapping(result.get("stages")).get("train"))


def step_ms(result: RunResult) -> float | None:
    """Returns milliseconds per global batch, the mean duration of a step of every worker."""
    batch, rate = as_finite(result.get("batch")), as_finite(result.get("samples_per_s"))
    return 1e3 * batch / rate if batch and rate else None


_accuracy = partial(Metric, unit=Unit.FRACTION, better="higher", views=(ACCURACY, DASHBOARD))
_loss = partial(Metric, unit=Unit.LOSS, better="lower", views=(ACCURACY, DASHBOARD))
_duration = partial(Metric, unit=Unit.SECONDS, better="lower")
_size = partial(Metric, unit=Unit.BYTES, better="lower")
_count = partial(Metric, unit=Unit.COUNT)

METRICS: tuple[Metric, ...] = (
    _accuracy(
        "test_acc",
        "Accuracy on the test set after training.",
        views=(SUMMARY, ACCURACY, RUNS, DASHBOARD),
        priority=ALWAYS_SHOWN,
        spread_in_summary=True,
    ),
    _accuracy(
        "val_acc",
        "Accuracy on the validation set after the last epoch.",
        views=(SUMMARY, ACCURACY, RUNS, DASHBOARD),
        priority=20,
        spread_in_summary=True,
    ),
    _accuracy("train_acc", "Training accuracy of the last epoch, measured during training."),
    _loss("test_loss", "Loss on the test set after training."),
    _loss("val_loss", "Loss on the validation set after the last epoch."),
    _loss(
        "train_loss",
        "Mean training loss of the current or last epoch.",
        views=(ACCURACY, DASHBOARD, PROMETHEUS),
        live=lambda progress: progress.loss,
        family="loss",
    ),
    _duration(
        "seconds",
        "Total wall time, including startup and evaluation.",
        views=(SUMMARY, TIME, RUNS, DASHBOARD),
        priority=ALWAYS_SHOWN,
        spread_in_summary=True,
    ),
    _duration(
        "train_seconds",
        "Wall time of the training stage, without startup, evaluation and saving.",
        views=(TIME,),
        title="training seconds",
        source=train_seconds,
    ),
    _count(
        "samples_per_s",
        "Training throughput, without startup and evaluation.",
        views=(SUMMARY, TIME, DASHBOARD),
        title="samples/s",
        better="higher",
        priority=30,
    ),
    _count(
        "step_ms",
        "Milliseconds per step: training time per global batch, without startup and evaluation.",
        views=(TIME, DASHBOARD),
        title="ms/step",
        source=step_ms,
        better="lower",
    ),
    _count(
        "samples",
        "Samples whose gradients were applied.",
        views=(TIME, RUNS, DASHBOARD, PROMETHEUS),
        live=lambda progress: progress.samples,
        family="samples_total",
    ),
    _count(
        "updates",
        "Updates of the weights.",
        views=(SUMMARY, TIME, DASHBOARD, PROMETHEUS),
        priority=10,
        live=lambda progress: progress.updates,
        family="updates_total",
    ),
    _count(
        "epochs",
        "Epochs completed.",
        views=(PROMETHEUS,),
        live=lambda progress: progress.epoch,
        family="epoch",
    ),
    _count(
        "staleness_mean",
        "Mean age of the weights a gradient was computed on, in updates.",
        views=(SUMMARY, TIME),
        title="mean staleness",
        source=lambda result: as_mapping(result.get("staleness")).get("mean"),
        better="lower",
        priority=60,
    ),
    _size("bytes_sent", "Payload bytes sent by all workers.", views=(RUNS, DASHBOARD)),
    Metric(
        "bytes_over_uncoded",
        "Bytes sent divided by their size without a codec; empty without a codec.",
        views=(SUMMARY,),
        title="compression (bytes sent / uncompressed)",
        unit=Unit.FRACTION,
        source=compression,
        better="lower",
        priority=ALWAYS_SHOWN,
    ),
    _duration(
        "switch_pause_s",
        "Time without training during switches of strategy; empty without a switch.",
        views=(SUMMARY, TIME),
        title="switch pause",
        source=lambda result: switch_seconds(result, "pause_s"),
        priority=ALWAYS_SHOWN,
        spread=False,
    ),
    _duration(
        "switch_drain_s",
        "Time spent waiting for batches in flight before switches of strategy.",
        title="switch drain",
        source=lambda result: switch_seconds(result, "drain_s"),
    ),
    _size(
        "peak_rss_bytes",
        "Largest resident memory of any worker.",
        views=(RUNS, DASHBOARD),
        title="peak memory",
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

    def value(self, resources: Mapping[str, object]) -> float | None:
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
