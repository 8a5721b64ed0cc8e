"""What a process is told when it is started; it arrives on standard input, never in arguments.

Arguments and environment of a process can be read by others on the machine; the token cannot be
allowed to leak that way.
"""

from __future__ import annotations

import json
from typing import IO, Literal

from pydantic import BaseModel, ConfigDict

from paceline.job import JobRef
from paceline.plugins import Plugin


class Assignment(BaseModel):
    """One process of a run. A server has no job: what it needs is sent by the workers."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    kind: Literal["worker", "server"]
    index: int
    workers: int
    strategy: str
    token: str
    host: str
    """Address of the coordinator."""
    port: int
    bind: str | None = None
    """Where servers and collectives listen; None is the address that reaches the coordinator."""
    threads: int
    """0: as many as the machine's cores allow, which the launcher works out."""
    pin: bool = False
    """Keep each worker to cores of its own."""
    local_rank: tuple[int, int] = (0, 1)
    """Which of the machine's workers this is, and of how many; the launcher knows."""
    timeout_s: float
    folder: str | None
    """The run folder; None where only the supervisor sees it, and keeps what it is sent."""
    started_wall_s: float
    """When the run began; a resumed run began earlier by what it had taken before."""
    servers: tuple[int, ...] = ()
    """Servers that this worker starts as its own children."""
    plugins: tuple[Plugin, ...] = ()
    """What to import before the strategy's text is parsed."""
    job: JobRef | None = None
    checkpoint: str | None = None
    keep_checkpoints: int = 2
    slowdowns: tuple[dict[str, float], ...] = ()
    script: str | None = None
    script_args: tuple[str, ...] = ()
    telemetry: bool = True
    """Record steps and take vitals; without it only totals are told."""
    profile_epoch: int | None = None
    """From 1: the epoch whose operators are timed."""
    has_live_job: bool = False
    """A pickled job follows on standard input: only ever from a parent to its own child."""

    @property
    def process_name(self) -> str:
        return f"{self.kind}-{self.index}"


def pack_assignment(assignment: Assignment, live: bytes | None = None) -> bytes:
    """What to write to a new process's standard input."""
    blocks = [assignment.model_dump_json().encode()] + ([live] if live is not None else [])
    return b"".join(len(block).to_bytes(8, "little") + block for block in blocks)


def read_assignment(stream: IO[bytes]) -> tuple[Assignment, bytes | None]:
    assignment = Assignment.model_validate(json.loads(_read_block(stream)))
    return assignment, _read_block(stream) if assignment.has_live_job else None


def _read_block(stream: IO[bytes]) -> bytes:
    size = int.from_bytes(stream.read(8), "little")
    block = stream.read(size)
    if len(block) != size:
        raise EOFError("the parent process went away before it had said what to do")
    return block
