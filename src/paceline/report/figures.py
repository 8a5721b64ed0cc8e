"""Writes the figures of a report as SVG and PNG with matplotlib (extra `figures`)."""

from collections.abc import Mapping
from html import unescape
from pathlib import Path
from typing import Any

from paceline.errors import UsageError
from paceline.report.charts import Figure, Trace

DASH_STYLES = {"solid": "-", "dash": "--", "dot": ":", "dashdot": "-."}
MARKERS = {"circle": "o", "square": "s", "diamond": "D", "triangle-up": "^", "pentagon": "p",
           "hexagon": "h"}  # fmt: skip
HATCHINGS = {"": "", "/": "////", "x": "xxxx", ".": "...."}
WIDTH_IN = 6.3
LEGEND_LINE_IN = 0.16
DPI = 200


def require_matplotlib() -> None:
    """Raises UsageError if matplotlib is not installed."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise UsageError(
            "--figures requires matplotlib; run pip install 'paceline[figures]'"
        ) from None


def write_figures(figures: Mapping[str, Figure], folder: Path) -> None:
    """Writes each figure as NAME.svg and NAME.png."""
    for name, figure in figures.items():
        drawn = draw(figure)
        drawn.savefig(folder / f"{name}.svg", dpi=DPI, metadata={"Date": None})
        drawn.savefig(folder / f"{name}.png", dpi=DPI)


def draw(figure: Figure) -> Any:
    from matplotlib import rc_context
    from matplotlib.figure import Figure as Canvas

    layout, traces = figure["layout"], figure["data"]
    # Text stays text in the SVG, and the same data gives the same file.
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "paceline", "hatch.linewidth": 0.4}):
        named = len([t for t in traces if not name_series(t).startswith("_")])
        height = WIDTH_IN * layout["height"] / 520 + LEGEND_LINE_IN * (named + 1)
        canvas = Canvas(figsize=(WIDTH_IN, height), layout="constrained")
        axes = canvas.add_subplot()
        draw_bar_axes(axes, [t for t in traces if t["type"] == "bar"], layout)
        for trace in traces:
            if trace["type"] == "scatter":
                draw_scatter(axes, trace)
        style_axes(axes, layout)
        handles, labels = axes.get_legend_handles_labels()
        if labels:
            # Below the axes, because long strategy names would cover the curves.
            columns = 1 if max(map(len, labels)) > 30 else 3
            canvas.legend(
                handles, labels, loc="outside lower left", ncols=columns, fontsize=7, frameon=False
            )
        return canvas


def draw_scatter(axes: Any, trace: Trace) -> None:
    line, marker = trace.get("line", {}), trace.get("marker", {})
    mode = trace.get("mode", "lines")
    symbol = str(marker.get("symbol", "circle"))
    is_open = symbol.endswith("-open")
    colour = line.get("color") or marker.get("color") or "#333333"
    axes.plot(
        trace["x"],
        trace["y"],
        linestyle=DASH_STYLES[line.get("dash", "solid")] if "lines" in mode else "none",
        linewidth=0.7 * line.get("width", 2),
        drawstyle="steps-post" if line.get("shape") == "hv" else "default",
        color=colour,
        alpha=trace.get("opacity", 1.0),
        marker=MARKERS[symbol.removesuffix("-open")] if "markers" in mode else "",
        markersize=0.55 * marker.get("size", 5),
        markerfacecolor="white" if is_open else colour,
        label=name_series(trace),
    )


def name_series(trace: Trace) -> str:
    name = unescape(str(trace.get("name", "")))
    # Single seeds and marks on a curve have no entry in the legend.
    is_thin = trace.get("opacity", 1.0) < 1.0
    is_mark = trace.get("mode") == "markers" and str(name).endswith(", switch")
    return "_" + name if is_thin or is_mark or not name else name


def draw_bar_axes(axes: Any, traces: list[Trace], layout: Trace) -> None:
    if not traces:
        return
    if layout.get("barmode") == "stack":
        labels = [unescape(str(y)) for y in traces[0]["y"]]
        left = [0.0] * len(labels)
        for trace in traces:
            pattern = trace["marker"].get("pattern", {}).get("shape", "")
            axes.barh(
                labels,
                trace["x"],
                left=left,
                height=0.75,
                color=trace["marker"]["color"],
                hatch=HATCHINGS[pattern],
                edgecolor="#333333" if pattern else None,
                linewidth=0,
                label=trace["name"].replace("_", " "),
            )
            left = [a + b for a, b in zip(left, trace["x"], strict=True)]
        axes.invert_yaxis()
        return
    width = 0.8 / len(traces)
    for number, trace in enumerate(traces):
        shift = (number - (len(traces) - 1) / 2) * width
        axes.bar(
            [x + shift for x in trace["x"]],
            trace["y"],
            width=width,
            color=trace["marker"]["color"],
            label=unescape(trace["name"]),
        )


def style_axes(axes: Any, layout: Trace) -> None:
    from matplotlib.ticker import FuncFormatter

    for side in ("x", "y"):
        facts = layout[f"{side}axis"]
        if "title" in facts:
            axes.set(**{f"{side}label": facts["title"]["text"]})
        if "%" in facts.get("tickformat", ""):
            percent = FuncFormatter(lambda y, _: f"{100 * y:g}%")
            getattr(axes, f"{side}axis").set_major_formatter(percent)
        if facts.get("type") == "log":
            axes.set(**{f"{side}scale": "log"})
    if layout["xaxis"].get("rangemode") == "tozero":
        axes.set_xlim(left=0)
    for shape in layout.get("shapes", []):
        axes.axvline(shape["x0"], color=shape["line"]["color"], linewidth=0.8, linestyle=":")
    axes.grid(True, color="#dddddd", linewidth=0.5)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
