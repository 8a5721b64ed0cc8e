"""Event types of a run, written as one JSON object per line.

The coordinator's process writes `events/run.jsonl`, worker K `events/worker-K.jsonl` and server K
`events/server-K.jsonl`. Every event has `t`, the seconds since the start of the run; all processes
of a run share the same zero. Class names may change, `kind` and field names are a file format.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar, TypedDict

from paceline.telemetry.events.rows import DecisionRow, EpochRow, SwitchRow

PHASES = (
    "startup",
    "input",
    "forward",
    "backward",
    "comm_exposed",
    "optimizer",
    "wait",
    "queue",
    "eval",
    "switch",
    "other",
)
"""Time categories of a worker; they add up to its wall time."""

STEP_PHASES = ("input", "forward", "backward", "comm_exposed", "optimizer", "wait", "queue")
"""Time categories recorded for each step, in microseconds."""

SERVER_PHASES = ("startup", "idle", "receive", "apply", "send")
"""Time categories of a server. Concurrent ones count as apply, then send, then receive."""


@dataclass(frozen=True, kw_only=True)
class Event:
    """Base of all event types."""

    kind: ClassVar[str] = ""
    t: float

    def to_plain(self) -> dict[str, object]:
        """Returns the event as a JSON object that shares its lists and dicts with the event."""
        return {"kind": self.kind, **vars(self)}

    def to_line(self) -> str:
        return json.dumps(self.to_plain(), separators=(",", ":"), allow_nan=True)


@dataclass(frozen=True, kw_only=True)
class RunStarted(Event):
    """The run started (run.jsonl); run.json has the full configuration."""

    kind: ClassVar[str] = "started"
    strategy: str
    workers: int
    servers: int


@dataclass(frozen=True, kw_only=True)
class RunLengthKnown(Event):
    """Length of the run, written once the data has been read (run.jsonl)."""

    kind: ClassVar[str] = "totals"
    epochs: int | None
    samples_per_epoch: int | None


@dataclass(frozen=True, kw_only=True)
class StrategyStarted(Event):
    """A strategy took effect; `lr` describes its learning rate."""

    kind: ClassVar[str] = "phase"
    strategy: str
    samples: int
    lr: str


@dataclass(frozen=True, kw_only=True)
class RunProgress(Event):
    """Totals so far, about twice per second (run.jsonl)."""

    kind: ClassVar[str] = "progress"
    epoch: int
    samples: int
    updates: int
    loss: float | None


@dataclass(frozen=True, kw_only=True)
class EpochEnded(Event):
    """An epoch ended; the row is also in result.json."""

    kind: ClassVar[str] = "epoch"
    row: EpochRow

    def to_plain(self) -> dict[str, object]:
        return {"kind": self.kind, "t": self.t, "row": self.row.to_plain()}


@dataclass(frozen=True, kw_only=True)
class StrategySwitched(Event):
    """The strategy was switched; written when all workers have resumed training."""

    kind: ClassVar[str] = "switch"
    row: SwitchRow

    def to_plain(self) -> dict[str, object]:
        return {"kind": self.kind, "t": self.t, "row": self.row.to_plain()}


@dataclass(frozen=True, kw_only=True)
class SwitchDecided(Event):
    """A switch rule made a decision; the row is also in result.json."""

    kind: ClassVar[str] = "decision"
    row: DecisionRow

    def to_plain(self) -> dict[str, object]:
        return {"kind": self.kind, "t": self.t, "row": self.row.to_plain()}


@dataclass(frozen=True, kw_only=True)
class CheckpointSaved(Event):
    """A checkpoint is complete and has its final name."""

    kind: ClassVar[str] = "checkpoint"
    samples: int
    path: str


@dataclass(frozen=True, kw_only=True)
class RunEnded(Event):
    """Last event of run.jsonl, unless the run was interrupted."""

    kind: ClassVar[str] = "ended"
    status: str
    error: str | None = None


VERDICT_BEGAN, VERDICT_OVER = "began", "over"


@dataclass(frozen=True, kw_only=True)
class VerdictChanged(Event):
    """A verdict began to hold or was cleared (run.jsonl); fields as in `verdicts.Verdict`."""

    kind: ClassVar[str] = "verdict"
    state: str
    """`began` or `over`."""
    rule: str
    who: str
    text: str
    suggestion: str
    figures: Mapping[str, object] = field(default_factory=dict)

    @property
    def is_over(self) -> bool:
        return self.state == VERDICT_OVER


@dataclass(frozen=True, kw_only=True)
class WorkerStarted(Event):
    """First line of worker-K.jsonl."""

    kind: ClassVar[str] = "worker"
    worker: int
    host: str
    pid: int
    threads: int
    cores: list[int] = field(default_factory=list)
    """CPU cores this process may run on."""
    quota: float | None = None
    """CPU limit of the cgroup in cores; None without a limit."""


@dataclass(frozen=True, kw_only=True)
class ServerStarted(Event):
    """First line of server-K.jsonl."""

    kind: ClassVar[str] = "server"
    server: int
    beside: int
    """The worker that started it."""
    host: str
    pid: int
    cores: list[int] = field(default_factory=list)
    quota: float | None = None


@dataclass(frozen=True, kw_only=True)
class ProcessMetrics(Event):
    """Resource usage of a process in the last second (`dt`): amounts, not running totals.

    Every process writes one per second. After an hour two are merged into one, after three hours
    four, and so on, which keeps the folder of a long run small.
    """

    kind: ClassVar[str] = "vitals"
    dt: float
    phases: list[int] = field(default_factory=list)
    """Microseconds by time category, in the order of PHASES (SERVER_PHASES for a server)."""
    epoch: int = -1
    """Counted from 0; -1 before the first step."""
    steps: int = 0
    """Steps finished; for a server, updates applied."""
    samples: int = 0
    comm_hidden: int = 0
    """Microseconds of communication overlapped with computation, where measured."""
    input_cpu: int = 0
    """Microseconds of `input` in which the main thread was on a CPU."""
    cpu_user: float = 0.0
    cpu_system: float = 0.0
    cpu_wait: float | None = None
    """Seconds blocked on block devices; None if the kernel does not account for it."""
    run_wait: float = 0.0
    """Seconds on the run queue: runnable without a free core, summed over threads."""
    main_wait: float = 0.0
    """The main thread's part of `run_wait`, which delays steps."""
    throttled: float = 0.0
    """Seconds throttled by the CPU quota of the cgroup."""
    rss: int = 0
    threads: int = 0
    net_in: int = 0
    net_out: int = 0
    """Bytes over the TCP connections of the process, counted by the kernel."""
    net_busy: float = 0.0
    """Seconds in which the busiest sending connection had unacknowledged bytes."""
    net_blocked: float = 0.0
    """Part of `net_busy` in which the receive window of the peer was full."""
    rtt: float = 0.0
    rtt_least: float = 0.0
    """Round-trip time of that connection in seconds: smoothed, and the minimum so far."""
    disk_read: int = 0
    disk_write: int = 0
    gil: list[int] = field(default_factory=list)
    """GIL probes: made, found held; the same two during `input`; and those of the latter that found
    the GIL free and the main thread blocked."""
    serving: dict[str, int] | None = None
    """Servers only: pushes, pulls, waiting (max gradients at once), queued_us, apply_us."""


class GpuMetrics(TypedDict):
    """Usage of one GPU; `busy` is the fraction of the time with a kernel running."""

    name: str
    busy: float
    memory_used: int
    memory_total: int


@dataclass(frozen=True, kw_only=True)
class HostMetrics(Event):
    """Resource usage of a host, written by one process per host and network namespace."""

    kind: ClassVar[str] = "machine"
    host: str
    dt: float
    cpu_user: float = 0.0
    cpu_system: float = 0.0
    cpu_iowait: float = 0.0
    cpu_steal: float = 0.0
    cpu_idle: float = 0.0
    cores_busy: list[float] = field(default_factory=list)
    """Busy seconds per core."""
    memory_used: int = 0
    memory_total: int = 0
    net_in: int = 0
    net_out: int = 0
    """Over all interfaces except loopback."""
    loopback: int = 0
    links: dict[str, list[int]] = field(default_factory=dict)
    """Bytes received and sent per interface, including loopback."""
    disk_read: int = 0
    disk_write: int = 0
    gpus: list[GpuMetrics] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class StepWindow(Event):
    """Consecutive steps of one worker; every column has one value per step.

    The worker computed the positions [`lo`, `hi`) of the epoch's seeded order, its share of the
    global batch that begins at `start`. `end` is the end of the step in microseconds after `began`.
    Time categories are in microseconds. `staleness` is -1 where it does not apply, `comm_hidden` is
    -1 where it was not measured.
    """

    kind: ClassVar[str] = "steps"
    first_step: int
    began: float = 0.0
    end: list[int] = field(default_factory=list)
    epoch: list[int] = field(default_factory=list)
    start: list[int] = field(default_factory=list)
    lo: list[int] = field(default_factory=list)
    hi: list[int] = field(default_factory=list)
    loss: list[float | None] = field(default_factory=list)
    staleness: list[int] = field(default_factory=list)
    input: list[int] = field(default_factory=list)
    forward: list[int] = field(default_factory=list)
    backward: list[int] = field(default_factory=list)
    comm_exposed: list[int] = field(default_factory=list)
    optimizer: list[int] = field(default_factory=list)
    wait: list[int] = field(default_factory=list)
    queue: list[int] = field(default_factory=list)
    comm_hidden: list[int] = field(default_factory=list)
    pieces: list[list[list[int]]] = field(default_factory=list)
    """With block reads: positions [lo, hi) of the epoch's block plan, per step."""


@dataclass(frozen=True, kw_only=True)
class StepSummary(Event):
    """Sums over steps of one epoch; replaces `StepWindow` after a worker's first 200,000 steps.

    `staleness` counts gradients by staleness.
    """

    kind: ClassVar[str] = "steps_sum"
    first_step: int
    count: int
    samples: int
    phases_us: dict[str, int]
    began: float = 0.0
    epoch: int = 0
    staleness: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class ProfileWritten(Event):
    """An operator profile was written (worker-K.jsonl)."""

    kind: ClassVar[str] = "profile"
    epoch: int
    """Counted from 1, as in the history."""
    steps: int
    path: str


@dataclass(frozen=True, kw_only=True)
class InputStats(Event):
    """Input pipeline statistics over about one second.

    `wait_s` is the time training waited for a batch, `make_s` the time spent preparing batches in
    any thread, `queue` the mean number of prepared batches at a request, out of `depth`.
    """

    kind: ClassVar[str] = "input"
    batches: int
    wait_s: float
    make_s: float
    queue: float
    depth: int


@dataclass(frozen=True, kw_only=True)
class WorkerEnded(Event):
    """Last line of worker-K.jsonl: totals in seconds and bytes."""

    kind: ClassVar[str] = "worker_ended"
    phases: dict[str, float]
    bytes_sent: int
    peak_rss_bytes: int


@dataclass(frozen=True, kw_only=True)
class ServerEnded(Event):
    """Last line of server-K.jsonl."""

    kind: ClassVar[str] = "server_ended"
    phases: dict[str, float]
    bytes_sent: int
    bytes_received: int
    peak_rss_bytes: int
