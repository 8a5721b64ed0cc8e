"""A run's curves as TensorBoard event files; the extra `[tensorboard]`."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from paceline.errors import UsageError
from paceline.telemetry.reader import EventTail, ProcessRecord
from paceline.telemetry.run_folder import RunFolder

POLL_S = 1.0
SILENT_S = 600.0
"""A run that has told nothing for so long is not followed any further."""


def write_tensorboard(folder: Path, out: Path, *, follow: bool = False) -> Path:
    """One log a process; with `follow` until the run has ended, or has been silent for long."""
    place = RunFolder(folder)
    if not place.processes_with_events():
        raise UsageError(f"{folder} holds no events: name the folder of a run")
    board = TensorBoardWriter(out)
    followers: dict[str, EventTail] = {}
    silent_since = time.monotonic()
    try:
        while True:
            ended = False
            for who in place.processes_with_events():
                for event in followers.setdefault(who, EventTail(place.events(who))).poll():
                    board.add_event(who, event)
                    silent_since = time.monotonic()
                    ended = ended or event.get("kind") == "ended"
            if ended or not follow or time.monotonic() - silent_since > SILENT_S:
                return out
            board.flush()
            time.sleep(POLL_S)
    finally:
        board.close()


class TensorBoardWriter:
    def __init__(self, out: Path) -> None:
        try:
            from tensorboard.compat.proto.event_pb2 import Event
            from tensorboard.compat.proto.summary_pb2 import Summary
            from tensorboard.summary.writer.event_file_writer import EventFileWriter
        except ImportError:
            raise UsageError(
                "TensorBoard is not installed: pip install 'paceline[tensorboard]'"
            ) from None
        self._make_writer: Callable[[str], Any] = EventFileWriter
        self._event, self._summary = Event, Summary
        self._out = out
        self._writers: dict[str, Any] = {}
        self._processes: dict[str, ProcessRecord] = {}
        self._samples = 0

    def add_event(self, who: str, event: dict[str, Any]) -> None:
        kind = event.get("kind")
        if kind == "progress":
            self._samples = event["samples"]
            self._scalars("run", event["t"], {"train/loss": event["loss"]}, self._samples)
        elif kind == "epoch":
            row = event["row"]
            names = ("train_loss", "train_acc", "val_loss", "val_acc", "lr")
            values = {f"epoch/{name}": row.get(name) for name in names}
            self._scalars("run", event["t"], values, int(row["samples"]))
        elif kind == "vitals":
            self._vitals(who, event)

    def _vitals(self, who: str, event: dict[str, Any]) -> None:
        dt = event["dt"]
        if dt < 0.2:
            return
        process = self._processes.setdefault(who, ProcessRecord(who))
        values = {
            "resources/cpu_cores": (event["cpu_user"] + event["cpu_system"]) / dt,
            "resources/waiting_for_core": event["run_wait"] / dt,
            "resources/rss_mb": event["rss"] / 1e6,
            "resources/net_in_mb_s": event["net_in"] / dt / 1e6,
            "resources/net_out_mb_s": event["net_out"] / dt / 1e6,
            "resources/disk_read_mb_s": event["disk_read"] / dt / 1e6,
            "speed/steps_per_s": event["steps"] / dt,
            "speed/samples_per_s": event["samples"] / dt,
        }
        seconds = process.phase_seconds(event)
        values |= {f"phases/{name}": value / dt for name, value in seconds.items()}
        # Of what has no samples of its own, seconds are the axis.
        self._scalars(who, event["t"], values, int(event["t"]))

    def _scalars(self, who: str, t: float, values: dict[str, Any], step: int) -> None:
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
