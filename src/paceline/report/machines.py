"""Resources of whole machines: minimum, mean and maximum while training, and charts over time.

A cluster monitor shows the same: CPU by mode, load, memory, network and disk, per machine and for
all of them together.
"""

from collections.abc import Iterable, Iterator, Sequence

from paceline.report import charts
from paceline.report.charts import Figure, Trace
from paceline.report.machine_series import METRICS, MachineMetric, add_up
from paceline.report.runs import ReportRun, RunGroup, finished_or_all
from paceline.report.stats import Spread, mean_and_std
from paceline.report.tables import Column, ReportTable, make_table

CLUSTER = "all machines"
FIGURES = {
    "cpu": ("CPU per machine", "% of the machine"),
    "load": ("Load per machine", "load average"),
    "memory": ("Memory per machine", "GB"),
    "network": ("Network per machine", "MB/s"),
    "disk": ("Disk per machine", "MB/s"),
}


def summarize(metric: MachineMetric, runs: Iterable[ReportRun]) -> dict[str, Spread]:
    """Returns minimum, mean and maximum during training by machine, over several runs."""
    values: dict[str, list[float]] = {}
    for run in runs:
        cluster = run.cluster
        for machine in cluster.machines:
            windows = machine.between(cluster.from_s, cluster.to_s)
            values.setdefault(machine.name, []).extend(map(metric.value, windows))
        if sum(machine.trains for machine in cluster.machines) > 1:
            values.setdefault(CLUSTER, []).extend(add_up(metric, cluster))
    return {name: mean_and_std(found) for name, found in values.items()}


def make_machine_table(task: RunGroup) -> ReportTable:
    records = []
    for entry in task.entries:
        runs = task.done_runs_of(entry)
        for metric in METRICS:
            for machine, spread in summarize(metric, runs).items():
                if spread["n"] and spread["max"]:
                    cells: dict[Column, object] = {
                        Column("strategy"): entry["label"],
                        Column("machine"): machine,
                        Column("metric"): metric.title,
                    }
                    cells |= {Column(n, "count"): spread[n] for n in ("min", "mean", "max")}
                    records.append(cells)
    return make_table(
        "machines",
        "Machines during training",
        records,
        "Whole machines, about once per second, with everything else that ran on them; from the "
        "first step to the end of the last epoch. Of all machines: the mean of percentages, the "
        "sum of the others. Processes of one machine exchange data through memory or loopback, "
        "which is not network. Metrics that were always 0 are omitted.",
    )


def draw_machines(task: RunGroup) -> list[tuple[str, str, Figure]]:
    """Draws each group of metrics over time: name, heading and figure.

    One line per strategy, machine and metric, of the first finished run of the strategy.
    """
    chosen = [(e["label"], finished_or_all(task.runs_of(e))[0]) for e in task.entries]
    styles = charts.style_strategies(label for label, _ in chosen)
    found = []
    for name, (heading, axis) in FIGURES.items():
        metrics = [metric for metric in METRICS if metric.figure == name]
        traces = [
            trace
            for label, run in chosen
            for trace in draw_lines(label, run, metrics, styles[label][0])
        ]
        if traces:
            x = charts.make_axis("seconds", rangemode="tozero")
            y = charts.make_axis(axis, rangemode="tozero", automargin=True)
            legend = {"showlegend": True, "legend": {"orientation": "h", "y": -0.25}}
            figure = charts.make_figure(traces, 300 + 12 * len(traces), x, y, **legend)
            found.append((f"machines-{name}", heading, figure))
    return found


def draw_lines(
    label: str, run: ReportRun, metrics: Sequence[MachineMetric], colour: str
) -> Iterator[Trace]:
    machines = run.cluster.machines
    for number, machine in enumerate(machines):
        windows = machine.thinned()
        for place, metric in enumerate(metrics):
            values = [round(metric.value(window), 4) for window in windows]
            if not any(values):
                continue
            parts = [
                label,
                machine.name if len(machines) > 1 else "",
                metric.title.partition(",")[0] if len(metrics) > 1 else "",
            ]
            dash = charts.DASHES[(number + place) % len(charts.DASHES)]
            line = {"color": colour, "dash": dash, "width": 1.5}
            seconds = [round(window.t, 2) for window in windows]
            name = ", ".join(part for part in parts if part)
            yield charts.make_scatter(name, seconds, values, "lines", line=line)
