"""Configuration of a worker or server process, sent over stdin, never in the argument list.

Arguments and environment of a process can be read by others on the machine; the token cannot be
allowed to leak that way.
"""

import io
import pickle
from multiprocessing import current_process, spawn
from typing import IO, Any, Literal

from pydantic import BaseModel

from paceline.errors import UsageError
from paceline.job import JobRef
from paceline.plugins import Plugin


class CollectivesPlan(BaseModel, frozen=True, extra="forbid"):
    """A measurement of collectives, instead of training."""

    sizes: tuple[int, ...]
    """Bytes."""
    rounds: int
    """At most as many; a point that takes long has fewer."""


class Assignment(BaseModel, frozen=True, extra="forbid"):
    """One process of a run. A server has no job: what it needs is sent by the workers."""

    kind: Literal["worker", "server"]
    index: int
    workers: int
    strategy: str
    token: str
    host: str
    """Address of the coordinator."""
    port: int
    bind: str | None = None
    """Address for servers and collectives; None for the one that reaches the coordinator."""
    threads: int
    """0: cores divided by workers, computed by the launcher."""
    pin: bool = False
    """Pin each worker to its own cores."""
    local_rank: tuple[int, int] = (0, 1)
    """Index among the workers of this machine and their number; set by the launcher."""
    timeout_s: float
    folder: str | None
    """The run folder; None if only the supervisor has access to it."""
    started_wall_s: float
    """Start of the run; earlier for a resumed run, by the time that it had taken before."""
    servers: tuple[int, ...] = ()
    """Servers that this worker starts as its own children."""
    plugins: tuple[Plugin, ...] = ()
    """Modules to import before the strategy text is parsed."""
    job: JobRef | None = None
    checkpoint: str | None = None
    keep_checkpoints: int = 2
    elastic: bool = False
    """The run continues without workers that are lost."""
    orphan_grace_s: float = 0.0
    """Time to wait for another coordinator if this one is lost; 0: end with it."""
    incarnation: int = 0
    """Number of the coordinator among those of the run."""
    joins: int = 0
    """Number of restarts of this worker, which then joins a run that has begun."""
    slowdowns: tuple[dict[str, float], ...] = ()
    script: str | None = None
    script_args: tuple[str, ...] = ()
    telemetry: bool = True
    """Record steps and process metrics; otherwise only totals are reported."""
    profile_epochs: tuple[int, int] | None = None
    """First and last epoch whose operators are profiled, counted from 1."""
    collectives: CollectivesPlan | None = None
    """Measure these instead of training."""
    has_live_job: bool = False
    """A pickled job follows on standard input: only ever from a parent to its own child."""

    @property
    def process_name(self) -> str:
        return f"{self.kind}-{self.index}"

    @property
    def may_outlive(self) -> bool:
        """True if the process may outlive the coordinator: it finds the next in the run folder."""
        return self.orphan_grace_s > 0 and self.folder is not None


def pack_assignment(assignment: Assignment, live: bytes | None = None) -> bytes:
    """The bytes to write to the stdin of a new process."""
    blocks = [assignment.model_dump_json().encode()] + ([live] if live is not None else [])
    return b"".join(pack_block(block) for block in blocks)


def read_assignment(stream: IO[bytes]) -> tuple[Assignment, bytes | None]:
    assignment = Assignment.model_validate_json(read_block(stream))
    return assignment, read_block(stream) if assignment.has_live_job else None


def pack_block(block: bytes) -> bytes:
    return len(block).to_bytes(8, "little") + block


def read_block(
    stream: IO[bytes], problem: str = "the parent process exited before it sent the assignment"
) -> bytes:
    """Reads what `pack_block` returned. Raises EOFError(problem) if the stream ends before."""
    head = stream.read(8)
    size = int.from_bytes(head, "little")
    block = stream.read(size)
    if len(head) < 8 or len(block) < size:
        raise EOFError(problem)
    return block


def pack_live(thing: Any) -> bytes:
    """Pickles live objects for a child process, with the path of the main script they come from."""
    preparation = spawn.get_preparation_data("paceline")
    preparation.pop("authkey", None)
    try:
        # Plain pickle: torch's reductions for multiprocessing would pass file descriptors.
        return pickle.dumps(preparation) + pickle.dumps(thing)
    except Exception as error:
        raise UsageError(
            f"the job's objects cannot be sent to worker processes ({error}); "
            "define functions and classes at the top level of a module, or use a job file"
        ) from None


def unpack_live(data: bytes) -> Any:
    buffer = io.BytesIO(data)
    # As multiprocessing marks its own children: `run_training` refuses to start in the script.
    process: Any = current_process()
    process._inheriting = True
    try:
        spawn.prepare(pickle.load(buffer))
    finally:
        del process._inheriting
    return pickle.load(buffer)
