"""The charts of the report, as plain Plotly figures (`{"data": [...], "layout": {...}}`).

Colours of text, grid and background are left to the page, which knows light from dark. Names are
escaped: Plotly reads its texts as a kind of HTML, links included.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from itertools import cycle
from typing import Any

from paceline.report.comparison import mean_metric
from paceline.report.number_format import format_number, format_seconds
from paceline.report.runs import (
    ReportRun,
    RunGroup,
    average_phases,
    finished_or_all,
    group_by_label,
)
from paceline.report.stats import interpolate
from paceline.telemetry.schema import as_finite, as_mapping

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

SYMBOLS = ("circle", "square", "diamond", "triangle-up", "pentagon", "hexagon")
"""Shapes in addition to colours, for color-blind readers."""

LOG_AXIS_RATIO = 30.0
"""A loss that falls by more than this is drawn on a logarithmic axis."""

PERCENT_AXIS: Trace = {"tickformat": ".1~%", "automargin": True}


def escape_plotly(text: object) -> str:
    return escape(str(text), quote=False)


def style_strategies(labels: Iterable[str]) -> dict[str, tuple[str, str]]:
    """Returns a colour and a dash per strategy, by its position in the report."""
    styles = [(colour, dash) for dash in DASHES for colour in STRATEGY_COLOURS]
    return dict(zip(labels, cycle(styles), strict=False))


def make_figure(traces: list[Trace], height: int, x: Trace, y: Trace, **layout: Any) -> Figure:
    margin = {"l": 10, "r": 12, "t": 12, "b": 44}
    common = {"height": height, "xaxis": x, "yaxis": y, "margin": margin, "showlegend": False}
    return {"data": traces, "layout": common | layout}


def make_axis(title: str, **facts: Any) -> Trace:
    return {"title": {"text": title}, **facts}


def make_series(
    kind: str, name: str, xs: Sequence[Any], ys: Sequence[Any], hover: str, **facts: Any
) -> Trace:
    series = {"type": kind, "name": escape_plotly(name), "x": xs, "y": ys, "hovertemplate": hover}
    return {**series, **facts}


def make_scatter(name: str, xs: Sequence[Any], ys: Sequence[Any], mode: str, **facts: Any) -> Trace:
    hover = "%{y} at %{x}<extra>%{fullData.name}</extra>"
    return make_series("scatter", name, xs, ys, hover, **{"mode": mode, **facts})


def make_line(name: str, points: Sequence[tuple[float, Any]], style: tuple[str, str]) -> Trace:
    """Returns a bold line through points (x, y)."""
    colour, dash = style
    line = {"color": colour, "dash": dash, "width": 2.5}
    marker = {"color": colour, "size": 5}
    xs, ys = [x for x, _ in points], [y for _, y in points]
    return make_scatter(name, xs, ys, "lines+markers", line=line, marker=marker)


def draw_curves(runs: Sequence[ReportRun], measure: str, *, against: str) -> Figure | None:
    """Draws a metric of the history over `epochs` or `seconds`; None if no run has a value.

    One colour a strategy. With several seeds each is a thin line under the bold mean; the mean at
    an epoch is taken over the runs that are done, at their mean time.
    """
    groups = group_by_label(runs)
    axis = 0 if against == "epochs" else 1
    traces: list[Trace] = []
    shapes: list[Trace] = []
    marks: set[tuple[float, str]] = set()
    values: list[float] = []
    for label, style in style_strategies(groups).items():
        group = [run for run in groups[label] if run.list_points(measure)]
        is_bold = len(group) == 1
        for run in group:
            points = [(point[axis], point[2]) for point in run.list_points(measure)]
            xs, ys = [x for x, _ in points], [y for _, y in points]
            values += ys
            seed = run.result.get("seed")
            line = make_line(label + (f", seed {seed}" if seed is not None else ""), points, style)
            if not is_bold:
                line |= {"opacity": 0.45, "line": {**line["line"], "width": 1}}
                line["mode"] = "lines+markers" if len(points) == 1 else "lines"
            traces.append(line)
            for switch in run.switches:
                x = run.locate_switch(switch)[axis]
                traces.append(
                    make_switch_marker(run, switch, (x, interpolate(xs, ys, x)), style[0])
                )
                shapes.append(make_switch_line(x, style[0], is_bold=is_bold))
                marks.add((x, describe_switch(switch)))
        if len(group) > 1:
            done = finished_or_all(group)
            name = f"{label}, mean of {len(done)} seeds"
            traces.append(make_line(name, average_points(done, measure, axis), style))
    if not traces:
        return None
    y_axis: Trace = {"automargin": True, "rangemode": "normal"}
    if not measure.endswith("loss"):
        y_axis["tickformat"] = ".1~%"
    elif min(values) > 0 and max(values) / min(values) > LOG_AXIS_RATIO:
        y_axis |= {"type": "log", "tickmode": "array", "tickvals": list_log_ticks(values)}
    labels = make_switch_labels(sorted(marks), max(max(t["x"]) for t in traces))
    x_axis = make_axis(against, rangemode="tozero")
    facts = {"shapes": shapes, "annotations": labels, "hovermode": "closest"}
    return make_figure(traces, 320, x_axis, y_axis, **facts)


def list_log_ticks(values: Sequence[float]) -> list[float]:
    """Returns ticks at 1, 2 and 5 times powers of ten, or only powers over a long range."""
    powers = range(math.floor(math.log10(min(values))), math.ceil(math.log10(max(values))) + 1)
    steps = (1, 2, 5) if len(powers) <= 4 else (1,)
    return [float(f"{step}e{power}") for power in powers for step in steps]


def average_points(
    runs: Sequence[ReportRun], measure: str, axis: int
) -> list[tuple[float, float | None]]:
    """Returns the mean of the runs at each epoch that all of them reached."""
    by_epoch: dict[float, list[tuple[float, float, float]]] = {}
    for run in runs:
        for point in run.list_points(measure):
            by_epoch.setdefault(point[0], []).append(point)
    whole = [group for _, group in sorted(by_epoch.items()) if len(group) == len(runs)]
    count = len(runs)
    means = [(sum(p[axis] for p in g) / count, sum(p[2] for p in g) / count) for g in whole]
    return [*means] or [(0.0, None)]


def describe_switch(switch: Mapping[str, Any]) -> str:
    return f"{switch.get('from', '?')} → {switch.get('to', '?')}"


def make_switch_marker(
    run: ReportRun, switch: Mapping[str, Any], place: tuple[float, float], colour: str
) -> Trace:
    """Returns a diamond on the curve of a run, with the switch as its hover text."""
    lines = [
        f"switch {describe_switch(switch)}",
        f"at {format_number(as_finite(switch.get('samples')))} samples",
        f"pause {format_seconds(as_finite(switch.get('pause_s')))}, "
        f"drain {format_seconds(as_finite(switch.get('drain_s')))}",
        str(switch.get("reason") or ""),
    ]
    return make_scatter(
        f"{run.label}, switch",
        *([place[0]], [place[1]], "markers"),
        text=["<br>".join(escape_plotly(line) for line in lines if line)],
        marker={"color": colour, "size": 9, "symbol": "diamond-open", "line": {"width": 2}},
        hovertemplate="%{text}<extra>%{fullData.name}</extra>",
    )


def make_switch_line(x: float, colour: str, *, is_bold: bool) -> Trace:
    place = {"xref": "x", "yref": "paper", "x0": x, "x1": x, "y0": 0, "y1": 1, "layer": "below"}
    line = {"color": colour, "width": 1.5 if is_bold else 1, "dash": "dot"}
    opacity = 0.8 if is_bold else 0.45
    return {"type": "line", "name": "switch", **place, "opacity": opacity, "line": line}


def make_switch_labels(switches: Sequence[tuple[float, str]], x_most: float) -> list[Trace]:
    """Returns one vertical label for switches that are close together, at the last of them."""
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
        place = {"x": cluster[-1][0], "xref": "x", "xanchor": "left"}
        place |= {"y": 0.02, "yref": "paper", "yanchor": "bottom"}
        short = escape_plotly(text if len(text) <= 40 else text[:39] + "…")
        style = {"textangle": -90, "showarrow": False, "font": {"size": 11}}
        labels.append({**place, "text": short, **style})
    return labels


def draw_phases(runs: Sequence[ReportRun]) -> list[tuple[str, int, Figure]]:
    """Draws the time categories: label, number of runs and a bar per worker, per strategy.

    All share one time axis, so that the lengths of bars compare across strategies.
    """
    found = [
        (label, len(finished_or_all(group)), phases)
        for label, group in group_by_label(runs).items()
        if (phases := average_phases(group))
    ]
    longest_s = max((sum(p.values()) for _, _, f in found for p in f.values()), default=0.0)
    return [(label, count, draw_bars(phases, longest_s)) for label, count, phases in found]


def draw_bars(phases: Mapping[str, Mapping[str, float]], longest_s: float) -> Figure:
    workers = [escape_plotly(worker) for worker in phases]
    hover = "%{fullData.name}: %{x:.3~f} s<extra>%{y}</extra>"
    traces = []
    for name, (colour, hatching) in PHASE_STYLES.items():
        seconds = [worker.get(name, 0.0) for worker in phases.values()]
        if any(seconds):
            pattern = {"shape": hatching, "fillmode": "overlay", "fgcolor": "#333333", "size": 5}
            style = {"orientation": "h", "marker": {"color": colour, "pattern": pattern}}
            traces.append(make_series("bar", name, seconds, workers, hover, **style))
    x = make_axis("seconds", range=[0, longest_s * 1.02 or 1])
    y = {"autorange": "reversed", "type": "category", "automargin": True}
    figure = make_figure(traces, 72 + 26 * len(phases), x, y, barmode="stack", bargap=0.25)
    figure["layout"]["margin"]["t"] = 4
    return figure


def draw_staleness(runs: Sequence[ReportRun]) -> Figure | None:
    """Draws the fraction of updates by staleness; None if no update was stale."""
    groups = group_by_label(runs)
    hover = "staleness %{x}: %{y:.1%} (%{customdata:,} updates)<extra>%{fullData.name}</extra>"
    traces: list[Trace] = []
    for label, (colour, _) in style_strategies(groups).items():
        counts = count_staleness(groups[label])
        total = sum(counts.values())
        if any(count for lag, count in counts.items() if lag > 0):
            lags = sorted(counts)
            shares = [counts[lag] / total for lag in lags]
            facts = {"customdata": [counts[lag] for lag in lags], "marker": {"color": colour}}
            traces.append(make_series("bar", label, lags, shares, hover, **facts))
    if not traces:
        return None
    widest = max(max(trace["x"]) for trace in traces)
    x = make_axis("staleness in updates", **({"dtick": 1} if widest <= 20 else {}))
    y = make_axis("share of updates", tickformat=".0~%", automargin=True)
    return make_figure(traces, 300, x, y, barmode="group")


def count_staleness(runs: Sequence[ReportRun]) -> dict[int, float]:
    counts: dict[int, float] = {}
    for run in runs:
        histogram = as_mapping(as_mapping(run.result.get("staleness")).get("histogram"))
        for lag, count in histogram.items():
            if str(lag).isdecimal():
                counts[int(lag)] = counts.get(int(lag), 0.0) + (as_finite(count) or 0.0)
    return counts


def draw_frontier(task: RunGroup) -> Figure | None:
    """Draws runs as small points and means as large ones; None with fewer than two strategies."""
    known = task.list_frontier_points()
    if len(known) < 2:
        return None
    measure, word = task.choose_measure()
    front = task.find_frontier()
    frontier = make_scatter(
        "frontier",
        [mean_metric(entry, "seconds") for entry in front],
        [mean_metric(entry, measure) for entry in front],
        "lines",
        line={"color": "#888888", "width": 1.5, "dash": "dot", "shape": "hv"},
        hoverinfo="skip",
    )
    del frontier["hovertemplate"]
    traces = [frontier]
    hover = "%{y} in %{x:.1f} s<extra>%{fullData.name}</extra>"
    styles = style_strategies(entry["label"] for entry in task.entries)
    for number, (seconds, accuracy, entry) in enumerate(known):
        label = entry["label"]
        colour, _ = styles[label]
        results = [run.result for run in task.done_runs_of(entry)]
        pairs = [(as_finite(r.get("seconds")), as_finite(r.get(measure))) for r in results]
        points = [pair for pair in pairs if None not in pair]
        if len(points) > 1:
            xs, ys = zip(*points, strict=True)
            small = {"opacity": 0.55, "marker": {"color": colour, "size": 5}}
            name = f"{label}, single runs"
            traces.append(make_scatter(name, xs, ys, "markers", hovertemplate=hover, **small))
        symbol = SYMBOLS[number % len(SYMBOLS)] + ("" if entry in front else "-open")
        marker = {"color": colour, "size": 13, "symbol": symbol}
        marker["line"] = {"width": 2, "color": colour}
        large = {"marker": marker, "hovertemplate": hover}
        traces.append(make_scatter(label, [seconds], [accuracy], "markers", **large))
    x, y = make_axis("total seconds", rangemode="tozero"), make_axis(word, **PERCENT_AXIS)
    return make_figure(traces, 340, x, y, hovermode="closest")
