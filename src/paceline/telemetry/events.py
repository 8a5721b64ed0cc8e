"""The typed events of a run, one JSON object a line.

`events/run.jsonl` is written by the coordinator's process, `events/worker-K.jsonl` by worker K,
`events/server-K.jsonl` by server K.
Every event carries `t`, seconds since the run began (the same zero for every process of a run).
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any, ClassVar

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
"""Where a worker's wall time goes; the phases of a worker add up to its wall time."""

STEP_PHASES = ("input", "forward", "backward", "comm_exposed", "optimizer", "wait", "queue")
"""The phases that are recorded for every single step, in microseconds."""

SERVER_PHASES = ("startup", "idle", "receive", "apply", "send")
"""Where a server's wall time goes; applying goes before sending, and sending before receiving."""


@dataclass(frozen=True, kw_only=True)
class Event:
    kind: ClassVar[str] = ""
    t: float

    def to_plain(self) -> dict[str, Any]:
        # Fields hold plain data: copying it deeply would cost more than writing it.
        return {"kind": self.kind, **vars(self)}

    def to_line(self) -> str:
        return json.dumps(self.to_plain(), separators=(",", ":"), allow_nan=True)


@dataclass(frozen=True, kw_only=True)
class RunStarted(Event):
    """The run began (run.jsonl) with this configuration; see run.json for all of it."""

    kind: ClassVar[str] = "started"
    strategy: str
    workers: int
    servers: int


@dataclass(frozen=True, kw_only=True)
class RunLengthKnown(Event):
    """How long the run is, once the data has been read (run.jsonl)."""

    kind: ClassVar[str] = "totals"
    epochs: int | None
    samples_per_epoch: int | None


@dataclass(frozen=True, kw_only=True)
class StrategyStarted(Event):
    """A strategy is in force from here on; `lr` says in words which learning rate."""

    kind: ClassVar[str] = "phase"
    strategy: str
    samples: int
    lr: str


@dataclass(frozen=True, kw_only=True)
class RunProgress(Event):
    """Totals so far, about twice a second (run.jsonl)."""

    kind: ClassVar[str] = "progress"
    epoch: int
    samples: int
    updates: int
    loss: float | None


@dataclass(frozen=True, kw_only=True)
class EpochEnded(Event):
    """One row of result.json's `history`."""

    kind: ClassVar[str] = "epoch"
    row: dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class StrategySwitched(Event):
    """One row of result.json's `switches`."""

    kind: ClassVar[str] = "switch"
    row: dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class SwitchDecided(Event):
    """One row of result.json's `decisions`: what a rule said, and the figures behind it."""

    kind: ClassVar[str] = "decision"
    row: dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class CheckpointSaved(Event):
    kind: ClassVar[str] = "checkpoint"
    samples: int
    path: str


@dataclass(frozen=True, kw_only=True)
class RunEnded(Event):
    kind: ClassVar[str] = "ended"
    status: str
    error: str | None = None


@dataclass(frozen=True, kw_only=True)
class VerdictChanged(Event):
    """A verdict began or ceased to hold (run.jsonl); see `verdicts.Verdict` for the fields."""

    kind: ClassVar[str] = "verdict"
    state: str
    """`began` or `over`."""
    rule: str
    who: str
    text: str
    suggestion: str
    figures: dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class WorkerStarted(Event):
    """First line of worker-K.jsonl."""

    kind: ClassVar[str] = "worker"
    worker: int
    host: str
    pid: int
    threads: int
    cores: list[int] = field(default_factory=list)
    """The processor cores that this process may run on."""
    quota: float | None = None
    """Cores that a control group allows at the most; None without a limit."""


@dataclass(frozen=True, kw_only=True)
class ServerStarted(Event):
    """First line of server-K.jsonl."""

    kind: ClassVar[str] = "server"
    server: int
    beside: int
    """The worker whose child it is."""
    host: str
    pid: int
    cores: list[int] = field(default_factory=list)
    quota: float | None = None


@dataclass(frozen=True, kw_only=True)
class ProcessMetrics(Event):
    """What a process did in the last second (`dt`): amounts within it, not totals.

    Written once a second by every process; after an hour every second one is merged with the next,
    after three hours every four, and so on, so that a long run's folder stays small.
    """

    kind: ClassVar[str] = "vitals"
    dt: float
    phases: list[int] = field(default_factory=list)
    """Microseconds by phase, in the order of PHASES (of SERVER_PHASES for a server)."""
    epoch: int = -1
    """From 0; -1 before the first step."""
    steps: int = 0
    """Steps finished; of a server, updates applied."""
    samples: int = 0
    comm_hidden: int = 0
    """Microseconds of exchange that computing hid (where it is measured)."""
    input_cpu: int = 0
    """Microseconds of `input` in which the worker's main thread was computing."""
    cpu_user: float = 0.0
    cpu_system: float = 0.0
    cpu_wait: float | None = None
    """Seconds blocked on block devices; None where the kernel does not account for it."""
    run_wait: float = 0.0
    """Seconds in which threads were ready and no core was free, summed over threads."""
    main_wait: float = 0.0
    """The main thread's part of it, which is what keeps a step waiting."""
    throttled: float = 0.0
    """Seconds in which a control group's quota kept the process from running."""
    rss: int = 0
    threads: int = 0
    net_in: int = 0
    net_out: int = 0
    """Bytes over the process's TCP connections, as the kernel counts them."""
    net_busy: float = 0.0
    """Seconds in which the connection that sends most had bytes on their way ..."""
    net_blocked: float = 0.0
    """... and those of them in which the peer had no room for more."""
    rtt: float = 0.0
    rtt_least: float = 0.0
    """Seconds of round trip on that connection: smoothed now, and the least ever seen."""
    disk_read: int = 0
    disk_write: int = 0
    gil: list[int] = field(default_factory=list)
    """Probes of the interpreter's lock: made, found held; the same during `input`, and how many of
    those found the lock free and the main thread blocked."""
    serving: dict[str, int] | None = None
    """Of a server: pushes, pulls, waiting (most gradients at once), queued_us, apply_us."""


@dataclass(frozen=True, kw_only=True)
class HostMetrics(Event):
    """The same for a whole machine, written by one process on each (and network namespace)."""

    kind: ClassVar[str] = "machine"
    host: str
    dt: float
    cpu_user: float
    cpu_system: float
    cpu_iowait: float
    cpu_steal: float
    cpu_idle: float
    cores_busy: list[float]
    """Seconds not idle, core by core."""
    memory_used: int
    memory_total: int
    net_in: int
    net_out: int
    """Over all interfaces but loopback."""
    loopback: int
    links: dict[str, list[int]]
    """Bytes in and out by interface, loopback included."""
    disk_read: int
    disk_write: int
    gpus: list[dict[str, Any]] = field(default_factory=list)
    """For each: `name`, `busy` (share), `memory_used`, `memory_total`."""


@dataclass(frozen=True, kw_only=True)
class StepWindow(Event):
    """A window of consecutive steps of one worker, one value a step in every column.

    `lo`/`hi` are the positions [lo, hi) of the epoch's seeded order that the worker computed,
    `start` where the global batch begins that they are a share of. `end` is when the step was
    done, in microseconds after `began`.
    Step phases are microseconds. `staleness` is -1 where it has no meaning, `comm_hidden` where it
    was not measured.
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
    """Where workers read in blocks: the places [lo, hi) of the epoch's shard plan, by step."""


@dataclass(frozen=True, kw_only=True)
class StepSummary(Event):
    """What replaces `steps` once a worker has recorded its share of single steps.

    The steps of one epoch each; `staleness` counts gradients by staleness.
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
    """A profile of operators was written (worker-K.jsonl)."""

    kind: ClassVar[str] = "profile"
    epoch: int
    """From 1, as in the history."""
    steps: int
    path: str


@dataclass(frozen=True, kw_only=True)
class InputStats(Event):
    """About a second of getting batches.

    `wait_s`: training stood still for want of a batch; `make_s`: making them, in whichever thread;
    `queue`: how many lay ready on average when one was asked for, of `depth` made ahead.
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
