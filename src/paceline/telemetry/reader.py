"""Reading what a run recorded: whole, still going, or cut off at any byte.

One way in for everything that looks at a run: `read_run` for what is there now, `Follower` for what
is being appended. The supervisor keeps the same record live, fed by its processes (`take`).
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Iterator, MutableSequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from paceline.telemetry.events import PHASES, SERVER_PHASES, STEP_PHASES
from paceline.telemetry.run_folder import RunFolder

Plain = dict[str, Any]


@dataclass
class ProcessRecord:
    """What one process of a run has told, as plain events."""

    process_name: str
    started: Plain = field(default_factory=dict)
    vitals: MutableSequence[Plain] = field(default_factory=list)
    steps: MutableSequence[Plain] = field(default_factory=list)
    """Windows of single steps and, on a long run, of sums."""
    profiles: list[Plain] = field(default_factory=list)
    ended: Plain = field(default_factory=dict)

    @property
    def is_server(self) -> bool:
        return self.process_name.startswith("server-")

    @property
    def number(self) -> int:
        _, _, number = self.process_name.partition("-")
        return int(number) if number.isdigit() else -1

    @property
    def name(self) -> str:
        return self.process_name.replace("-", " ")

    @property
    def phase_names(self) -> tuple[str, ...]:
        return SERVER_PHASES if self.is_server else PHASES

    def phase_seconds(self, vitals: Plain) -> dict[str, float]:
        """Of one event of vitals."""
        return {
            name: us / 1e6 for name, us in zip(self.phase_names, vitals["phases"], strict=False)
        }

    def iter_steps(self) -> Iterator[Plain]:
        """Each step by itself: its columns, and `number`, `ended` and `began` in seconds."""
        for window in self.steps:
            if window.get("kind") != "steps":
                continue
            began = float(window["began"] if "began" in window else window["t"])
            before = began
            for index, step in enumerate(steps_of_window(window)):
                step["number"] = window["first_step"] + index
                step["began"] = before
                before = step["ended"] = began + step.get("end", 0) / 1e6
                yield step


def steps_of_window(window: Plain) -> list[Plain]:
    """The steps of a window, one by one, by the columns that have an entry for each."""
    count = len(window["lo"])
    columns = [k for k, v in window.items() if isinstance(v, list) and len(v) == count]
    return [
        dict(zip(columns, values, strict=True))
        for values in zip(*(window[c] for c in columns), strict=True)
    ]


@dataclass
class RunRecord:
    """One run: its configuration, its result if it has one, and what every process told."""

    path: Path = Path()
    config: Plain = field(default_factory=dict)
    result: Plain = field(default_factory=dict)
    """Empty while the run is going on, or when it was cut off."""
    events: MutableSequence[Plain] = field(default_factory=list)
    """The coordinator's, vitals apart."""
    processes: dict[str, ProcessRecord] = field(default_factory=dict)
    """By name: `run` (the coordinator's process), `worker-0`, `server-0`, ..."""
    machines: dict[str, MutableSequence[Plain]] = field(default_factory=dict)
    """Vitals of whole machines, by the name of the process that measured them."""
    missing: list[str] = field(default_factory=list)
    """What is not there or not whole, in words."""
    keep: int | None = None
    """How many events of a kind a live record remembers; None for all."""

    @property
    def workers(self) -> list[ProcessRecord]:
        found = [p for p in self.processes.values() if p.process_name.startswith("worker-")]
        return sorted(found, key=lambda p: p.number)

    @property
    def servers(self) -> list[ProcessRecord]:
        found = [p for p in self.processes.values() if p.is_server]
        return sorted(found, key=lambda p: p.number)

    @property
    def verdict_events(self) -> list[Plain]:
        """Verdicts as they began and ceased while the run went on."""
        return [e for e in self.events if e.get("kind") == "verdict"]

    @property
    def seconds(self) -> float:
        """How far the run has been heard of."""
        times = [float(p.vitals[-1]["t"]) for p in self.processes.values() if p.vitals]
        times += [float(e["t"]) for e in list(self.events)[-1:]]
        return max(times, default=0.0)

    def process(self, who: str) -> ProcessRecord:
        if who not in self.processes:
            record = ProcessRecord(who)
            if self.keep is not None:
                record.vitals = deque(maxlen=self.keep)
                record.steps = deque(maxlen=0)
            self.processes[who] = record
        return self.processes[who]

    def add(self, who: str, event: Plain) -> None:
        """Add one event of a process; what is not an event of ours is passed over."""
        kind = event.get("kind")
        if not isinstance(event.get("t"), int | float):
            return
        if kind == "vitals":
            if isinstance(event.get("phases"), list) and event.get("dt"):
                self.process(who).vitals.append(event)
        elif kind == "machine":
            kept: MutableSequence[Plain] = [] if self.keep is None else deque(maxlen=self.keep)
            self.machines.setdefault(who, kept).append(event)
        elif who == "run":
            self.events.append(event)
        elif kind in ("worker", "server"):
            self.process(who).started = event  # A resumed run begins again: the last one counts.
        elif kind in ("steps", "steps_sum"):
            self.process(who).steps.append(event)
        elif kind == "profile":
            self.process(who).profiles.append(event)
        elif kind in ("worker_ended", "server_ended"):
            self.process(who).ended = event


def read_run(path: Path | str, *, steps: bool = True) -> RunRecord:
    """Everything that a run's folder tells; never raises for what is cut off or missing.

    Without `steps`, windows of steps are passed over: of a long run they are most of it.
    """
    folder = RunFolder(path)
    record = RunRecord(path=Path(path))
    record.config = _read_object(folder.config, record.missing)
    if folder.result.exists():
        record.result = _read_object(folder.result, record.missing)
    else:
        record.missing.append("result.json is missing: the run was cut off or is still going")
    for who in folder.processes_with_events():
        follower = EventTail(folder.events(who))
        for event in follower.poll():
            if steps or event.get("kind") not in ("steps", "steps_sum"):
                record.add(who, event)
        if follower.torn_bytes:
            record.missing.append(
                f"events/{who}.jsonl ends in the middle of an event "
                f"({follower.torn_bytes} bytes without an end)"
            )
        if follower.unreadable:
            record.missing.append(
                f"events/{who}.jsonl has {follower.unreadable} lines that are no events"
            )
    _note_missing_files(record)
    return record


def _note_missing_files(record: RunRecord) -> None:
    if not record.events:
        record.missing.append("events/run.jsonl is missing or empty")
    elif record.events[-1].get("kind") != "ended":
        record.missing.append(
            f"the run's events stop at {record.events[-1]['t']:.1f} s without its end"
        )
    for kind in ("worker", "server"):
        for number in range(int(record.config.get(f"{kind}s") or 0)):
            process = record.processes.get(f"{kind}-{number}")
            if process is None:
                record.missing.append(f"events/{kind}-{number}.jsonl is missing or empty")
            elif not process.ended:
                last = process.vitals[-1]["t"] if process.vitals else process.started.get("t", 0.0)
                record.missing.append(f"{kind} {number} is heard of up to {last:.1f} s, no totals")


def _read_object(path: Path, missing: list[str]) -> Plain:
    try:
        value = json.loads(path.read_text(encoding="utf-8", errors="replace"))
    except FileNotFoundError:
        missing.append(f"{path.name} is missing")
        return {}
    except (OSError, ValueError):
        missing.append(f"{path.name} is cut off or not readable")
        return {}
    if not isinstance(value, dict) or not value:
        missing.append(f"{path.name} holds nothing")
        return {}
    return value


class EventTail:
    """Reads what is appended to an event file; half a line is left for the next time."""

    def __init__(self, path: Path, *, skip: tuple[bytes, ...] = ()) -> None:
        """`skip`: lines that begin so are passed over, where a reader has no use for them."""
        self.path = path
        self._skip = skip
        self._offset = 0
        self.size = 0
        """After a poll: bytes of the file."""
        self.restarts = 0
        """How often the file turned out to be shorter than before: another run's."""
        self.torn_bytes = 0
        """After a poll: bytes at the end that make no whole line yet."""
        self.unreadable = 0

    @property
    def left_bytes(self) -> int:
        """Bytes that a poll with a limit left for the next one."""
        return self.size - self._offset - self.torn_bytes

    def poll(self, limit_bytes: int = -1) -> list[Plain]:
        """Events that came since the last time; none where the file does not exist yet.

        With a limit no more than so many bytes are read at once (a longer line is read whole).
        """
        try:
            with self.path.open("rb") as file:
                self.size = file.seek(0, 2)
                if self.size < self._offset:
                    self._offset = 0  # Replaced by another run's.
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
        for line in data[:whole].splitlines():
            if self._skip and line.startswith(self._skip):
                continue
            try:
                event = json.loads(line)
            except ValueError:
                self.unreadable += 1
                continue
            if isinstance(event, dict):
                found.append(event)
            else:
                self.unreadable += 1
        return found


def step_seconds(window: Plain) -> dict[str, float]:
    """Seconds by step phase of a window of steps, single or summed."""
    if window.get("kind") == "steps_sum":
        return {n: window["phases_us"].get(n, 0) / 1e6 for n in STEP_PHASES}
    return {n: sum(window.get(n) or ()) / 1e6 for n in STEP_PHASES}
