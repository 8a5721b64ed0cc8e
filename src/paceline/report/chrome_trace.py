"""A run as a trace of Chrome's form: opens in Perfetto (ui.perfetto.dev) and chrome://tracing.

The form: https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU
(complete events `X`, counters `C`, instants `i`, names `M`; microseconds).
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from paceline.errors import UsageError
from paceline.telemetry.reader import Plain, ProcessRecord, RunRecord, read_run

ORDER = ("wait", "input", "queue", "forward", "backward", "comm_exposed", "optimizer")
"""Phases are summed by step; inside a step they are drawn in this order, one after another."""
BETWEEN = ("startup", "eval", "switch", "other")
"""What is no step is known by the second: drawn at the beginning of each."""


def write_trace(folder: Path, path: Path) -> Path:
    """Write what was recorded of a run; raises UsageError where nothing was."""
    run = read_run(folder)
    if not run.processes:
        raise UsageError(f"{folder} holds no events: name the folder of a run")
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", encoding="utf-8") as file:
        file.write('{"displayTimeUnit":"ms","traceEvents":[\n')
        file.writelines(
            ("" if index == 0 else ",\n") + json.dumps(event, separators=(",", ":"))
            for index, event in enumerate(trace_events(run))
        )
        file.write("\n]}\n")
    return path


def trace_events(run: RunRecord) -> Iterator[dict[str, Any]]:
    numbers = {who: number for number, who in enumerate(sorted(run.processes, key=_rank))}
    for who, number in numbers.items():
        name = "coordinator" if who == "run" else who.replace("-", " ")
        yield _name("process_name", number, name)
        yield {**_name("process_sort_index", number, ""), "args": {"sort_index": number}}
        process = run.processes[who]
        yield from _steps(process, number)
        yield from _counters(process, number)
        if process.is_server:
            yield from _server_phases(process, number)
    yield from _run_events(run, numbers.get("run", 0))


def _rank(who: str) -> tuple[int, int]:
    kind, _, number = who.partition("-")
    return ("run", "worker", "server").index(kind), int(number or 0)


def _name(kind: str, pid: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": pid, "tid": 0, "args": {"name": name}}


def _slice(name: str, pid: int, tid: int, at_us: float, took_us: float, **args: Any) -> Plain:
    slice_: Plain = {"ph": "X", "name": name, "pid": pid, "tid": tid}
    slice_ |= {"ts": round(at_us, 1), "dur": round(took_us, 1)}
    return {**slice_, "args": args} if args else slice_


def _steps(process: ProcessRecord, pid: int) -> Iterator[dict[str, Any]]:
    seen = False
    for step in process.iter_steps():
        seen = True
        phases = [(name, step.get(name, 0)) for name in ORDER]
        inside_us = sum(us for _, us in phases)
        # What came before the step (evaluation, a switch) is no part of it.
        at_us = step["ended"] * 1e6 - inside_us
        about: Plain = {k: step[k] for k in ("number", "epoch", "loss", "staleness") if k in step}
        about["samples"] = step["hi"] - step["lo"]
        yield _slice("step", pid, 1, at_us, inside_us, **about)
        for name, us in phases:
            if us > 0:
                yield _slice(name, pid, 1, at_us, us)
                at_us += us
    if seen:
        yield {**_name("thread_name", pid, "steps"), "tid": 1}
    for window in process.steps:
        if window.get("kind") == "steps_sum":
            at_us, took_us = window["began"] * 1e6, (window["t"] - window["began"]) * 1e6
            about = {"steps": window["count"], "epoch": window["epoch"], **window["phases_us"]}
            yield _slice("steps", pid, 1, at_us, took_us, **about)
    # What is not a step, from the vitals of each second.
    for vitals in process.vitals:
        if process.is_server or not vitals["phases"]:
            continue
        seconds = process.phase_seconds(vitals)
        at_us = (vitals["t"] - vitals["dt"]) * 1e6
        for name in BETWEEN:
            if seconds.get(name, 0.0) > 0:
                yield _slice(name, pid, 2, at_us, seconds[name] * 1e6)
                at_us += seconds[name] * 1e6


def _server_phases(process: ProcessRecord, pid: int) -> Iterator[dict[str, Any]]:
    """By the second: how much of it went where, one after another."""
    for vitals in process.vitals:
        at_us = (vitals["t"] - vitals["dt"]) * 1e6
        for name, seconds in process.phase_seconds(vitals).items():
            if seconds > 0 and name != "idle":
                yield _slice(name, pid, 1, at_us, seconds * 1e6)
            at_us += seconds * 1e6


def _counters(process: ProcessRecord, pid: int) -> Iterator[dict[str, Any]]:
    for vitals in process.vitals:
        dt = vitals["dt"]
        if dt < 0.2:
            continue
        tracks = {
            "cpu (cores)": {
                "user": vitals["cpu_user"] / dt,
                "system": vitals["cpu_system"] / dt,
                "waiting for a core": vitals["run_wait"] / dt,
                "throttled": vitals["throttled"] / dt,
            },
            "memory (MB)": {"resident": vitals["rss"] / 1e6},
            "network (MB/s)": {
                "in": vitals["net_in"] / dt / 1e6,
                "out": vitals["net_out"] / dt / 1e6,
            },
            "disk (MB/s)": {
                "read": vitals["disk_read"] / dt / 1e6,
                "write": vitals["disk_write"] / dt / 1e6,
            },
        }
        at_us = round((vitals["t"] - dt) * 1e6, 1)
        for name, values in tracks.items():
            args = {k: round(v, 4) for k, v in values.items()}
            yield {"ph": "C", "name": name, "pid": pid, "tid": 0, "ts": at_us, "args": args}


def _run_events(run: RunRecord, pid: int) -> Iterator[dict[str, Any]]:
    for event in run.events:
        kind, row = event.get("kind"), event.get("row") or {}
        name: str | None = None
        if kind == "phase":
            name = f"strategy {event['strategy']}"
        elif kind == "switch":
            name = f"switch {row.get('from')} -> {row.get('to')}"
        elif kind == "epoch":
            name = f"epoch {row.get('epoch')} ends"
        elif kind == "checkpoint":
            name = "checkpoint"
        elif kind == "verdict":
            name = f"{'' if event['state'] == 'began' else 'no longer: '}{event['text']}"
        elif kind == "ended":
            name = f"ended: {event.get('status')}"
        if name is not None:
            at_us = round(event["t"] * 1e6, 1)
            yield {"ph": "i", "s": "g", "name": name, "pid": pid, "tid": 0, "ts": at_us}
