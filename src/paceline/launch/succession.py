"""Succession: what a coordinator leaves to the next one, and how the next one takes over a run.

The journal in the run folder begins with the token and the number of the coordinator, and contains
the processes that it has started and the entries of `protocol.journal`. It is removed when the run
ends, so one that remains belongs to a coordinator that was lost.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import os
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from paceline.errors import WireError
from paceline.protocol.history import CoordinatorMemory
from paceline.protocol.journal import (
    JournalEntry,
    JournalReplay,
    SnapshotTaken,
    entry_from_plain,
    entry_to_plain,
)
from paceline.protocol.messages import ApplyUpdate
from paceline.telemetry.run_folder import CoordinatorAddress, RunFolder, read_address, replace_text

FORMAT = 1
MAX_BYTES = 8 << 20
"""Beyond this size the journal is replaced by its last snapshot."""
END_TIMEOUT_S = 5.0
ADOPT_S = 5.0
"""Time for the workers of a lost coordinator to return."""
GAP_S = 2.0
"""A coordinator that handles nothing for this long was stopped: heartbeats arrive every second."""


@dataclass(frozen=True)
class JournalHead:
    """The first line of a journal."""

    format: int
    incarnation: int
    token: str
    started_wall_s: float


@dataclass(frozen=True)
class JournaledProcess:
    """A process of the run on this machine."""

    name: str
    pid: int
    born: int
    """Start time in clock ticks since boot: another process may get the same pid."""

    @property
    def is_alive(self) -> bool:
        return read_birth(self.pid) == self.born


def read_birth(pid: int) -> int | None:
    """Returns the start time of a process; None if it has ended."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as stat:
            fields = stat.read().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else int(fields[19])


@dataclass(frozen=True)
class Journal:
    """The content of a journal."""

    head: JournalHead
    processes: dict[str, JournaledProcess]
    memory: CoordinatorMemory | None
    """The coordinator's memory; None if the run had not begun."""
    replay: JournalReplay

    @property
    def live(self) -> dict[str, JournaledProcess]:
        return {name: process for name, process in self.processes.items() if process.is_alive}


def read_journal(folder: RunFolder) -> Journal | None:
    """Returns the journal of a run; None if there is none, or not a valid one."""
    head, processes, replay = None, dict[str, JournaledProcess](), JournalReplay()
    try:
        for plain in _read_lines(folder):
            if head is None:
                head = JournalHead(**plain)
                if head.format != FORMAT:
                    return None
            elif isinstance(plain, dict):
                process = JournaledProcess(**plain)
                processes[process.name] = process
            else:
                replay.add(entry_from_plain(plain))
    except (OSError, ValueError, TypeError, WireError):
        return None
    return Journal(head, processes, replay.memory, replay) if head is not None else None


def _read_lines(folder: RunFolder) -> Iterator[Any]:
    with folder.journal.open("rb") as file:
        for line in file:
            if line.endswith(b"\n"):  # The last line may have been cut off.
                yield json.loads(line)


@dataclass(frozen=True)
class Adoption:
    """The run of a coordinator that is lost, whose workers wait for another one."""

    journal: Journal
    memory: CoordinatorMemory
    lines: bytes
    """The journal after its first line."""

    def take_over(self) -> list[AdoptedProcess]:
        """Returns the processes of the run that are alive."""
        members = {f"worker-{worker}" for worker in self.memory["position"].members}
        found = []
        for name, record in self.journal.live.items():
            process = AdoptedProcess(record)
            if name in members or name.startswith("server"):
                found.append(process)
            else:
                process.kill()  # It was not admitted yet, and holds no state.
        return found


def find_adoption(folder: RunFolder, min_workers: int) -> Adoption | None:
    """Returns the run in a folder if enough of its processes are alive to continue it."""
    journal = read_journal(folder)
    if journal is None or journal.memory is None:
        return None
    live, position = journal.live, journal.memory["position"]
    workers = [w for w in position.members if f"worker-{w}" in live]
    servers = [s for s in position.holding if f"server-{s}" in live]
    if len(workers) < max(1, min_workers) or (position.servers and not servers):
        return None
    lines = folder.journal.read_bytes().partition(b"\n")[2]
    return Adoption(journal, journal.memory, lines[: lines.rfind(b"\n") + 1])


def end_orphans(folder: RunFolder) -> int:
    """Ends the processes that a lost coordinator has left; returns how many were alive."""
    journal = read_journal(folder)
    # Without their address, they also end by themselves.
    folder.address.unlink(missing_ok=True)
    live = list(journal.live.values()) if journal is not None else []
    for process in live:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
    deadline = time.monotonic() + END_TIMEOUT_S
    while any(process.is_alive for process in live) and time.monotonic() < deadline:
        time.sleep(0.01)
    folder.journal.unlink(missing_ok=True)
    return len(live)


class Succession:
    """Writes what the next coordinator needs, and notices that there is one."""

    def __init__(
        self, folder: RunFolder, token: str, started_wall_s: float, adoption: Adoption | None
    ) -> None:
        self.incarnation = 0 if adoption is None else adoption.journal.head.incarnation + 1
        self._folder = folder
        self._head = JournalHead(FORMAT, self.incarnation, token, started_wall_s)
        self._processes = dict(adoption.journal.processes) if adoption is not None else {}
        self._active_wall_s = time.time()
        self._superseded: str | None = None
        self._file: int | None = None
        self._bytes = 0
        self._replace(adoption.lines if adoption is not None else b"")
        self._address = CoordinatorAddress(self.incarnation, "", 0, os.getpid())

    def announce(self, host: str, port: int) -> None:
        """Publishes the address at which the workers find this coordinator."""
        self._address = CoordinatorAddress(self.incarnation, host, port, os.getpid())
        replace_text(self._folder.address, json.dumps(dataclasses.asdict(self._address)) + "\n")

    def add_process(self, name: str, pid: int) -> None:
        process = JournaledProcess(name, pid, read_birth(pid) or 0)
        self._processes[name] = process
        self._append(dataclasses.asdict(process))

    def write(self, entry: JournalEntry) -> None:
        self._append(entry_to_plain(entry))
        if self._bytes > MAX_BYTES and isinstance(entry, SnapshotTaken):
            self._shorten()

    def orders_after(self, version: int) -> list[ApplyUpdate]:
        """Returns the updates since the last snapshot that a server at this version lacks."""
        journal = read_journal(self._folder)
        if journal is None or journal.memory is None:
            return []
        orders = journal.memory["position"].orders
        return [order for order in orders if order.version > version]

    def _append(self, plain: object) -> None:
        assert self._file is not None
        line = json.dumps(plain, separators=(",", ":")).encode() + b"\n"
        # Without a buffer: the page cache outlives this process.
        os.write(self._file, line)
        self._bytes += len(line)

    def _shorten(self) -> None:
        """Keeps the processes and the last snapshot, with the whole history."""
        journal = read_journal(self._folder)
        snapshot = journal.replay.snapshot if journal is not None else None
        if snapshot is not None:
            plain = [*map(dataclasses.asdict, self._processes.values()), entry_to_plain(snapshot)]
            self._replace(b"".join(json.dumps(line).encode() + b"\n" for line in plain))

    def _replace(self, lines: bytes) -> None:
        """Starts another file: a coordinator that is not lost after all still has the old one."""
        partial = self._folder.journal.with_name(self._folder.journal.name + ".partial")
        partial.unlink(missing_ok=True)
        if self._file is not None:
            os.close(self._file)
        self._file = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND, 0o600)
        head = json.dumps(dataclasses.asdict(self._head)).encode() + b"\n"
        os.write(self._file, head + lines)
        self._bytes = len(head) + len(lines)
        os.replace(partial, self._folder.journal)

    def why_superseded(self, *, check: bool = False) -> str | None:
        """Describes the coordinator that has taken over the run; None while it is this one.

        That can only happen while this process is stopped, so it is looked for after a gap, or
        with `check`.
        """
        gap_s = time.time() - self._active_wall_s
        self._active_wall_s += gap_s
        if self._superseded is not None or not (check or gap_s > GAP_S):
            return self._superseded
        if (other := self._find_successor()) is not None:
            self._superseded = (
                f"process {other.pid} has taken over the run in {self._folder.path}; this one has "
                "ended without changing it"
            )
        return self._superseded

    def _find_successor(self) -> CoordinatorAddress | None:
        """Returns the address of a coordinator that has taken over the run."""
        address, mine = read_address(self._folder), self._address
        if address is None or address.incarnation < mine.incarnation or address == mine:
            return None
        # On a file system without locks, two may have taken over at once: the last one has.
        is_other = address.incarnation > mine.incarnation or mine.port > 0
        return address if is_other else None

    def close(self) -> None:
        """The run is over: there is nothing to continue."""
        if self._file is not None:
            os.close(self._file)
            self._file = None
        if self.why_superseded(check=True) is None:
            self._folder.address.unlink(missing_ok=True)
            self._folder.journal.unlink(missing_ok=True)


class AdoptedProcess:
    """A process that another supervisor has started."""

    def __init__(self, record: JournaledProcess) -> None:
        self.process_name = record.name
        self.location = f"pid {record.pid}"
        self.pid: int | None = record.pid
        self._record = record
        self._descriptor = os.pidfd_open(record.pid)
        self._ended = asyncio.get_running_loop().create_future()
        asyncio.get_running_loop().add_reader(self._descriptor, self._note_end)

    def _note_end(self) -> None:
        asyncio.get_running_loop().remove_reader(self._descriptor)
        os.close(self._descriptor)
        self._ended.set_result(None)

    async def wait(self) -> str | None:
        """Waits for the end, whose status only its own parent receives."""
        await asyncio.shield(self._ended)
        return "ended, with unknown status"

    def send_command(self, line: str) -> None:
        """Does nothing: the pipe to the process is gone."""

    def kill(self) -> None:
        if not self._ended.done():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._record.pid, signal.SIGKILL)
