"""The run folder: its layout and how its files are written.

DIR/run.json                configuration, versions and machine
DIR/events/run.jsonl        the coordinator's events;  DIR/events/worker-K.jsonl  a worker's;
                            DIR/events/server-K.jsonl  a server's
DIR/logs/worker-K.log       output of a process;     DIR/checkpoints/SAMPLES/   TrainState
DIR/result.json  DIR/model.safetensors  DIR/report.html  (of a Keras model also DIR/model.keras)
DIR/run.lock                held by the supervisor while the run is in progress (run_lock.py)
DIR/coordinator.json  DIR/journal.jsonl      while the workers of a run may outlive its supervisor

Files that are being written have the suffix `.partial`, and checkpoints also a leading dot.
"""

import json
import os
import re
import shutil
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Protocol, cast

from paceline.errors import UsageError
from paceline.telemetry.events import Event, RunEnded, RunStarted
from paceline.telemetry.schema import RunResult

COORDINATOR = "run"
"""Name of the coordinator's process in events, logs and metrics."""
KERAS = "model.keras"
"""The whole model in Keras's own format, next to its weights."""
RUN_FOLDERS = ("events", "logs", "checkpoints", "profile")
RUN_FILES = (
    *("run.json", "metrics.json", "result.json", "model.safetensors", KERAS, "report.html"),
    *("coordinator.json", "journal.jsonl"),
)


def replace_text(path: Path, text: str) -> None:
    """Writes atomically: a reader sees the old file or the new one, never a part."""
    partial = path.with_name(path.name + ".partial")
    partial.write_text(text, encoding="utf-8")
    os.replace(partial, path)


def write_json(path: Path, value: object) -> None:
    replace_text(path, json.dumps(value, indent=2) + "\n")


class RunFolder:
    """Paths inside a run folder."""

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        self.config = self.path / "run.json"
        self.result = self.path / "result.json"
        self.report = self.path / "report.html"
        self.model = self.path / "model.safetensors"
        self.checkpoints = self.path / "checkpoints"
        self.address = self.path / "coordinator.json"
        """Address of the coordinator, for processes that may outlive it."""
        self.journal = self.path / "journal.jsonl"
        """Journal from which another coordinator continues; readable only by its owner."""
        self.metrics = self.path / "metrics.json"
        """URL and token of the metrics endpoint; readable only by its owner."""

    def events(self, who: str) -> Path:
        return self.path / "events" / f"{who}.jsonl"

    def log(self, who: str) -> Path:
        return self.path / "logs" / f"{who}.log"

    def profile(self, who: str) -> Path:
        return self.path / "profile" / f"{who}.json"

    def is_run_folder(self) -> bool:
        return any((self.path / name).exists() for name in (*RUN_FOLDERS, *RUN_FILES))

    def prepare(self, *, force: bool, resume: bool) -> None:
        """Creates the folder for a run.

        Raises UsageError if it contains a run without `force` or `resume`, or cannot be written.
        """
        if self.path.exists() and not self.path.is_dir():
            raise UsageError(f"--out {self.path} is a file; choose a directory")
        if self.is_run_folder() and not (force or resume):
            raise UsageError(
                f"--out {self.path} already contains a run; choose a new directory, or use "
                "--resume to continue it or --force to overwrite it"
            )
        if force and not resume:
            self.clear()
        self.remove_partial_files()
        try:
            for part in ("events", "logs", "checkpoints"):
                (self.path / part).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UsageError(
                f"--out {self.path} cannot be written ({error.strerror}); choose another directory"
            ) from None

    def clear(self) -> None:
        """Removes the files of a run and nothing else."""
        for name in (*RUN_FOLDERS, *RUN_FILES):
            target = self.path / name
            if target.is_dir():
                shutil.rmtree(target)
            elif target.exists():
                target.unlink()

    def remove_partial_files(self) -> None:
        """Removes what a killed process was writing, and completes a replaced checkpoint."""
        for aside in self.checkpoints.glob(".*.old"):
            final = aside.with_name(aside.name[1 : -len(".old")])
            if not final.exists():
                os.replace(aside, final)
        for pattern in (".*.partial", ".*.old"):
            for stale in self.checkpoints.glob(pattern):
                shutil.rmtree(stale, ignore_errors=True)
        for name in RUN_FILES:
            self.path.joinpath(f"{name}.partial").unlink(missing_ok=True)

    def read_result(self) -> RunResult:
        """Returns result.json. Raises UsageError if it is missing or not valid JSON."""
        if not self.result.exists():
            raise UsageError(f"{self.path} has no result.json; choose the folder of a finished run")
        try:
            value = json.loads(self.result.read_text(encoding="utf-8"))
        except ValueError as error:
            raise UsageError(f"{self.result} is not valid JSON ({error})") from None
        assert isinstance(value, dict)
        return cast(RunResult, value)

    def processes_with_events(self) -> list[str]:
        """Returns `run`, then the workers, then the servers that have an event file."""
        found = [p.stem for p in self.path.glob("events/*.jsonl")]
        known = [name for name in found if re.fullmatch(r"run|(worker|server)-\d+", name)]
        return sorted(known, key=process_order)

    def event_bytes(self) -> int:
        """Returns the total size of the event files."""
        return sum(path.stat().st_size for path in self.path.glob("events/*.jsonl"))


@dataclass(frozen=True)
class CoordinatorAddress:
    """Address at which the coordinator of a run listens."""

    incarnation: int
    """Its number among the coordinators of the run."""
    host: str
    port: int
    pid: int


def read_address(folder: RunFolder) -> CoordinatorAddress | None:
    """Returns the address of the coordinator; None if the run is over."""
    try:
        plain = json.loads(folder.address.read_text(encoding="utf-8"))
        return CoordinatorAddress(
            int(plain["incarnation"]), str(plain["host"]), int(plain["port"]), int(plain["pid"])
        )
    except (OSError, ValueError, KeyError, TypeError):
        return None


def process_order(process: str) -> tuple[int, int]:
    """Sorts `run`, then the workers, then the servers by number."""
    role, _, number = process.partition("-")
    return ("run", "worker", "server").index(role), int(number or 0)


class EventSink(Protocol):
    """Receives events: a file, or a connection to the process that writes it."""

    def write(self, event: Event) -> None: ...


class EventWriter:
    """Appends events to one file, from any thread; each line is complete when written."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        truncate_partial_line(path)
        self._file: IO[str] = path.open("a", encoding="utf-8")
        self._lock = threading.Lock()

    def write(self, event: Event) -> None:
        self.write_line(event.to_line())

    def write_line(self, line: str) -> None:
        with self._lock:
            if not self._file.closed:  # The sampler may write after the end.
                self._file.write(line + "\n")
                self._file.flush()

    def close(self) -> None:
        with self._lock:
            self._file.close()


@dataclass(frozen=True, kw_only=True)
class ProcessOutput:
    """A line printed by a process. Displayed and logged, but not an event of the run."""

    process: str
    line: str


@dataclass(frozen=True, kw_only=True)
class CollectivesNotice:
    """Transport of the collectives, and the reason if shared memory was not used. Display only."""

    path: str
    """`shared`, `partly shared`, or another transport."""
    reason: str


@dataclass(frozen=True, kw_only=True)
class ListenNotice:
    """The address at which machines can join the run. Display only: the run folder has it."""

    address: str
    token_file: Path


RunNotice = Event | ProcessOutput | CollectivesNotice | ListenNotice
"""Anything that a display receives while a run is in progress."""

OnEvent = Callable[[RunNotice], None]


def ignore_notice(notice: RunNotice) -> None:
    """The default display: shows nothing."""


class EventLog(EventWriter):
    """Writes the coordinator's events; every recorded notice also goes to `on_event`."""

    def __init__(self, path: Path, on_event: OnEvent) -> None:
        super().__init__(path)
        self._on_event = on_event

    def started(self, *, strategy: str, workers: int, servers: int) -> None:
        self.write(RunStarted(t=0.0, strategy=strategy, workers=workers, servers=servers))

    def record(self, notice: RunNotice) -> None:
        if isinstance(notice, Event):
            self.write(notice)
        self._on_event(notice)

    def ended(self, status: str, error: str | None, seconds: float) -> None:
        """Records the end of the run and closes the file."""
        self.record(RunEnded(t=round(seconds, 6), status=status, error=error))
        self.close()


def truncate_partial_line(path: Path) -> None:
    """Removes an incomplete last line, so that a resumed run does not append to it."""
    if path.exists():
        with path.open("rb+") as file:
            file.truncate(file.read().rfind(b"\n") + 1)


def partial_checkpoint_path(folder: Path, name: str) -> Path:
    """Returns the path of a checkpoint that is still being written."""
    return folder / f".{name}.partial"


def commit_checkpoint(folder: Path, name: str, *, keep: int) -> Path:
    """Gives a complete checkpoint its final name and removes all but the newest `keep`."""
    partial, final = partial_checkpoint_path(folder, name), folder / name
    for path in partial.iterdir():
        with path.open("rb") as file:
            os.fsync(file.fileno())
    _put_in_place(partial, final)
    for old in list_checkpoints(folder)[:-keep]:
        shutil.rmtree(old, ignore_errors=True)
    return final


def _put_in_place(partial: Path, final: Path) -> None:
    """Replaces a checkpoint of the same name; restores it if that fails."""
    if not final.exists():
        os.replace(partial, final)
        return
    aside = final.with_name(f".{final.name}.old")
    shutil.rmtree(aside, ignore_errors=True)
    os.replace(final, aside)
    try:
        os.replace(partial, final)
    except OSError:
        os.replace(aside, final)
        raise
    shutil.rmtree(aside, ignore_errors=True)


def list_checkpoints(folder: Path) -> list[Path]:
    """Returns the complete checkpoints, oldest first."""
    return sorted(p.parent for p in folder.glob("*/state.json") if p.parent.name.isdigit())
