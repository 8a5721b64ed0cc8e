"""Resources of the machines of a run over time, read from its events."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from paceline.telemetry.events import EpochEnded, HostMetrics, StrategyStarted
from paceline.telemetry.reader import RunRecord
from paceline.telemetry.run_folder import COORDINATOR
from paceline.telemetry.steps import merge_metrics

MIN_WINDOW_S = 0.5
"""Rates of shorter windows, at the start and the end of a process, are not comparable."""
MAX_POINTS = 240
"""Points of a line in a chart; longer series are merged."""


@dataclass(frozen=True)
class MachineMetric:
    """A metric of a machine; `value` reads it from the window of about a second."""

    title: str
    value: Callable[[HostMetrics], float]
    over_machines: Literal["sum", "mean"] = "sum"
    figure: str = ""
    """Name of the chart that shows it."""


def _cpu_seconds(event: HostMetrics) -> float:
    modes = event.cpu_user + event.cpu_system + event.cpu_iowait + event.cpu_steal + event.cpu_idle
    return modes or math.inf


def _per_second(name: str, unit: float = 1e6) -> Callable[[HostMetrics], float]:
    return lambda event: float(getattr(event, name)) / event.dt / unit


METRICS = (
    MachineMetric("CPU user, %", lambda e: 100 * e.cpu_user / _cpu_seconds(e), "mean"),
    MachineMetric("CPU system, %", lambda e: 100 * e.cpu_system / _cpu_seconds(e), "mean"),
    MachineMetric(
        "CPU busy, %", lambda e: 100 * (e.cpu_user + e.cpu_system) / _cpu_seconds(e), "mean", "cpu"
    ),
    MachineMetric("load", lambda e: e.load, figure="load"),
    MachineMetric("memory used, GB", lambda e: e.memory_used / 1e9, figure="memory"),
    MachineMetric("memory cached, GB", lambda e: e.memory_cached / 1e9),
    MachineMetric("network in, MB/s", _per_second("net_in"), figure="network"),
    MachineMetric("network out, MB/s", _per_second("net_out"), figure="network"),
    MachineMetric("loopback, MB/s", _per_second("loopback"), figure="network"),
    MachineMetric("disk read, MB/s", _per_second("disk_read"), figure="disk"),
    MachineMetric("disk written, MB/s", _per_second("disk_write"), figure="disk"),
)


@dataclass(frozen=True)
class MachineSeries:
    """One machine of a run; `trains` is false where only the coordinator runs."""

    name: str
    windows: Sequence[HostMetrics]
    trains: bool = True

    def between(self, from_s: float, to_s: float) -> list[HostMetrics]:
        """Returns the windows of training; all, if training was shorter than a window."""
        whole = [w for w in self.windows if w.dt >= MIN_WINDOW_S] or list(self.windows)
        return [w for w in whole if from_s <= w.t - w.dt / 2 <= to_s] or whole

    def thinned(self) -> list[HostMetrics]:
        whole = [w for w in self.windows if w.dt >= MIN_WINDOW_S] or list(self.windows)
        size = math.ceil(len(whole) / MAX_POINTS) or 1
        return [merge_metrics(whole[i : i + size]) for i in range(0, len(whole), size)]


@dataclass(frozen=True)
class ClusterRecord:
    """The machines of one run, and when it trained."""

    machines: list[MachineSeries] = field(default_factory=list)
    from_s: float = 0.0
    to_s: float = math.inf


def read_machines(record: RunRecord) -> ClusterRecord:
    """Returns the machines in the events of a run: a host name in a network namespace is one."""
    windows: dict[tuple[str, int], list[HostMetrics]] = {}
    samplers: dict[tuple[str, int], str] = {}
    for process, events in record.hosts.items():
        for event in events:
            key = (event.host, event.namespace)
            windows.setdefault(key, []).append(event)
            samplers.setdefault(key, process)
    with_workers = {
        (process.started.host, process.started.namespace)
        for process in record.processes.values()
        if process.started is not None
    }
    names = [host for host, _ in windows]
    machines = []
    for key, found in windows.items():
        name = key[0] if names.count(key[0]) == 1 else f"{key[0]}, {samplers[key]}"
        trains = not with_workers or key in with_workers or samplers[key] != COORDINATOR
        label = name if trains else f"{key[0]}, coordinator"
        machines.append(MachineSeries(label, sorted(found, key=lambda w: w.t), trains))
    started = [e.t for e in record.events if isinstance(e, StrategyStarted)]
    epochs = [e.t for e in record.events if isinstance(e, EpochEnded)]
    machines.sort(key=lambda machine: (not machine.trains, machine.name))
    return ClusterRecord(machines, min(started, default=0.0), max(epochs, default=math.inf))


def add_up(metric: MachineMetric, cluster: ClusterRecord) -> list[float]:
    """Returns the metric of all machines that train, for each second in which all were sampled."""
    machines = [machine for machine in cluster.machines if machine.trains]
    by_second: dict[int, dict[str, float]] = {}
    for machine in machines:
        for window in machine.between(cluster.from_s, cluster.to_s):
            by_second.setdefault(round(window.t), {})[machine.name] = metric.value(window)
    whole = [list(v.values()) for v in by_second.values() if len(v) == len(machines)]
    scale = len(machines) if metric.over_machines == "mean" else 1
    return [sum(values) / scale for values in whole]
