"""State of a run in progress, and its metrics in Prometheus' text exposition format.

The state is the metrics of the last minute, totals per process, and verdicts.
Format: https://prometheus.io/docs/instrumenting/exposition_formats/
"""

from collections.abc import Iterator
from dataclasses import dataclass

from paceline.telemetry import events as ev
from paceline.telemetry.metrics import View, metrics_in
from paceline.telemetry.reader import RunRecord
from paceline.telemetry.schema import RunConfig
from paceline.telemetry.verdicts import LIVE_S, Verdict, verdicts

METRICS_KEPT = 75
"""Metrics events kept per process: one per second."""
CLEAR_AFTER_MISSES = 3
"""Number of consecutive checks without a match after which a verdict is cleared."""

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

Row = tuple[dict[str, str], float]
Family = tuple[str, str, list[Row]]
"""Name without prefix, description and rows."""


@dataclass
class ResourceTotals:
    """Resource usage of a process so far."""

    seconds: float = 0.0
    cpu_user_s: float = 0.0
    cpu_system_s: float = 0.0
    run_wait_s: float = 0.0
    throttled_s: float = 0.0
    cpu_peak: float = 0.0
    """CPU cores in the busiest second."""
    rss_sum: float = 0.0
    rss_peak: int = 0
    net_in: int = 0
    net_out: int = 0
    net_in_peak: float = 0.0
    net_out_peak: float = 0.0
    """Bytes per second."""
    disk_read: int = 0
    disk_write: int = 0
    steps: int = 0
    samples: int = 0

    def add(self, event: ev.ProcessMetrics) -> None:
        dt = event.dt
        self.seconds += dt
        for name in ("cpu_user", "cpu_system", "run_wait", "throttled"):
            setattr(self, f"{name}_s", getattr(self, f"{name}_s") + getattr(event, name))
        self.rss_sum += event.rss * dt
        self.rss_peak = max(self.rss_peak, event.rss)
        for name in ("net_in", "net_out", "disk_read", "disk_write", "steps", "samples"):
            setattr(self, name, getattr(self, name) + getattr(event, name))
        if dt >= 0.5:  # The last window may be too short for a rate.
            self.cpu_peak = max(self.cpu_peak, (event.cpu_user + event.cpu_system) / dt)
            self.net_in_peak = max(self.net_in_peak, event.net_in / dt)
            self.net_out_peak = max(self.net_out_peak, event.net_out / dt)

    def describe(self) -> dict[str, float]:
        """Returns the row of the process in `resources` of result.json."""
        whole = max(self.seconds, 1e-9)
        values = {**vars(self), "cpu_mean": (self.cpu_user_s + self.cpu_system_s) / whole}
        values["rss_mean"] = int(self.rss_sum / whole)
        digits = {"cpu_mean": 4, "cpu_peak": 4, "net_in_peak": 1, "net_out_peak": 1}
        internal = ("rss_sum", "steps", "samples")
        return {n: round(v, digits.get(n, 6)) for n, v in values.items() if n not in internal}


class LiveRun:
    """Collects events of all processes and reports changes of verdicts."""

    def __init__(self, config: RunConfig) -> None:
        self.record = RunRecord(config=config, keep=METRICS_KEPT)
        self.totals: dict[str, ResourceTotals] = {}
        self.active_verdicts: dict[tuple[str, str], Verdict] = {}
        """Current verdicts by rule and subject."""
        self._not_found: dict[tuple[str, str], int] = {}
        self.progress: ev.RunProgress | None = None
        """The latest totals from the coordinator."""

    def add(self, process: str, event: ev.Event) -> None:
        self.record.add(process, event)
        if isinstance(event, ev.ProcessMetrics):
            self.totals.setdefault(process, ResourceTotals()).add(event)

    def changed_verdicts(self, now_s: float) -> list[ev.VerdictChanged]:
        """Returns the verdicts that began or were cleared since the last call."""
        found = {v.key: v for v in verdicts(self.record, last_s=LIVE_S)}
        changes = []
        for key, verdict in found.items():
            if key not in self.active_verdicts:
                changes.append(verdict.to_event(now_s, ev.VERDICT_BEGAN))
            self.active_verdicts[key] = verdict
            self._not_found.pop(key, None)
        for key in [k for k in self.active_verdicts if k not in found]:
            self._not_found[key] = self._not_found.get(key, 0) + 1
            if self._not_found[key] >= CLEAR_AFTER_MISSES:
                changes.append(self.active_verdicts.pop(key).to_event(now_s, ev.VERDICT_OVER))
                del self._not_found[key]
        return changes


def expose(live: LiveRun) -> str:
    """Returns all current metrics; names that end in `_total` count from the start of the run."""
    families = [*_progress(live), *_processes(live), *_machines(live)]
    current = [({"rule": v.rule, "process": v.who}, 1.0) for v in live.active_verdicts.values()]
    families.append(("verdict", "A current verdict.", current))
    return "".join(_format(*family) for family in families if family[2])


def _progress(live: LiveRun) -> Iterator[Family]:
    if live.progress is None:
        return
    for metric in metrics_in(View.PROMETHEUS):
        value = metric.live(live.progress) if metric.live is not None else None
        if value is not None:
            yield metric.family or metric.key, metric.description, [({}, float(value))]


def _processes(live: LiveRun) -> Iterator[Family]:
    totals = sorted(live.totals.items())

    def rows(attribute: str, **labels: str) -> list[Row]:
        return [({"process": who, **labels}, float(getattr(t, attribute))) for who, t in totals]

    cpu = rows("cpu_user_s", mode="user") + rows("cpu_system_s", mode="system")
    yield "cpu_seconds_total", "CPU time.", cpu
    yield "run_wait_seconds_total", "Run-queue wait, summed over threads.", rows("run_wait_s")
    yield "throttled_seconds_total", "Time throttled by a cgroup CPU quota.", rows("throttled_s")
    net = rows("net_in", direction="in") + rows("net_out", direction="out")
    yield "network_bytes_total", "Bytes over TCP.", net
    disk = rows("disk_read", direction="read") + rows("disk_write", direction="write")
    yield "disk_bytes_total", "Bytes read from and written to block devices.", disk
    yield "steps_total", "Steps; for a server, updates.", rows("steps")
    yield "worker_samples_total", "Samples computed.", rows("samples")
    processes = sorted(live.record.processes.items())
    last = [(who, process, process.metrics[-1]) for who, process in processes if process.metrics]
    resident = [({"process": who}, float(event.rss)) for who, _, event in last]
    yield "resident_bytes", "Resident memory.", resident
    phases = [
        ({"process": who, "phase": phase}, seconds / event.dt)
        for who, process, event in last
        for phase, seconds in process.phase_seconds(event).items()
    ]
    yield "phase_share", "Fraction of the last second by time category.", phases


def _machines(live: LiveRun) -> Iterator[Family]:
    hosts = [(who, events[-1]) for who, events in live.record.hosts.items()]
    labelled = [({"host": last.host, "measured_by": who}, last) for who, last in hosts]
    cpu = [
        ({**labels, "mode": mode}, getattr(last, f"cpu_{mode}") / last.dt)
        for labels, last in labelled
        for mode in ("user", "system", "iowait", "steal", "idle")
    ]
    yield "machine_cpu_cores", "CPU cores by mode, in the last second.", cpu
    memory = [(labels, float(last.memory_used)) for labels, last in labelled]
    yield "machine_memory_bytes", "Memory in use.", memory


def _format(name: str, text: str, rows: list[Row]) -> str:
    kind = "counter" if name.endswith("_total") else "gauge"
    head = f"# HELP paceline_{name} {text}\n# TYPE paceline_{name} {kind}\n"
    return head + "".join(_line(f"paceline_{name}", labels, value) for labels, value in rows)


def _line(name: str, labels: dict[str, str], value: float) -> str:
    inside = ",".join(f'{key}="{_escape(text)}"' for key, text in labels.items())
    return f"{name}{{{inside}}} {value!r}\n" if inside else f"{name} {value!r}\n"


def _escape(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
