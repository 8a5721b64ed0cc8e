"""Exports a run in Chrome's trace format, for Perfetto (ui.perfetto.dev) and chrome://tracing.

Format: https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU
(complete events `X`, counters `C`, instants `i`, names `M`; microseconds).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path

from paceline.errors import UsageError
from paceline.report.event_text import describe_event
from paceline.telemetry.events import StepSummary
from paceline.telemetry.reader import ProcessRecord, RunRecord, read_run
from paceline.telemetry.run_folder import COORDINATOR

TraceEvent = dict[str, object]

ORDER = ("wait", "input", "queue", "forward", "backward", "comm_exposed", "optimizer")
"""Only sums per step are recorded; inside a step they are drawn in this order."""
BETWEEN = ("startup", "eval", "switch", "other")
"""Time outside steps is known per second: drawn at the beginning of each."""


def write_trace(folder: Path, path: Path) -> Path:
    """Writes the trace of a run. Raises UsageError if the folder has no events."""
    run = read_run(folder)
    if not run.processes:
        raise UsageError(f"{folder} has no events; choose the folder of a run")
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", encoding="utf-8") as file:
        file.write('{"displayTimeUnit":"ms","traceEvents":[\n')
        file.writelines(
            ("" if index == 0 else ",\n") + json.dumps(event, separators=(",", ":"))
            for index, event in enumerate(trace_events(run))
        )
        file.write("\n]}\n")
    return path


def trace_events(run: RunRecord) -> Iterator[TraceEvent]:
    numbers = {who: number for number, who in enumerate(sorted(run.processes, key=_rank))}
    for who, number in numbers.items():
        name = "coordinator" if who == COORDINATOR else who.replace("-", " ")
        yield _name("process_name", number, name)
        yield {**_name("process_sort_index", number, ""), "args": {"sort_index": number}}
        process = run.processes[who]
        yield from _steps(process, number)
        yield from _phases(process, number)
        yield from _counters(process, number)
    yield from _run_events(run, numbers.get(COORDINATOR, 0))


def _rank(who: str) -> tuple[int, int]:
    kind, _, number = who.partition("-")
    return ("run", "worker", "server").index(kind), int(number or 0)


def _name(kind: str, pid: int, name: str) -> TraceEvent:
    return {"ph": "M", "name": kind, "pid": pid, "tid": 0, "args": {"name": name}}


def _slice(
    name: str, pid: int, tid: int, at_us: float, took_us: float, **args: object
) -> TraceEvent:
    slice_: TraceEvent = {"ph": "X", "name": name, "pid": pid, "tid": tid}
    slice_ |= {"ts": round(at_us, 1), "dur": round(took_us, 1)}
    return {**slice_, "args": args} if args else slice_


def _sequence(
    pid: int, tid: int, at_us: float, phases: Iterable[tuple[str, float]]
) -> Iterator[TraceEvent]:
    """Yields time categories (name, microseconds) one after another."""
    for name, us in phases:
        if us > 0 and name != "idle":
            yield _slice(name, pid, tid, at_us, us)
        at_us += us


def _steps(process: ProcessRecord, pid: int) -> Iterator[TraceEvent]:
    seen = False
    for step in process.iter_steps():
        seen = True
        phases = [(name, getattr(step, name)) for name in ORDER]
        inside_us = sum(us for _, us in phases)
        # Evaluation or a switch before the step is not part of it.
        at_us = step.ended * 1e6 - inside_us
        about = {name: getattr(step, name) for name in ("number", "epoch", "loss", "staleness")}
        yield _slice("step", pid, 1, at_us, inside_us, **about, samples=step.samples)
        yield from _sequence(pid, 1, at_us, phases)
    if seen:
        yield {**_name("thread_name", pid, "steps"), "tid": 1}
    for window in process.steps:
        if isinstance(window, StepSummary):
            at_us, took_us = window.began * 1e6, (window.t - window.began) * 1e6
            about = {"steps": window.count, "epoch": window.epoch, **window.phases_us}
            yield _slice("steps", pid, 1, at_us, took_us, **about)


def _phases(process: ProcessRecord, pid: int) -> Iterator[TraceEvent]:
    """Yields the time categories of each second: all of a server, outside steps of a worker."""
    for event in process.metrics:
        seconds = process.phase_seconds(event) if process.is_server or event.phases else {}
        names = seconds if process.is_server else BETWEEN
        phases = [(name, seconds.get(name, 0.0) * 1e6) for name in names]
        tid = 1 if process.is_server else 2
        yield from _sequence(pid, tid, (event.t - event.dt) * 1e6, phases)


def _counters(process: ProcessRecord, pid: int) -> Iterator[TraceEvent]:
    for event in process.metrics:
        dt = event.dt
        if dt < 0.2:
            continue
        tracks = {
            "cpu (cores)": {
                "user": event.cpu_user / dt,
                "system": event.cpu_system / dt,
                "run-queue wait": event.run_wait / dt,
                "throttled": event.throttled / dt,
            },
            "memory (MB)": {"resident": event.rss / 1e6},
            "network (MB/s)": {"in": event.net_in / dt / 1e6, "out": event.net_out / dt / 1e6},
            "disk (MB/s)": {
                "read": event.disk_read / dt / 1e6,
                "write": event.disk_write / dt / 1e6,
            },
        }
        at_us = round((event.t - dt) * 1e6, 1)
        for name, values in tracks.items():
            args = {k: round(v, 4) for k, v in values.items()}
            yield {"ph": "C", "name": name, "pid": pid, "tid": 0, "ts": at_us, "args": args}


def _run_events(run: RunRecord, pid: int) -> Iterator[TraceEvent]:
    for event in run.events:
        name = describe_event(event)
        if name is not None:
            at_us = round(event.t * 1e6, 1)
            yield {"ph": "i", "s": "g", "name": name, "pid": pid, "tid": 0, "ts": at_us}
