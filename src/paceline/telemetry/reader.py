"""The reader of run folders: complete runs, runs in progress, and runs interrupted at any byte.

`RunReader` yields the events of a folder as they are appended. `RunRecord` collects them for
verdicts, reports, traces and calibration; the supervisor feeds one with the events it receives.
`read_run` combines the two for what is in a folder now.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Collection, Iterator, MutableSequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

from paceline.telemetry.event_tail import EventTail, JsonFile
from paceline.telemetry.events import (
    Event,
    HostMetrics,
    ProcessMetrics,
    ProfileWritten,
    RunEnded,
    ServerEnded,
    ServerStarted,
    StepSummary,
    StepWindow,
    VerdictChanged,
    WorkerEnded,
    WorkerStarted,
)
from paceline.telemetry.run_folder import COORDINATOR, RunFolder
from paceline.telemetry.schema import RunConfig, RunResult
from paceline.telemetry.steps import StepRecord, phase_names, phase_seconds, steps_of_window

__all__ = ["EventTail", "ProcessRecord", "RunReader", "RunRecord", "read_run", "read_steps"]

STEP_EVENTS: frozenset[type[Event]] = frozenset({StepWindow, StepSummary})
"""The bulk of a long run's folder; readers that do not need single steps skip them."""


class RunReader:
    """Follows one run folder. Never raises for files that are missing, truncated or malformed."""

    def __init__(
        self,
        path: Path | str,
        *,
        skip: Collection[type[Event]] = (),
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
        found = self.folder.processes_with_events()
        for process in found if self._only is None else [p for p in found if p in self._only]:
            if process not in self.tails:
                self.tails[process] = EventTail(self.folder.events(process), skip=self.skip)

    def poll(self, limit_bytes: int = -1) -> Iterator[tuple[str, Event]]:
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
    started: WorkerStarted | ServerStarted | None = None
    metrics: MutableSequence[ProcessMetrics] = field(default_factory=list)
    steps: MutableSequence[StepWindow | StepSummary] = field(default_factory=list)
    """Windows of single steps and, in a long run, of sums."""
    profiles: list[ProfileWritten] = field(default_factory=list)
    ended: WorkerEnded | ServerEnded | None = None

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
    def phase_names(self) -> tuple[str, ...]:
        return phase_names(self.process_name)

    @property
    def last_event_s(self) -> float:
        if self.metrics:
            return self.metrics[-1].t
        return self.started.t if self.started is not None else 0.0

    def phase_seconds(self, event: ProcessMetrics) -> dict[str, float]:
        """Returns the seconds by time category of one event."""
        return phase_seconds(self.process_name, event)

    def iter_steps(self) -> Iterator[StepRecord]:
        """Yields the single steps, without sums of steps."""
        for window in self.steps:
            if isinstance(window, StepWindow):
                yield from steps_of_window(window)


@dataclass
class RunRecord:
    """Everything recorded about one run."""

    path: Path = Path()
    config: RunConfig = field(default_factory=RunConfig)
    result: RunResult | None = None
    """None while the run is in progress, or if it was interrupted."""
    events: MutableSequence[Event] = field(default_factory=list)
    """Events of the coordinator, without metrics."""
    processes: dict[str, ProcessRecord] = field(default_factory=dict)
    """By name: `run` (the coordinator's process), `worker-0`, `server-0`, ..."""
    hosts: dict[str, MutableSequence[HostMetrics]] = field(default_factory=dict)
    """Metrics of whole hosts, by the process that sampled them."""
    missing: list[str] = field(default_factory=list)
    """Descriptions of what is missing or incomplete."""
    keep: int | None = None
    """Number of metrics events per process that a live record keeps; None for all."""

    @property
    def workers(self) -> list[ProcessRecord]:
        found = [p for p in self.processes.values() if p.is_worker]
        return sorted(found, key=lambda p: p.number)

    @property
    def servers(self) -> list[ProcessRecord]:
        found = [p for p in self.processes.values() if p.is_server]
        return sorted(found, key=lambda p: p.number)

    @property
    def verdict_events(self) -> list[VerdictChanged]:
        """Verdicts that began or were cleared during the run."""
        return [e for e in self.events if isinstance(e, VerdictChanged)]

    @property
    def seconds(self) -> float:
        """Time of the last event."""
        times = [p.metrics[-1].t for p in self.processes.values() if p.metrics]
        times += [e.t for e in list(self.events)[-1:]]
        return max(times, default=0.0)

    def process(self, process: str) -> ProcessRecord:
        if process not in self.processes:
            record = ProcessRecord(process)
            if self.keep is not None:
                record.metrics = deque(maxlen=self.keep)
                record.steps = deque(maxlen=0)
            self.processes[process] = record
        return self.processes[process]

    def add(self, process: str, event: Event) -> None:
        """Adds one event of a process."""
        self._add(event, process)

    @functools.singledispatchmethod
    def _add(self, event: Event, process: str) -> None:
        if process == COORDINATOR:
            self.events.append(event)

    @_add.register
    def _(self, event: ProcessMetrics, process: str) -> None:
        if event.dt > 0:
            self.process(process).metrics.append(event)

    @_add.register
    def _(self, event: HostMetrics, process: str) -> None:
        kept: MutableSequence[HostMetrics] = [] if self.keep is None else deque(maxlen=self.keep)
        if event.dt > 0:
            self.hosts.setdefault(process, kept).append(event)

    @_add.register(WorkerStarted)
    @_add.register(ServerStarted)
    def _(self, event: WorkerStarted | ServerStarted, process: str) -> None:
        self.process(process).started = event  # A resumed run starts again: the last one counts.

    @_add.register(StepWindow)
    @_add.register(StepSummary)
    def _(self, event: StepWindow | StepSummary, process: str) -> None:
        self.process(process).steps.append(event)

    @_add.register
    def _(self, event: ProfileWritten, process: str) -> None:
        self.process(process).profiles.append(event)

    @_add.register(WorkerEnded)
    @_add.register(ServerEnded)
    def _(self, event: WorkerEnded | ServerEnded, process: str) -> None:
        self.process(process).ended = event

    def list_missing(self) -> list[str]:
        """Describes events that a complete run would have."""
        found = []
        if not self.events:
            found.append("events/run.jsonl is missing or empty")
        elif not isinstance(self.events[-1], RunEnded):
            found.append(
                f"the last event of the run is at {self.events[-1].t:.1f} s, without its end"
            )
        if self.config.get("virtual"):
            return found  # The twin records no events of workers.
        for role, count in (
            ("worker", self.config.get("workers")),
            ("server", self.config.get("servers")),
        ):
            for number in range(count if isinstance(count, int) else 0):
                process = self.processes.get(f"{role}-{number}")
                if process is None:
                    found.append(f"events/{role}-{number}.jsonl is missing or empty")
                elif process.ended is None:
                    found.append(
                        f"{role} {number} has no totals: its last event is at "
                        f"{process.last_event_s:.1f} s"
                    )
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


def read_steps(path: Path | str, worker: int) -> list[StepRecord]:
    """Returns the single steps of one worker, in order."""
    name = f"worker-{worker}"
    reader = RunReader(path, skip={ProcessMetrics, HostMetrics}, processes=(name,))
    return [
        step
        for _, event in reader.poll()
        if isinstance(event, StepWindow)
        for step in steps_of_window(event)
    ]
