"""Metrics of a run in progress in Prometheus' text exposition format.

Format: https://prometheus.io/docs/instrumenting/exposition_formats/
"""

from __future__ import annotations

from collections.abc import Iterable

from paceline.telemetry.live_run import LiveRun
from paceline.telemetry.metrics import View, metrics_in

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

Row = tuple[dict[str, str], float]


def expose(live: LiveRun) -> str:
    """Returns all current metrics; names that end in `_total` count from the start of the run."""
    out: list[str] = []
    _progress(live, out)
    _processes(live, out)
    _machines(live, out)
    current = [({"rule": v.rule, "process": v.who}, 1.0) for v in live.active_verdicts.values()]
    _family(out, "verdict", "gauge", "A current verdict.", current)
    return "".join(out)


def _progress(live: LiveRun, out: list[str]) -> None:
    if live.progress is None:
        return
    for metric in metrics_in(View.PROMETHEUS):
        value = metric.live(live.progress) if metric.live is not None else None
        if value is not None:
            name = metric.family or metric.key
            kind = "counter" if name.endswith("_total") else "gauge"
            _family(out, name, kind, metric.description, [({}, float(value))])


def _processes(live: LiveRun, out: list[str]) -> None:
    totals = sorted(live.totals.items())

    def rows(attribute: str, **labels: str) -> list[Row]:
        return [({"process": who, **labels}, float(getattr(t, attribute))) for who, t in totals]

    cpu = rows("cpu_user_s", mode="user") + rows("cpu_system_s", mode="system")
    _family(out, "cpu_seconds_total", "counter", "CPU time.", cpu)
    text = "Run-queue wait, summed over threads."
    _family(out, "run_wait_seconds_total", "counter", text, rows("run_wait_s"))
    text = "Time throttled by a cgroup CPU quota."
    _family(out, "throttled_seconds_total", "counter", text, rows("throttled_s"))
    net = rows("net_in", direction="in") + rows("net_out", direction="out")
    _family(out, "network_bytes_total", "counter", "Bytes over TCP.", net)
    disk = rows("disk_read", direction="read") + rows("disk_write", direction="write")
    _family(
        out, "disk_bytes_total", "counter", "Bytes read from and written to block devices.", disk
    )
    _family(out, "steps_total", "counter", "Steps; for a server, updates.", rows("steps"))
    _family(out, "worker_samples_total", "counter", "Samples computed.", rows("samples"))
    resident: list[Row] = []
    phases: list[Row] = []
    for who, process in sorted(live.record.processes.items()):
        if not process.metrics:
            continue
        last = process.metrics[-1]
        resident.append(({"process": who}, float(last.rss)))
        for phase, seconds in process.phase_seconds(last).items():
            phases.append(({"process": who, "phase": phase}, seconds / last.dt))
    _family(out, "resident_bytes", "gauge", "Resident memory.", resident)
    _family(out, "phase_share", "gauge", "Fraction of the last second by time category.", phases)


def _machines(live: LiveRun, out: list[str]) -> None:
    cpu: list[Row] = []
    memory: list[Row] = []
    for who, events in live.record.hosts.items():
        last = events[-1]
        labels = {"host": last.host, "measured_by": who}
        for mode in ("user", "system", "iowait", "steal", "idle"):
            cpu.append(({**labels, "mode": mode}, getattr(last, f"cpu_{mode}") / last.dt))
        memory.append((labels, float(last.memory_used)))
    _family(out, "machine_cpu_cores", "gauge", "CPU cores by mode, in the last second.", cpu)
    _family(out, "machine_memory_bytes", "gauge", "Memory in use.", memory)


def _family(out: list[str], name: str, kind: str, text: str, rows: Iterable[Row]) -> None:
    lines = [_line(f"paceline_{name}", labels, value) for labels, value in rows]
    if lines:
        out.append(f"# HELP paceline_{name} {text}\n# TYPE paceline_{name} {kind}\n")
        out.extend(lines)


def _line(name: str, labels: dict[str, str], value: float) -> str:
    inside = ",".join(f'{key}="{_escape(text)}"' for key, text in labels.items())
    return f"{name}{{{inside}}} {value!r}\n" if inside else f"{name} {value!r}\n"


def _escape(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
