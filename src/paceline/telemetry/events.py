"""Events of a run, written as one JSON object per line, the rows they carry, and their parser.

The coordinator's process writes `events/run.jsonl`, worker K `events/worker-K.jsonl` and server K
`events/server-K.jsonl`. Every event has `t`, the seconds since the start of the run; all processes
of a run share the same zero. Class names may change, `kind` and field names are a file format.
"""

from __future__ import annotations

import json
import math
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar, TypeVar

from pydantic import ValidationError

from paceline.telemetry.event_rows import DecisionRow as DecisionRow
from paceline.telemetry.event_rows import EpochRow as EpochRow
from paceline.telemetry.event_rows import JsonRecord as JsonRecord
from paceline.telemetry.event_rows import ResultRow as ResultRow
from paceline.telemetry.event_rows import SwitchRow as SwitchRow
from paceline.telemetry.event_rows import ViewRow as ViewRow
from paceline.telemetry.event_rows import from_plain as from_plain

T = TypeVar("T")

STEP_PHASES = ("input", "forward", "backward", "comm_exposed", "optimizer", "wait", "queue")
"""Time categories recorded for each step, in microseconds."""

PHASES = ("startup", *STEP_PHASES, "eval", "switch", "other")
"""Time categories of a worker; they add up to its wall time."""

SERVER_PHASES = ("startup", "idle", "receive", "apply", "send")
"""Time categories of a server. Concurrent ones count as apply, then send, then receive."""

EVENT_TYPES: dict[str, type[Event]] = {}
"""Event types by the `kind` they are written with."""


@typing.dataclass_transform(kw_only_default=True, frozen_default=True, field_specifiers=(field,))
@dataclass(frozen=True, kw_only=True)
class Event(JsonRecord):
    """Base of all event types: a subclass is a frozen dataclass, written with its `kind`."""

    kind: ClassVar[str] = ""
    t: float

    def __init_subclass__(cls, *, kind: str) -> None:
        assert kind not in EVENT_TYPES, "two event types share a kind"
        cls.kind = kind
        EVENT_TYPES[kind] = dataclass(frozen=True, kw_only=True)(cls)

    def to_plain(self) -> dict[str, object]:
        """Returns the event as a JSON object that shares its lists and dicts with the event."""
        plain = {"kind": self.kind, **vars(self)}
        if isinstance(row := plain.get("row"), ResultRow):
            plain["row"] = row.to_plain()
        return plain

    def to_line(self) -> str:
        return json.dumps(self.to_plain(), separators=(",", ":"), allow_nan=True)


class RunStarted(Event, kind="started"):
    """The run started (run.jsonl); run.json has the full configuration."""

    strategy: str
    workers: int
    servers: int


class RunLengthKnown(Event, kind="totals"):
    """Length of the run, written once the data has been read (run.jsonl)."""

    epochs: int | None
    samples_per_epoch: int | None
    notes: tuple[str, ...] = ()
    """Caveats on the data; written only if there are any."""

    def to_plain(self) -> dict[str, object]:
        plain = super().to_plain()
        return plain if self.notes else {k: v for k, v in plain.items() if k != "notes"}


class StrategyStarted(Event, kind="phase"):
    """A strategy took effect; `lr` describes its learning rate."""

    strategy: str
    samples: int
    lr: str


class RunProgress(Event, kind="progress"):
    """Totals so far, about twice per second (run.jsonl)."""

    epoch: int
    samples: int
    updates: int
    loss: float | None


class EpochEnded(Event, kind="epoch"):
    """An epoch ended; the row is also in result.json."""

    row: EpochRow


class StrategySwitched(Event, kind="switch"):
    """The strategy was switched; written when all workers have resumed training."""

    row: SwitchRow


class ViewChanged(Event, kind="view"):
    """Workers were lost or have joined; the row is also in result.json."""

    row: ViewRow


class SwitchDecided(Event, kind="decision"):
    """A switch rule made a decision; the row is also in result.json."""

    row: DecisionRow


class CheckpointSaved(Event, kind="checkpoint"):
    """A checkpoint is complete and has its final name."""

    samples: int
    path: str


class FaultInjected(Event, kind="fault"):
    """A fault of --fault was injected (run.jsonl)."""

    text: str


class RunEnded(Event, kind="ended"):
    """Last event of run.jsonl, unless the run was interrupted."""

    status: str
    error: str | None = None


VERDICT_BEGAN, VERDICT_OVER = "began", "over"


class VerdictChanged(Event, kind="verdict"):
    """A verdict began to hold or was cleared (run.jsonl); fields as in `verdicts.Verdict`."""

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


class WorkerStarted(Event, kind="worker"):
    """First line of worker-K.jsonl."""

    worker: int
    host: str
    pid: int
    threads: int
    namespace: int = 0
    """Network namespace, which tells apart machines of one host name; 0 if unknown."""
    cores: list[int] = field(default_factory=list)
    """CPU cores this process may run on."""
    quota: float | None = None
    """CPU limit of the cgroup in cores; None without a limit."""


class ServerStarted(Event, kind="server"):
    """First line of server-K.jsonl."""

    server: int
    beside: int
    """The worker that started it."""
    host: str
    pid: int
    namespace: int = 0
    cores: list[int] = field(default_factory=list)
    quota: float | None = None


class ProcessMetrics(Event, kind="vitals"):
    """Resource usage of a process in the last second (`dt`): amounts, not running totals.

    Every process writes one per second. After an hour two are merged into one, after three hours
    four, and so on, which keeps the folder of a long run small.
    """

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


class HostMetrics(Event, kind="machine"):
    """Resource usage of a host, written by one process per host and network namespace."""

    host: str
    dt: float
    cpu_user: float = 0.0
    cpu_system: float = 0.0
    cpu_iowait: float = 0.0
    cpu_steal: float = 0.0
    cpu_idle: float = 0.0
    cores_busy: list[float] = field(default_factory=list)
    """Busy seconds per core."""
    namespace: int = 0
    """As in `WorkerStarted`."""
    load: float = 0.0
    """Mean number of runnable or blocked threads over the last minute, as the kernel counts it."""
    memory_used: int = 0
    memory_total: int = 0
    memory_cached: int = 0
    """File cache and buffers, which are not part of `memory_used`."""
    swap_used: int = 0
    net_in: int = 0
    net_out: int = 0
    """Over all interfaces except loopback."""
    loopback: int = 0
    links: dict[str, list[int]] = field(default_factory=dict)
    """Bytes received and sent per interface, including loopback."""
    disk_read: int = 0
    disk_write: int = 0
    gpus: list[Mapping[str, object]] = field(default_factory=list)
    """`name`, `busy` (fraction of the time a kernel ran), `memory_used` and `memory_total`."""


class StepWindow(Event, kind="steps"):
    """Consecutive steps of one worker; every column has one value per step.

    The worker computed the positions [`lo`, `hi`) of the epoch's seeded order, its share of the
    global batch that begins at `start`. `end` is the end of the step in microseconds after `began`.
    Time categories are in microseconds. `staleness` is -1 where it does not apply, `comm_hidden` is
    -1 where it was not measured.
    """

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


class StepSummary(Event, kind="steps_sum"):
    """Sums over steps of one epoch; replaces `StepWindow` after a worker's first 200,000 steps."""

    first_step: int
    count: int
    samples: int
    phases_us: dict[str, int]
    began: float = 0.0
    epoch: int = 0
    staleness: dict[str, int] = field(default_factory=dict)
    """Number of gradients by staleness."""


class ProfileWritten(Event, kind="profile"):
    """An operator profile was written (worker-K.jsonl)."""

    epoch: int
    """Counted from 1, as in the history."""
    steps: int
    path: str


class InputStats(Event, kind="input"):
    """Input pipeline statistics over about one second.

    `wait_s` is the time training waited for a batch, `make_s` the time spent preparing batches in
    any thread, `queue` the mean number of prepared batches at a request, out of `depth`.
    """

    batches: int
    wait_s: float
    make_s: float
    queue: float
    depth: int


class WorkerEnded(Event, kind="worker_ended"):
    """Last line of worker-K.jsonl: totals in seconds and bytes."""

    phases: dict[str, float]
    bytes_sent: int
    peak_rss_bytes: int


class ServerEnded(Event, kind="server_ended"):
    """Last line of server-K.jsonl."""

    phases: dict[str, float]
    bytes_sent: int
    bytes_received: int
    peak_rss_bytes: int


def parse_event(plain: object) -> Event | None:
    """Returns the event of a JSON object; None if its kind is unknown or it is malformed."""
    kind = plain.get("kind") if isinstance(plain, dict) else None
    event_type = EVENT_TYPES.get(kind) if isinstance(kind, str) else None
    if event_type is None:
        return None
    try:
        event = from_plain(event_type, plain)
    except ValidationError:
        return None
    return event if math.isfinite(event.t) else None
