"""The charts of the report, as plain Plotly figures (`{"data": [...], "layout": {...}}`).

Colours of text, grid and background are left to the page, which knows light from dark. Names are
escaped: Plotly reads its texts as a kind of HTML, links included.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from paceline.report.number_format import format_number, format_seconds
from paceline.report.phase_times import average_phases
from paceline.report.run_loader import ReportRun
from paceline.report.stats import as_finite, interpolate
from paceline.telemetry.events import PHASES
from paceline.telemetry.numbers import as_mapping

Figure = dict[str, Any]
"""A Plotly figure as JSON: `data` and `layout`."""
Trace = dict[str, Any]
"""One entry of a figure's `data`, or a shape or axis of its `layout`."""

# Okabe and Ito's colours without black and yellow, which vanish on one of the two backgrounds.
STRATEGY_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
DASHES = ("solid", "dash", "dot", "dashdot")
"""Dashes that distinguish strategies with the same colour."""

PHASE_STYLES: dict[str, tuple[str, str]] = {
    "startup": ("#999999", ""),
    "input": ("#56B4E9", ""),
    "forward": ("#0072B2", ""),
    "backward": ("#009E73", ""),
    "comm_exposed": ("#D55E00", ""),
    "optimizer": ("#F0E442", ""),
    "wait": ("#E69F00", "/"),
    "queue": ("#D55E00", "/"),
    "eval": ("#CC79A7", "."),
    "switch": ("#666666", "x"),
    "other": ("#BBBBBB", "."),
}
"""Colour and hatching per time category: the palette has too few colours for eleven."""

LOG_AXIS_RATIO = 30.0
"""A loss that falls by more than this is drawn on a logarithmic axis."""


def escape_plotly(text: object) -> str:
    return escape(str(text), quote=False)


def style_strategies(labels: Sequence[str]) -> dict[str, tuple[str, str]]:
    """Returns a colour and a dash per strategy, by its position in the report."""
    return {
        label: (
            STRATEGY_COLOURS[i % len(STRATEGY_COLOURS)],
            DASHES[i // len(STRATEGY_COLOURS) % len(DASHES)],
        )
        for i, label in enumerate(labels)
    }


def draw_curves(runs: Sequence[ReportRun], measure: str, *, against: str) -> Figure | None:
    """Draws a metric of the history over `epochs` or `seconds`; None if no run has a value.

    One colour a strategy. With several seeds each is a thin line under the bold mean; the mean at
    an epoch is taken over the runs that are done, at their mean time.
    """
    labels = list(dict.fromkeys(run.label for run in runs))
    styles = style_strategies(labels)
    axis = 0 if against == "epochs" else 1
    traces: list[Trace] = []
    shapes: list[Trace] = []
    marks: dict[str, list[tuple[float, str]]] = {}
    values: list[float] = []
    for label in labels:
        group = [run for run in runs if run.label == label and run.list_points(measure)]
        colour, dash = styles[label]
        for run in group:
            points = run.list_points(measure)
            xs, ys = [p[axis] for p in points], [p[2] for p in points]
            values += ys
            bold = len(group) == 1
            traces.append(make_line(run, xs, ys, colour=colour, dash=dash, bold=bold))
            for switch in run.switches:
                x = run.locate_switch(switch)[axis]
                traces.append(make_switch_marker(run, switch, x, interpolate(xs, ys, x), colour))
                shapes.append(make_switch_line(x, colour, bold=bold))
                marks.setdefault(label, []).append((x, describe_switch(switch)))
        if len(group) > 1:
            done = [run for run in group if run.is_done] or group
            traces.append(make_mean_line(done, measure, axis, colour=colour, dash=dash))
    if not traces:
        return None
    is_loss = measure.endswith("loss")
    y_axis: Trace = {"automargin": True, "rangemode": "normal"}
    if not is_loss:
        y_axis["tickformat"] = ".1~%"
    elif min(values) > 0 and max(values) / min(values) > LOG_AXIS_RATIO:
        y_axis |= {"type": "log", "tickmode": "array", "tickvals": list_log_ticks(values)}
    layout = {
        "height": 320,
        "xaxis": {"title": {"text": "epochs" if axis == 0 else "seconds"}, "rangemode": "tozero"},
        "yaxis": y_axis,
        "shapes": shapes,
        "annotations": make_switch_labels(marks, max(max(t["x"]) for t in traces)),
        "margin": {"l": 10, "r": 12, "t": 12, "b": 44},
        "showlegend": False,
        "hovermode": "closest",
    }
    return {"data": traces, "layout": layout}


def list_log_ticks(values: Sequence[float]) -> list[float]:
    """Returns ticks at 1, 2 and 5 times powers of ten, or only powers over a long range."""
    powers = range(math.floor(math.log10(min(values))), math.ceil(math.log10(max(values))) + 1)
    steps = (1, 2, 5) if len(powers) <= 4 else (1,)
    return [float(f"{step}e{power}") for power in powers for step in steps]


def make_line(
    run: ReportRun, xs: list[float], ys: list[float], *, colour: str, dash: str, bold: bool
) -> Trace:
    seed = run.result.get("seed")
    text = escape_plotly(run.label) + (f", seed {escape_plotly(seed)}" if seed is not None else "")
    return {
        "type": "scatter",
        "mode": "lines+markers" if bold or len(xs) == 1 else "lines",
        "name": text,
        "x": xs,
        "y": ys,
        "opacity": 1.0 if bold else 0.45,
        "line": {"color": colour, "dash": dash, "width": 2.5 if bold else 1},
        "marker": {"color": colour, "size": 5},
        "hovertemplate": "%{y} at %{x}<extra>%{fullData.name}</extra>",
    }


def make_mean_line(
    runs: Sequence[ReportRun], measure: str, axis: int, *, colour: str, dash: str
) -> Trace:
    """Returns the mean of the runs at each epoch that all of them reached."""
    by_epoch: dict[float, list[tuple[float, float, float]]] = {}
    for run in runs:
        for point in run.list_points(measure):
            by_epoch.setdefault(point[0], []).append(point)
    whole = [group for _, group in sorted(by_epoch.items()) if len(group) == len(runs)]
    return {
        "type": "scatter",
        "mode": "lines+markers",
        "name": f"{escape_plotly(runs[0].label)}, mean of {len(runs)} seeds",
        "x": [sum(p[axis] for p in group) / len(group) for group in whole] or [0.0],
        "y": [sum(p[2] for p in group) / len(group) for group in whole] or [None],
        "line": {"color": colour, "dash": dash, "width": 2.5},
        "marker": {"color": colour, "size": 5},
        "hovertemplate": "%{y} at %{x}<extra>%{fullData.name}</extra>",
    }


def describe_switch(switch: Mapping[str, Any]) -> str:
    return f"{switch.get('from', '?')} → {switch.get('to', '?')}"


def make_switch_marker(
    run: ReportRun, switch: Mapping[str, Any], x: float, y: float, colour: str
) -> Trace:
    """Returns a diamond on the curve of a run, with the switch as its hover text."""
    words = [
        f"switch {describe_switch(switch)}",
        f"at {format_number(as_finite(switch.get('samples')))} samples",
        f"pause {format_seconds(as_finite(switch.get('pause_s')))}, "
        f"drain {format_seconds(as_finite(switch.get('drain_s')))}",
        str(switch.get("reason") or ""),
    ]
    return {
        "type": "scatter",
        "mode": "markers",
        "name": f"{escape_plotly(run.label)}, switch",
        "x": [x],
        "y": [y],
        "text": ["<br>".join(escape_plotly(word) for word in words if word)],
        "marker": {"color": colour, "size": 9, "symbol": "diamond-open", "line": {"width": 2}},
        "hovertemplate": "%{text}<extra>%{fullData.name}</extra>",
    }


def make_switch_line(x: float, colour: str, *, bold: bool) -> Trace:
    return {
        "type": "line",
        "name": "switch",
        "xref": "x",
        "yref": "paper",
        "x0": x,
        "x1": x,
        "y0": 0,
        "y1": 1,
        "layer": "below",
        "opacity": 0.8 if bold else 0.45,
        "line": {"color": colour, "width": 1.5 if bold else 1, "dash": "dot"},
    }


def make_switch_labels(marks: Mapping[str, list[tuple[float, str]]], x_most: float) -> list[Trace]:
    """Returns one vertical label for switches that are close together, at their mean position."""
    switches = sorted({mark for group in marks.values() for mark in group})
    clusters: list[list[tuple[float, str]]] = []
    for mark in switches:
        if clusters and mark[0] - clusters[-1][0][0] <= 0.08 * x_most:
            clusters[-1].append(mark)
        else:
            clusters.append([mark])
    labels = []
    for cluster in clusters:
        texts = list(dict.fromkeys(text for _, text in cluster))
        text = " / ".join(texts) if len(texts) < 3 else f"{len(texts)} switches"
        labels.append(
            {
                "x": max(x for x, _ in cluster),
                "xref": "x",
                "xanchor": "left",
                "y": 0.02,
                "yref": "paper",
                "yanchor": "bottom",
                "text": escape_plotly(text if len(text) <= 40 else text[:39] + "…"),
                "textangle": -90,
                "showarrow": False,
                "font": {"size": 11},
            }
        )
    return labels


def draw_phases(runs: Sequence[ReportRun]) -> list[tuple[str, int, Figure]]:
    """Draws the time categories: label, number of runs and a bar per worker, per strategy.

    All share one time axis, so that the lengths of bars compare across strategies.
    """
    found = []
    for label in dict.fromkeys(run.label for run in runs):
        group = [run for run in runs if run.label == label]
        count = len([run for run in group if run.is_done] or group)
        phases = average_phases(group)
        if phases:
            found.append((label, count, phases))
    longest_s = max((sum(p.values()) for _, _, f in found for p in f.values()), default=0.0)
    return [(label, count, draw_bars(phases, longest_s)) for label, count, phases in found]


def draw_bars(phases: Mapping[str, Mapping[str, float]], longest_s: float) -> Figure:
    workers = list(phases)
    traces = []
    for phase in PHASES:
        seconds = [phases[worker].get(phase, 0.0) for worker in workers]
        if not any(seconds):
            continue
        colour, hatching = PHASE_STYLES[phase]
        traces.append(
            {
                "type": "bar",
                "orientation": "h",
                "name": phase,
                "x": seconds,
                "y": [escape_plotly(worker) for worker in workers],
                "marker": {
                    "color": colour,
                    "pattern": {
                        "shape": hatching,
                        "fillmode": "overlay",
                        "fgcolor": "#333333",
                        "size": 5,
                    },
                },
                "hovertemplate": "%{fullData.name}: %{x:.3~f} s<extra>%{y}</extra>",
            }
        )
    layout = {
        "barmode": "stack",
        "bargap": 0.25,
        "height": 72 + 26 * len(workers),
        "xaxis": {"title": {"text": "seconds"}, "range": [0, longest_s * 1.02 or 1]},
        "yaxis": {"autorange": "reversed", "type": "category", "automargin": True},
        "margin": {"l": 10, "r": 12, "t": 4, "b": 44},
        "showlegend": False,
    }
    return {"data": traces, "layout": layout}


def draw_staleness(runs: Sequence[ReportRun]) -> Figure | None:
    """Draws the fraction of updates by staleness; None if no update was stale."""
    labels = list(dict.fromkeys(run.label for run in runs))
    styles = style_strategies(labels)
    traces: list[Trace] = []
    for label in labels:
        counts = count_staleness([run for run in runs if run.label == label])
        total = sum(counts.values())
        if not any(counts[lag] for lag in counts if lag > 0):
            continue
        lags = sorted(counts)
        traces.append(
            {
                "type": "bar",
                "name": escape_plotly(label),
                "x": lags,
                "y": [counts[lag] / total for lag in lags],
                "customdata": [counts[lag] for lag in lags],
                "marker": {"color": styles[label][0]},
                "hovertemplate": "staleness %{x}: %{y:.1%} (%{customdata:,} updates)"
                "<extra>%{fullData.name}</extra>",
            }
        )
    if not traces:
        return None
    widest = max(max(trace["x"]) for trace in traces)
    layout = {
        "height": 300,
        "barmode": "group",
        "xaxis": {
            "title": {"text": "staleness in updates"},
            **({"dtick": 1} if widest <= 20 else {}),
        },
        "yaxis": {"title": {"text": "share of updates"}, "tickformat": ".0~%", "automargin": True},
        "margin": {"l": 10, "r": 12, "t": 12, "b": 44},
        "showlegend": False,
    }
    return {"data": traces, "layout": layout}


def count_staleness(runs: Sequence[ReportRun]) -> dict[int, float]:
    counts: dict[int, float] = {}
    for run in runs:
        histogram = as_mapping(as_mapping(run.result.get("staleness")).get("histogram"))
        for lag, count in histogram.items():
            if str(lag).isdecimal():
                counts[int(lag)] = counts.get(int(lag), 0.0) + (as_finite(count) or 0.0)
    return counts
