"""The typed events of a run, one JSON object a line.

`events/run.jsonl` is written by the coordinator's process, `events/worker-K.jsonl` by worker K.
Every event carries `t`, seconds since the run began (the same zero for every process of a run).
"""

from __future__ import annotations

import dataclasses
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
    "eval",
    "switch",
    "other",
)
"""Where a worker's wall time goes; the phases of a worker add up to its wall time."""

STEP_PHASES = ("input", "forward", "backward", "comm_exposed", "optimizer", "wait")
"""The phases that are recorded for every single step, in microseconds."""


@dataclass(frozen=True, kw_only=True)
class Event:
    kind: ClassVar[str] = ""
    t: float

    def to_line(self) -> str:
        body = {"kind": self.kind, **dataclasses.asdict(self)}
        return json.dumps(body, separators=(",", ":"), allow_nan=True)


@dataclass(frozen=True, kw_only=True)
class Started(Event):
    """The run began (run.jsonl) with this configuration; see run.json for all of it."""

    kind: ClassVar[str] = "started"
    strategy: str
    workers: int
    servers: int


@dataclass(frozen=True, kw_only=True)
class PhaseBegan(Event):
    """A strategy is in force from here on; `lr` says in words which learning rate."""

    kind: ClassVar[str] = "phase"
    strategy: str
    samples: int
    lr: str


@dataclass(frozen=True, kw_only=True)
class Progressed(Event):
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
class Switched(Event):
    """One row of result.json's `switches`."""

    kind: ClassVar[str] = "switch"
    row: dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Decided(Event):
    """One row of result.json's `decisions`: what a rule said, and the figures behind it."""

    kind: ClassVar[str] = "decision"
    row: dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class CheckpointSaved(Event):
    kind: ClassVar[str] = "checkpoint"
    samples: int
    path: str


@dataclass(frozen=True, kw_only=True)
class Ended(Event):
    kind: ClassVar[str] = "ended"
    status: str
    error: str | None = None


@dataclass(frozen=True, kw_only=True)
class WorkerBegan(Event):
    """First line of worker-K.jsonl."""

    kind: ClassVar[str] = "worker"
    worker: int
    host: str
    pid: int
    threads: int


@dataclass(frozen=True, kw_only=True)
class StepsDone(Event):
    """A window of consecutive steps of one worker, one value a step in every column.

    `lo`/`hi` are the positions [lo, hi) of the epoch's seeded order that the worker computed,
    `start` where the global batch begins that they are a share of.
    Step phases are microseconds. `staleness` is -1 where it has no meaning.
    """

    kind: ClassVar[str] = "steps"
    first_step: int
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
    pieces: list[list[list[int]]] = field(default_factory=list)
    """Where workers read in blocks: the places [lo, hi) of the epoch's shard plan, by step."""


@dataclass(frozen=True, kw_only=True)
class StepsSummed(Event):
    """What replaces `steps` once a worker has recorded its share of single steps."""

    kind: ClassVar[str] = "steps_sum"
    first_step: int
    count: int
    samples: int
    phases_us: dict[str, int]


@dataclass(frozen=True, kw_only=True)
class InputDone(Event):
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
