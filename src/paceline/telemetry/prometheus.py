"""Metrics of a run in progress in Prometheus' text exposition format.

Format: https://prometheus.io/docs/instrumenting/exposition_formats/
"""

from __future__ import annotations

from collections.abc import Iterator

from paceline.telemetry.live_run import LiveRun
from paceline.telemetry.metrics import View, metrics_in

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

Row = tuple[dict[str, str], float]
Family = tuple[str, str, list[Row]]
"""Name without prefix, description and rows."""


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
