"""The reader of run folders: complete runs, runs in progress, and runs interrupted at any byte.

`RunReader` yields the events of a folder as they are appended. `RunRecord` collects them for
verdicts, reports, traces and calibration; the supervisor feeds one with the events it receives.
`read_run` combines the two for what is in a folder now.
"""

import json
from collections import deque
from collections.abc import Collection, Iterable, Iterator, MutableSequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from paceline.telemetry import events as ev
from paceline.telemetry.run_folder import COORDINATOR, RunFolder
from paceline.telemetry.schema import RunConfig, RunResult
from paceline.telemetry.steps import StepRecord, phase_seconds, steps_of_window

STEP_EVENTS: frozenset[type[ev.Event]] = frozenset({ev.StepWindow, ev.StepSummary})
"""The bulk of a long run's folder; readers that do not need single steps skip them."""


class EventTail:
    """Reads the events appended to a file; leaves an incomplete line for the next poll."""

    def __init__(self, path: Path, *, skip: Iterable[type[ev.Event]] = ()) -> None:
        """Lines of the types in `skip` are dropped unparsed, which is much faster."""
        self.path = path
        # `kind` is the first key of every line; the closing quote keeps prefixes apart.
        self._skip = tuple(f'{{"kind":"{event_type.kind}"'.encode() for event_type in skip)
        self._offset = 0
        self.size = 0
        """After a poll: size of the file in bytes."""
        self.restarts = 0
        """Number of times the file was found shorter than before, which means replaced."""
        self.torn_bytes = 0
        """After a poll: bytes at the end that do not form a complete line."""
        self.unreadable = 0
        """Lines that are not valid events."""

    @property
    def left_bytes(self) -> int:
        """Bytes that a poll with a limit left for the next one."""
        return self.size - self._offset - self.torn_bytes

    def poll(self, limit_bytes: int = -1) -> list[ev.Event]:
        """Returns the events appended since the last poll; none if the file does not exist.

        Reads at most `limit_bytes`, plus the rest of the last line.
        """
        try:
            with self.path.open("rb") as file:
                self.size = file.seek(0, 2)
                if self.size < self._offset:
                    self._offset = 0
                    self.restarts += 1
                file.seek(self._offset)
                data = file.read(limit_bytes)
                if limit_bytes >= 0 and not data.endswith(b"\n"):
                    data += file.readline()
        except FileNotFoundError:
            return []
        whole = data.rfind(b"\n") + 1
        self._offset += whole
        self.torn_bytes = len(data) - whole
        found = []
        for line in data[:whole].split(b"\n")[:-1]:
            if self._skip and line.startswith(self._skip):
                continue
            try:
                event = ev.parse_event(json.loads(line))
            except (ValueError, RecursionError):
                event = None
            if event is None:
                self.unreadable += 1
            else:
                found.append(event)
        return found

    def list_problems(self) -> list[str]:
        """Describes what the last poll could not read."""
        name, torn = f"events/{self.path.name}", f"{self.torn_bytes} bytes without a newline"
        found = [f"{name} ends in the middle of an event ({torn})"] if self.torn_bytes else []
        if self.unreadable:
            found.append(f"{name} has {self.unreadable} lines that are not valid events")
        return found


class JsonFile:
    """A JSON object in a file that may be missing, incomplete, or replaced at any time."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.value: dict[str, object] = {}
        """The last object read; empty if the file is missing or was never readable."""
        self.problem: str | None = None
        """Description of why the file could not be read; None if it was."""
        self._stamp: tuple[int, int] | None = None

    @property
    def exists(self) -> bool:
        return self._stamp is not None

    def refresh(self) -> None:
        """Reads the file again if it has changed."""
        name = self.path.name
        try:
            stat = self.path.stat()
        except OSError:
            self.value, self.problem, self._stamp = {}, f"{name} is missing", None
            return
        stamp = stat.st_mtime_ns, stat.st_size
        if stamp == self._stamp:
            return
        self._stamp = stamp
        try:
            value = json.loads(self.path.read_text(encoding="utf-8", errors="replace"))
        except (OSError, ValueError, RecursionError):
            self.problem = f"{name} is truncated or not valid JSON"
            return
        if not isinstance(value, dict) or not value:
            self.problem = f"{name} is empty"
            return
        self.value, self.problem = value, None


class RunReader:
    """Follows one run folder. Never raises for files that are missing, truncated or malformed."""

    def __init__(
        self,
        path: Path | str,
        *,
        skip: Collection[type[ev.Event]] = (),
        processes: Collection[str] | None = None,
    ) -> None:
        """`skip`: event types to drop unparsed; `processes`: whose files to read, None for all."""
        self.folder = RunFolder(path)
        self.skip = frozenset(skip)
        self._only = processes
        self._config = JsonFile(self.folder.config)
        self._result = JsonFile(self.folder.result)
        self.tails: dict[str, EventTail] = {}

    @property
    def config(self) -> RunConfig:
        self._config.refresh()
        return cast(RunConfig, self._config.value)

    @property
    def result(self) -> RunResult | None:
        """None while the run is in progress, or if it was interrupted."""
        self._result.refresh()
        return cast(RunResult, self._result.value) if self._result.value else None

    def open_files(self) -> None:
        """Finds event files that have appeared since the last call."""
        for process in self.folder.processes_with_events():
            if process not in self.tails and (self._only is None or process in self._only):
                self.tails[process] = EventTail(self.folder.events(process), skip=self.skip)

    def poll(self, limit_bytes: int = -1) -> Iterator[tuple[str, ev.Event]]:
        """Yields (process, event) for the events appended since the last poll.

        The coordinator's events come first. Reads at most `limit_bytes` per file.
        """
        self.open_files()
        for process, tail in self.tails.items():
            for event in tail.poll(limit_bytes):
                yield process, event

    @property
    def restarted(self) -> bool:
        """True if a file was replaced, so that the folder now holds another run."""
        return any(tail.restarts for tail in self.tails.values())

    @property
    def read_fraction(self) -> float:
        size = sum(tail.size for tail in self.tails.values())
        left = sum(max(0, tail.left_bytes) for tail in self.tails.values())
        return 1.0 - left / size if size else 1.0

    @property
    def unreadable_files(self) -> list[str]:
        """Describes run.json and result.json if they exist but cannot be read."""
        files = (self._config, self._result)
        return [file.problem for file in files if file.exists and file.problem is not None]

    @property
    def missing(self) -> list[str]:
        """Describes files that are missing or incomplete, as of the last poll."""
        self._config.refresh()
        self._result.refresh()
        found = [self._config.problem] if self._config.problem else []
        if not self._result.exists:
            found.append("result.json is missing: the run was interrupted or is still in progress")
        elif self._result.problem:
            found.append(self._result.problem)
        return found + [p for tail in self.tails.values() for p in tail.list_problems()]


@dataclass
class ProcessRecord:
    """Events of one process of a run."""

    process_name: str
    started: ev.WorkerStarted | ev.ServerStarted | None = None
    metrics: MutableSequence[ev.ProcessMetrics] = field(default_factory=list)
    steps: MutableSequence[ev.StepWindow | ev.StepSummary] = field(default_factory=list)
    """Windows of single steps and, in a long run, of sums."""
    profiles: list[ev.ProfileWritten] = field(default_factory=list)
    ended: ev.WorkerEnded | ev.ServerEnded | None = None

    @property
    def is_server(self) -> bool:
        return self.process_name.startswith("server-")

    @property
    def is_worker(self) -> bool:
        return self.process_name.startswith("worker-")

    @property
    def number(self) -> int:
        _, _, number = self.process_name.partition("-")
        return int(number) if number.isdigit() else -1

    @property
    def name(self) -> str:
        return self.process_name.replace("-", " ")

    @property
    def last_event_s(self) -> float:
        if self.metrics:
            return self.metrics[-1].t
        return self.started.t if self.started is not None else 0.0

    def phase_seconds(self, event: ev.ProcessMetrics) -> dict[str, float]:
        return phase_seconds(self.process_name, event)

    def iter_steps(self) -> Iterator[StepRecord]:
        """Yields the single steps, without sums of steps."""
        for window in self.steps:
            if isinstance(window, ev.StepWindow):
                yield from steps_of_window(window)


@dataclass
class RunRecord:
    """Everything recorded about one run."""

    path: Path = Path()
    config: RunConfig = field(default_factory=RunConfig)
    result: RunResult | None = None
    """None while the run is in progress, or if it was interrupted."""
    events: MutableSequence[ev.Event] = field(default_factory=list)
    """Events of the coordinator, without metrics."""
    processes: dict[str, ProcessRecord] = field(default_factory=dict)
    """By name: `run` (the coordinator's process), `worker-0`, `server-0`, ..."""
    hosts: dict[str, MutableSequence[ev.HostMetrics]] = field(default_factory=dict)
    """Metrics of whole hosts, by the process that sampled them."""
    missing: list[str] = field(default_factory=list)
    """Descriptions of what is missing or incomplete."""
    keep: int | None = None
    """Number of metrics events per process that a live record keeps; None for all."""

    @property
    def workers(self) -> list[ProcessRecord]:
        return sorted((p for p in self.processes.values() if p.is_worker), key=lambda p: p.number)

    @property
    def servers(self) -> list[ProcessRecord]:
        return sorted((p for p in self.processes.values() if p.is_server), key=lambda p: p.number)

    @property
    def verdict_events(self) -> list[ev.VerdictChanged]:
        """Verdicts that began or were cleared during the run."""
        return [e for e in self.events if isinstance(e, ev.VerdictChanged)]

    def process(self, process: str) -> ProcessRecord:
        if process not in self.processes:
            record = self.processes[process] = ProcessRecord(process, metrics=self._make_list())
            if self.keep is not None:
                record.steps = deque(maxlen=0)
        return self.processes[process]

    def _make_list(self) -> MutableSequence[Any]:
        return [] if self.keep is None else deque(maxlen=self.keep)

    def add(self, process: str, event: ev.Event) -> None:
        """Adds one event of a process."""
        match event:
            case ev.ProcessMetrics():
                if event.dt > 0:
                    self.process(process).metrics.append(event)
            case ev.HostMetrics():
                if event.dt > 0:
                    self.hosts.setdefault(process, self._make_list()).append(event)
            case ev.WorkerStarted() | ev.ServerStarted():
                # A resumed run starts again: the last one counts.
                self.process(process).started = event
            case ev.StepWindow() | ev.StepSummary():
                self.process(process).steps.append(event)
            case ev.ProfileWritten():
                self.process(process).profiles.append(event)
            case ev.WorkerEnded() | ev.ServerEnded():
                self.process(process).ended = event
            case _ if process == COORDINATOR:
                self.events.append(event)

    def list_missing(self) -> list[str]:
        """Describes events that a complete run would have."""
        found = []
        if not self.events:
            found.append("events/run.jsonl is missing or empty")
        elif not isinstance(last := self.events[-1], ev.RunEnded):
            found.append(f"the last event of the run is at {last.t:.1f} s, without its end")
        if self.config.get("virtual"):
            return found  # The twin records no events of workers.
        roles = ("worker", self.config.get("workers")), ("server", self.config.get("servers"))
        for role, count in roles:
            for number in range(count if isinstance(count, int) else 0):
                process = self.processes.get(f"{role}-{number}")
                if process is None:
                    found.append(f"events/{role}-{number}.jsonl is missing or empty")
                elif process.ended is None:
                    last_s = f"its last event is at {process.last_event_s:.1f} s"
                    found.append(f"{role} {number} has no totals: {last_s}")
        return found


def read_run(path: Path | str, *, steps: bool = True) -> RunRecord:
    """Reads everything in a run folder; never raises for what is missing or truncated.

    Without `steps`, step windows are skipped: they are most of a long run's folder.
    """
    reader = RunReader(path, skip=() if steps else STEP_EVENTS)
    record = RunRecord(path=Path(path), config=reader.config, result=reader.result)
    for process, event in reader.poll():
        record.add(process, event)
    record.missing = reader.missing + record.list_missing()
    return record


def read_step_events(path: Path | str, worker: int) -> Iterator[ev.StepWindow | ev.StepSummary]:
    """Yields the windows of one worker's steps, single and summed."""
    skip = {ev.ProcessMetrics, ev.HostMetrics}
    for _, event in RunReader(path, skip=skip, processes=(f"worker-{worker}",)).poll():
        if isinstance(event, ev.StepWindow | ev.StepSummary):
            yield event


def read_steps(path: Path | str, worker: int) -> list[StepRecord]:
    """Returns the single steps of one worker, in order."""
    windows = [w for w in read_step_events(path, worker) if isinstance(w, ev.StepWindow)]
    return [step for window in windows for step in steps_of_window(window)]
