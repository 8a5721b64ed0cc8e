"""Charts that compare arms: bars of seconds, and seconds and milliseconds per step by batch."""

from collections.abc import Callable, Sequence

from paceline.report import charts
from paceline.report.charts import Figure, Trace
from paceline.report.reproduction.matching import Reproduced, group_workloads

NamedFigure = tuple[str, str, Figure]
"""Name, heading and figure."""
LEGEND = {"showlegend": True, "legend": {"orientation": "h", "y": -0.3}}


def draw_seconds(rows: Sequence[Reproduced]) -> list[NamedFigure]:
    """Draws the seconds of each arm as bars, one chart per workload."""
    found = []
    for workload, members in group_workloads(rows).items():
        known = [(row, row.mean("seconds")) for row in members]
        bars = [(describe_arm(row, members), s) for row, s in known if s is not None]
        if bars:
            names, seconds = [name for name, _ in bars], [s for _, s in bars]
            places = list(range(len(bars)))
            style = {"marker": {"color": charts.STRATEGY_COLOURS[0]}}
            hover = "%{y:.1f} s<extra></extra>"
            trace = charts.make_series("bar", "seconds", places, seconds, hover, **style)
            x = charts.make_axis(
                "", tickvals=places, ticktext=list(map(charts.escape_plotly, names))
            )
            y = charts.make_axis("seconds", automargin=True)
            figure = charts.make_figure([trace], 340, x, y)
            found.append((f"seconds-{workload}", f"Seconds, {workload}", figure))
    return found


def describe_arm(row: Reproduced, others: Sequence[Reproduced]) -> str:
    several = len({other.batch for other in others}) > 1
    return f"{row.label}, {row.batch}" if several else row.label


def draw_by_batch(
    rows: Sequence[Reproduced], values: dict[str, tuple[str, Callable[[Reproduced], float | None]]]
) -> list[NamedFigure]:
    """Draws each value over the batch size, a line per arm; nothing with a single batch."""
    found = []
    for workload, members in group_workloads(rows).items():
        if len({row.entry["batch"] for row in members}) < 2:
            continue
        for name, (axis, value) in values.items():
            lines: dict[str, list[tuple[float, float]]] = {}
            for row in members:
                y, batch = value(row), row.entry["batch"]
                if y is not None and batch is not None:
                    lines.setdefault(row.label, []).append((float(batch), y))
            styles = charts.style_strategies(lines)
            traces: list[Trace] = [
                charts.make_line(label, sorted(points), styles[label])
                for label, points in lines.items()
            ]
            if traces:
                x, y_axis = charts.make_axis("global batch", type="log"), charts.make_axis(axis)
                figure = charts.make_figure(traces, 320, x, y_axis, **LEGEND)
                heading = f"{axis.capitalize()} by batch, {workload}"
                found.append((f"{name}-by-batch-{workload}", heading, figure))
    return found
