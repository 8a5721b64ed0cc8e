"""The Pareto front of accuracy and time."""

from __future__ import annotations

from paceline.report.charts import Figure, Trace, escape_plotly, style_strategies
from paceline.report.comparison import StrategyEntry, spread_of
from paceline.report.run_groups import RunGroup
from paceline.report.stats import as_finite, mean_of


def choose_measure(task: RunGroup) -> str:
    """Returns test accuracy if it is known, or else validation accuracy."""
    for measure in ("test_acc", "val_acc"):
        if any(spread_of(entry, measure)["mean"] is not None for entry in task.entries):
            return measure
    return "test_acc"


def find_frontier(task: RunGroup) -> list[StrategyEntry]:
    """Returns the Pareto-optimal entries in time and accuracy, by mean."""
    measure = choose_measure(task)
    known = [
        e
        for e in task.entries
        if e["seconds"]["mean"] and spread_of(e, measure)["mean"] is not None
    ]
    ranked = sorted(known, key=lambda e: (mean_of(e["seconds"]), -mean_of(spread_of(e, measure))))
    front: list[StrategyEntry] = []
    for entry in ranked:
        if not front or mean_of(spread_of(entry, measure)) > mean_of(spread_of(front[-1], measure)):
            front.append(entry)
    return front


def draw_frontier(task: RunGroup) -> Figure | None:
    """Draws runs as small points and means as large ones; None with fewer than two strategies."""
    measure = choose_measure(task)
    front = find_frontier(task)
    known = [
        e
        for e in task.entries
        if e["seconds"]["mean"] and spread_of(e, measure)["mean"] is not None
    ]
    if len(known) < 2:
        return None
    styles = style_strategies([entry["label"] for entry in task.entries])
    traces: list[Trace] = [
        {
            "type": "scatter",
            "mode": "lines",
            "name": "frontier",
            "x": [entry["seconds"]["mean"] for entry in front],
            "y": [spread_of(entry, measure)["mean"] for entry in front],
            "line": {"color": "#888888", "width": 1.5, "dash": "dot", "shape": "hv"},
            "hoverinfo": "skip",
        }
    ]
    on_front = {entry["label"] for entry in front}
    for number, entry in enumerate(known):
        colour = styles[entry["label"]][0]
        runs = [run for run in task.runs_of(entry) if run.is_done]
        points = [
            (as_finite(r.result.get("seconds")), as_finite(r.result.get(measure))) for r in runs
        ]
        points = [p for p in points if None not in p]
        if len(points) > 1:
            traces.append(
                {
                    "type": "scatter",
                    "mode": "markers",
                    "name": f"{escape_plotly(entry['label'])}, single runs",
                    "x": [p[0] for p in points],
                    "y": [p[1] for p in points],
                    "opacity": 0.55,
                    "marker": {"color": colour, "size": 5},
                    "hovertemplate": "%{y} in %{x:.1f} s<extra>%{fullData.name}</extra>",
                }
            )
        traces.append(
            {
                "type": "scatter",
                "mode": "markers",
                "name": escape_plotly(entry["label"]),
                "x": [entry["seconds"]["mean"]],
                "y": [spread_of(entry, measure)["mean"]],
                "marker": {
                    "color": colour,
                    "size": 13,
                    "symbol": SYMBOLS[number % len(SYMBOLS)]
                    + ("" if entry["label"] in on_front else "-open"),
                    "line": {"width": 2, "color": colour},
                },
                "hovertemplate": "%{y} in %{x:.1f} s<extra>%{fullData.name}</extra>",
            }
        )
    layout = {
        "height": 340,
        "xaxis": {"title": {"text": "total seconds"}, "rangemode": "tozero"},
        "yaxis": {
            "title": {"text": "test accuracy" if measure == "test_acc" else "validation accuracy"},
            "tickformat": ".1~%",
            "automargin": True,
        },
        "margin": {"l": 10, "r": 12, "t": 12, "b": 44},
        "showlegend": False,
        "hovermode": "closest",
    }
    return {"data": traces, "layout": layout}


SYMBOLS = ("circle", "square", "diamond", "triangle-up", "pentagon", "hexagon")
"""Shapes in addition to colours, for color-blind readers."""
