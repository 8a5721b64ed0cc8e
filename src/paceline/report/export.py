"""Exports a run's events: as a Chrome trace, as CSV files, or to TensorBoard.

Chrome's trace format is read by Perfetto (ui.perfetto.dev) and chrome://tracing:
https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU
(complete events `X`, counters `C`, instants `i`, names `M`; microseconds). CSV files are for
spreadsheets and data frames. TensorBoard event files need the extra `[tensorboard]`.
"""

import csv
import itertools
import json
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

from paceline.errors import UsageError
from paceline.report.event_text import describe_event
from paceline.telemetry import events as ev
from paceline.telemetry.reader import STEP_EVENTS, ProcessRecord, RunReader, RunRecord, read_run
from paceline.telemetry.run_folder import COORDINATOR, process_order
from paceline.telemetry.steps import phase_seconds

Row = dict[str, object]
"""An event of a trace, or a row of a CSV file."""
Phases = Iterable[tuple[str, float]]
"""Time categories and their microseconds."""

ORDER = ("wait", "input", "queue", "forward", "backward", "comm_exposed", "optimizer")
"""Only sums per step are recorded; inside a step they are drawn in this order."""
BETWEEN = ("startup", "eval", "switch", "other")
"""Time outside steps is known per second: drawn at the beginning of each."""

GIL = ("lock_probes", "lock_held", "input_probes", "input_lock_held", "input_blocked")
SERVED = ("pushes", "pulls", "waiting", "queued_us", "apply_us")

POLL_S = 1.0
QUIET_S = 600.0
"""A run without events for this long is no longer followed."""


def require_events(folder: Path, processes: Collection[str]) -> None:
    if not processes:
        raise UsageError(f"{folder} has no events; choose the folder of a run")


def write_trace(folder: Path, path: Path) -> Path:
    """Writes the trace of a run. Raises UsageError if the folder has no events."""
    run = read_run(folder)
    require_events(folder, run.processes)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", encoding="utf-8") as file:
        file.write('{"displayTimeUnit":"ms","traceEvents":[\n')
        file.writelines(
            ("" if index == 0 else ",\n") + json.dumps(event, separators=(",", ":"))
            for index, event in enumerate(trace_events(run))
        )
        file.write("\n]}\n")
    return path


def trace_events(run: RunRecord) -> Iterator[Row]:
    numbers = {who: number for number, who in enumerate(sorted(run.processes, key=process_order))}
    for who, number in numbers.items():
        name = "coordinator" if who == COORDINATOR else who.replace("-", " ")
        yield _name("process_name", number, name)
        yield {**_name("process_sort_index", number, ""), "args": {"sort_index": number}}
        process = run.processes[who]
        yield from _steps(process, number)
        yield from _phases(process, number)
        yield from _counters(process, number)
    for event in run.events:
        if (text := describe_event(event)) is not None:
            mark: Row = {"ph": "i", "s": "g", "name": text, "tid": 0}
            yield {**mark, "pid": numbers.get(COORDINATOR, 0), "ts": round(event.t * 1e6, 1)}


def _name(kind: str, pid: int, name: str) -> Row:
    return {"ph": "M", "name": kind, "pid": pid, "tid": 0, "args": {"name": name}}


def _slice(name: str, pid: int, tid: int, at_us: float, took_us: float, **args: object) -> Row:
    slice_: Row = {"ph": "X", "name": name, "pid": pid, "tid": tid}
    slice_ |= {"ts": round(at_us, 1), "dur": round(took_us, 1)}
    return {**slice_, "args": args} if args else slice_


def _sequence(pid: int, tid: int, at_us: float, phases: Phases) -> Iterator[Row]:
    for name, us in phases:
        if us > 0 and name != "idle":
            yield _slice(name, pid, tid, at_us, us)
        at_us += us


def _steps(process: ProcessRecord, pid: int) -> Iterator[Row]:
    for step in process.iter_steps():
        phases = [(name, getattr(step, name)) for name in ORDER]
        inside_us = sum(us for _, us in phases)
        # Evaluation or a switch before the step is not part of it.
        at_us = step.ended * 1e6 - inside_us
        about = {name: getattr(step, name) for name in ("number", "epoch", "loss", "staleness")}
        yield _slice("step", pid, 1, at_us, inside_us, **about, samples=step.samples)
        yield from _sequence(pid, 1, at_us, phases)
    if any(isinstance(window, ev.StepWindow) and window.epoch for window in process.steps):
        yield {**_name("thread_name", pid, "steps"), "tid": 1}
    for window in process.steps:
        if isinstance(window, ev.StepSummary):
            at_us, took_us = window.began * 1e6, (window.t - window.began) * 1e6
            about = {"steps": window.count, "epoch": window.epoch, **window.phases_us}
            yield _slice("steps", pid, 1, at_us, took_us, **about)


def _phases(process: ProcessRecord, pid: int) -> Iterator[Row]:
    """Yields the time categories of each second: all of a server, outside steps of a worker."""
    for event in process.metrics:
        seconds = process.phase_seconds(event) if process.is_server or event.phases else {}
        names = seconds if process.is_server else BETWEEN
        phases = [(name, seconds.get(name, 0.0) * 1e6) for name in names]
        tid = 1 if process.is_server else 2
        yield from _sequence(pid, tid, (event.t - event.dt) * 1e6, phases)


def _counters(process: ProcessRecord, pid: int) -> Iterator[Row]:
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
            "disk (MB/s)": {n: getattr(event, f"disk_{n}") / dt / 1e6 for n in ("read", "write")},
        }
        at_us = round((event.t - dt) * 1e6, 1)
        for name, values in tracks.items():
            args = {k: round(v, 4) for k, v in values.items()}
            yield {"ph": "C", "name": name, "pid": pid, "tid": 0, "ts": at_us, "args": args}


def write_csv_files(folder: Path, out: Path) -> list[Path]:
    """Writes a CSV file per table with rows. Raises UsageError if the folder has no events."""
    run = read_run(folder)
    require_events(folder, run.processes)
    out.mkdir(parents=True, exist_ok=True)
    tables: dict[str, Iterator[Row]] = {
        "steps": step_rows(run),
        "vitals": metrics_rows(run),
        "machines": (
            {"measured_by": process, **scalar_fields(event)}
            for process, events in run.hosts.items()
            for event in events
        ),
        "epochs": (e.row.to_plain() for e in run.events if isinstance(e, ev.EpochEnded)),
        "verdicts": (scalar_fields(e, leave_out=("figures",)) for e in run.verdict_events),
    }
    written = []
    for name, rows in tables.items():
        first = next(rows, None)
        if first is not None:
            written.append(out / f"{name}.csv")
            with written[-1].open("w", newline="", encoding="utf-8") as file:
                # The first row names the columns.
                writer = csv.DictWriter(file, fieldnames=list(first), extrasaction="ignore")
                writer.writeheader()
                writer.writerows(itertools.chain([first], rows))
    return written


def step_rows(run: RunRecord) -> Iterator[Row]:
    for worker in run.workers:
        for step in worker.iter_steps():
            columns = {f.name: getattr(step, f.name) for f in fields(step)}
            number, began, ended = (columns.pop(name) for name in ("number", "began", "ended"))
            if not columns["pieces"]:
                del columns["pieces"]
            row = {"worker": worker.number, "step": number, **columns}
            yield {**row, "began": began, "ended": ended}


def metrics_rows(run: RunRecord) -> Iterator[Row]:
    """Yields the metrics of all processes; time categories of servers have their own columns."""
    names = [f"phase_{n}_s" for n in dict.fromkeys((*ev.PHASES, *ev.SERVER_PHASES))]
    for process in run.processes.values():
        for event in process.metrics:
            phases = dict.fromkeys(names, 0.0)
            phases |= {f"phase_{n}_s": s for n, s in process.phase_seconds(event).items()}
            plain = scalar_fields(event, leave_out=("phases", "gil", "serving"))
            gil = dict.fromkeys(GIL, 0) | dict(zip(GIL, event.gil, strict=False))
            served = {name: (event.serving or {}).get(name, 0) for name in SERVED}
            yield {"process": process.process_name, **plain, **gil, **served, **phases}


def scalar_fields(event: ev.Event, *, leave_out: Collection[str] = ()) -> Row:
    return {
        name: value
        for name, value in vars(event).items()
        if name not in leave_out and not isinstance(value, list | dict)
    }


def write_tensorboard(folder: Path, out: Path, *, follow: bool = False) -> Path:
    """Writes one log per process. With `follow`, keeps writing until the run ends or goes quiet.

    Raises UsageError if the folder has no events, or TensorBoard is not installed.
    """
    reader = RunReader(folder, skip=STEP_EVENTS)
    reader.open_files()
    require_events(folder, reader.tails)
    board = TensorBoardWriter(out)
    last_event_s = time.monotonic()
    try:
        while True:
            ended = False
            for process, event in reader.poll():
                board.add_event(process, event)
                last_event_s = time.monotonic()
                ended = ended or isinstance(event, ev.RunEnded)
            if ended or not follow or time.monotonic() - last_event_s > QUIET_S:
                return out
            board.flush()
            time.sleep(POLL_S)
    finally:
        board.close()


class TensorBoardWriter:
    """Translates events into scalars, one event file per process."""

    def __init__(self, out: Path) -> None:
        try:
            from tensorboard.compat.proto.event_pb2 import Event as BoardEvent
            from tensorboard.compat.proto.summary_pb2 import Summary
            from tensorboard.summary.writer.event_file_writer import EventFileWriter
        except ImportError:
            raise UsageError(
                "TensorBoard is not installed; run pip install 'paceline[tensorboard]'"
            ) from None
        self._make_writer: Callable[[str], Any] = EventFileWriter
        self._event, self._summary = BoardEvent, Summary
        self._out = out
        self._writers: dict[str, Any] = {}
        self._samples = 0

    def add_event(self, process: str, event: ev.Event) -> None:
        if isinstance(event, ev.RunProgress):
            self._samples = event.samples
            self._scalars(COORDINATOR, event.t, {"train/loss": event.loss}, self._samples)
        elif isinstance(event, ev.EpochEnded):
            names = ("train_loss", "train_acc", "val_loss", "val_acc", "lr")
            values = {f"epoch/{name}": event.row.value(name) for name in names}
            self._scalars(COORDINATOR, event.t, values, event.row.samples)
        elif isinstance(event, ev.ProcessMetrics):
            self._metrics(process, event)

    def _metrics(self, process: str, event: ev.ProcessMetrics) -> None:
        dt = event.dt
        if dt < 0.2:
            return
        values: dict[str, float | None] = {
            "resources/cpu_cores": (event.cpu_user + event.cpu_system) / dt,
            "resources/waiting_for_core": event.run_wait / dt,
            "resources/rss_mb": event.rss / 1e6,
            "resources/net_in_mb_s": event.net_in / dt / 1e6,
            "resources/net_out_mb_s": event.net_out / dt / 1e6,
            "resources/disk_read_mb_s": event.disk_read / dt / 1e6,
            "speed/steps_per_s": event.steps / dt,
            "speed/samples_per_s": event.samples / dt,
        }
        seconds = phase_seconds(process, event)
        values |= {f"phases/{name}": value / dt for name, value in seconds.items()}
        # Process metrics have no sample count of their own: the axis is seconds.
        self._scalars(process, event.t, values, int(event.t))

    def _scalars(self, who: str, t: float, values: dict[str, float | None], step: int) -> None:
        known = {tag: float(v) for tag, v in values.items() if isinstance(v, int | float)}
        if not known:
            return
        if who not in self._writers:
            self._writers[who] = self._make_writer(str(self._out / who))
        scalars = [self._summary.Value(tag=tag, simple_value=v) for tag, v in known.items()]
        summary = self._summary(value=scalars)
        self._writers[who].add_event(self._event(wall_time=t, step=step, summary=summary))

    def flush(self) -> None:
        for writer in self._writers.values():
            writer.flush()

    def close(self) -> None:
        for writer in self._writers.values():
            writer.close()
