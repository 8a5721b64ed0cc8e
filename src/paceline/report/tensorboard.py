"""Exports a run's curves as TensorBoard event files; needs the extra `[tensorboard]`."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from paceline.errors import UsageError
from paceline.telemetry.events import EpochEnded, Event, ProcessMetrics, RunEnded, RunProgress
from paceline.telemetry.reader import STEP_EVENTS, RunReader
from paceline.telemetry.run_folder import COORDINATOR
from paceline.telemetry.steps import phase_seconds

POLL_S = 1.0
QUIET_S = 600.0
"""A run without events for this long is no longer followed."""


def write_tensorboard(folder: Path, out: Path, *, follow: bool = False) -> Path:
    """Writes one log per process. With `follow`, keeps writing until the run ends or goes quiet.

    Raises:
        UsageError: The folder has no events, or TensorBoard is not installed.
    """
    reader = RunReader(folder, skip=STEP_EVENTS)
    reader.open_files()
    if not reader.tails:
        raise UsageError(f"{folder} has no events; choose the folder of a run")
    board = TensorBoardWriter(out)
    last_event_s = time.monotonic()
    try:
        while True:
            ended = False
            for process, event in reader.poll():
                board.add_event(process, event)
                last_event_s = time.monotonic()
                ended = ended or isinstance(event, RunEnded)
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

    def add_event(self, process: str, event: Event) -> None:
        if isinstance(event, RunProgress):
            self._samples = event.samples
            self._scalars(COORDINATOR, event.t, {"train/loss": event.loss}, self._samples)
        elif isinstance(event, EpochEnded):
            names = ("train_loss", "train_acc", "val_loss", "val_acc", "lr")
            values = {f"epoch/{name}": event.row.value(name) for name in names}
            self._scalars(COORDINATOR, event.t, values, event.row.samples)
        elif isinstance(event, ProcessMetrics):
            self._metrics(process, event)

    def _metrics(self, process: str, event: ProcessMetrics) -> None:
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
        summary = self._summary(
            value=[self._summary.Value(tag=tag, simple_value=v) for tag, v in known.items()]
        )
        self._writers[who].add_event(self._event(wall_time=t, step=step, summary=summary))

    def flush(self) -> None:
        for writer in self._writers.values():
            writer.flush()

    def close(self) -> None:
        for writer in self._writers.values():
            writer.close()
