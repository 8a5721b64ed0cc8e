"""Parameter exchange through shared memory, for a server and workers on the same host.

Each server owns a `SharedWeights` segment: its current weights, their version and a seqlock.
Workers copy the weights from it. Each worker owns one `GradientMailbox` per server: a gradient and
its header. The coordinator's `ApplyUpdate` names the gradient that the server is to read, so
nothing is sent between worker and server.

Readers detect concurrent updates with the seqlock's sequence number and retry. Retries are rare,
because the server waits briefly for active readers before it updates; after `MAX_COPY_ATTEMPTS`
the worker pulls over TCP.
"""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Callable, Iterable
from dataclasses import KW_ONLY, dataclass
from pathlib import Path

import torch

from paceline.comm.shm.segment import (
    CACHE_LINE,
    PAGE_BYTES,
    SHM_DIR,
    SharedWord,
    Words,
    create_segment,
    open_segment,
    round_up,
    unlink_segment,
)
from paceline.errors import DeadlineExceeded, WireError

HEADER_BYTES = 16384
"""Room for a gradient's header; a larger one is sent over TCP."""
GRACE_S, GRACE_BYTES_PER_S = 0.1, 1e9
"""Limit on how long an update waits for a reader: a stopped one must not stop the others."""
MAX_COPY_ATTEMPTS = 4
"""Disturbed copies before the worker asks the server to send the weights."""
_CHANGES = _ACTIVE_READ = 2
"""Words on which other processes sleep."""


class SharedWeights:
    """A server's weights in memory that workers on its host map; only the server writes."""

    sequence = SharedWord(0)
    """Odd during an update; changes with each."""
    version = SharedWord(1)
    changes = SharedWord(_CHANGES)
    """Workers that wait for a change sleep on this word."""
    update_pending = SharedWord(3)
    """1 if an update is in progress or waits for readers, else 0."""
    applied_us = SharedWord(4)
    """Time spent on updates so far."""

    def __init__(self, memory: mmap.mmap, nbytes: int) -> None:
        self.words = Words(memory)
        self.weights = _tensor(memory, PAGE_BYTES, nbytes)

    def begin_update(self, mailboxes: Iterable[GradientMailbox]) -> None:
        """Waits briefly for workers that are copying, then marks the weights as changing."""
        self.update_pending = 1
        for mailbox in mailboxes:
            mailbox.wait_for_reader()
        self.sequence += 1

    def end_update(self, version: int, took_us: int) -> None:
        """Publishes the new version."""
        self.version = version
        self.applied_us += took_us
        self.sequence += 1
        self.update_pending = 0
        self.notify()

    def reset(self) -> None:
        """Starts versions at 0 again, after other weights were loaded."""
        self.version = 0
        self.notify()

    def notify(self) -> None:
        """Wakes the workers that wait for a change."""
        self.changes += 1
        self.words.wake(_CHANGES)


class SharedWeightsOwner(SharedWeights):
    """The server's own `SharedWeights`: an unnamed file, reached through its process."""

    def __init__(self, nbytes: int) -> None:
        """Raises OSError if there is no room."""
        name = create_segment(PAGE_BYTES + nbytes)
        try:
            self._file = os.open(SHM_DIR / name, os.O_RDWR | os.O_NOFOLLOW)
        finally:
            unlink_segment(name)
        super().__init__(mmap.mmap(self._file, PAGE_BYTES + nbytes), nbytes)

    def descriptor(self) -> dict[str, int]:
        """Returns what `open_shared_weights` needs in a process of the same user and host."""
        return {"pid": os.getpid(), "file": self._file}

    def close(self) -> None:
        os.close(self._file)


def open_shared_weights(descriptor: dict[str, int], nbytes: int) -> SharedWeights:
    """Maps a server's weights; raises OSError if this process may not access the server's files."""
    path = Path(f"/proc/{int(descriptor['pid'])}/fd/{int(descriptor['file'])}")
    handle = os.open(path, os.O_RDWR)
    try:
        size = os.fstat(handle).st_size
        if size != PAGE_BYTES + nbytes:
            raise WireError(f"a server's weights have {size} bytes, expected {PAGE_BYTES + nbytes}")
        return SharedWeights(mmap.mmap(handle, size), nbytes)
    finally:
        os.close(handle)


class GradientMailbox:
    """A worker's gradient for one server, with its header and a few words."""

    handle = SharedWord(0)
    """Handle of the posted gradient; 0 if there is none."""
    header_size = SharedWord(1)
    active_read = SharedWord(_ACTIVE_READ)
    """Number of the read in progress; 0 if there is none."""
    reads = SharedWord(3)
    """Number of times that weights were copied."""
    queued_us = SharedWord(4)
    """Total time that these copies waited for updates."""
    consumed = SharedWord(5)
    """Handle of the last push that the server no longer needs here."""

    def __init__(self, memory: mmap.mmap, *, server: int, servers: int, lo: int, hi: int) -> None:
        """Bytes `lo` to `hi` of the gradient are the server's."""
        self.words = Words(memory, first_line=server)
        start = round_up(servers * CACHE_LINE) + server * HEADER_BYTES
        self._header = memoryview(memory)[start : start + HEADER_BYTES]
        self.gradient = _tensor(memory, _gradient_offset(servers) + lo, hi - lo)
        self.last_handle = 0
        """Handle of the last push; known to the worker only."""
        self._reads_started = 0
        self._stalled_read = 0
        """Read that the server no longer waits for; known to the server only."""

    # ---- worker -------------------------------------------------------------------------------

    def post(self, handle: int, header: bytes) -> bool:
        """Publishes the gradient; returns False if its header does not fit."""
        if len(header) > HEADER_BYTES:
            return False
        self._header[: len(header)] = header
        self.header_size = len(header)
        self.last_handle = handle
        self.handle = handle
        return True

    def begin_reading(self) -> None:
        self._reads_started += 1
        self.active_read = self._reads_started

    def end_reading(self) -> None:
        self.active_read = 0
        self.words.wake(_ACTIVE_READ)

    # ---- server -------------------------------------------------------------------------------

    def header_of(self, handle: int) -> bytes | None:
        """Returns the header of the posted gradient, if it is the one of this push."""
        return bytes(self._header[: self.header_size]) if self.handle == handle else None

    def wait_for_reader(self) -> None:
        """Waits for the copy in progress; for one that takes too long, only once."""
        if self._has_no_reader():
            return
        deadline = time.monotonic() + GRACE_S + self.gradient.numel() / GRACE_BYTES_PER_S
        if not self.words.wait(
            _ACTIVE_READ, self._has_no_reader, deadline=deadline, alive=lambda: None
        ):
            self._stalled_read = self.active_read

    def _has_no_reader(self) -> bool:
        return self.active_read in (0, self._stalled_read)


class MailboxSegment:
    """A worker's memory for its gradient, with a mailbox per server."""

    def __init__(self, servers: int, nbytes: int) -> None:
        """Raises OSError if there is no room."""
        self._servers = servers
        size = _gradient_offset(servers) + nbytes
        self.name = create_segment(size)
        try:
            self._memory = open_segment(self.name, size)
        except OSError:
            unlink_segment(self.name)
            raise
        self.gradient = _tensor(self._memory, _gradient_offset(servers), nbytes)

    def mailbox(self, server: int, lo: int, hi: int) -> GradientMailbox:
        return GradientMailbox(self._memory, server=server, servers=self._servers, lo=lo, hi=hi)

    def unlink(self) -> None:
        """Removes the name, after all servers that can have opened it."""
        unlink_segment(self.name)


def open_mailbox(name: str, *, server: int, servers: int, lo: int, hi: int) -> GradientMailbox:
    """Opens a worker's mailbox in the server; raises OSError if it cannot be opened."""
    if not (0 <= server < servers and 0 <= lo <= hi):
        raise WireError(
            f"invalid gradient range: bytes {lo} to {hi} for server {server} of {servers}"
        )
    memory = open_segment(name, _gradient_offset(servers) + hi)
    return GradientMailbox(memory, server=server, servers=servers, lo=lo, hi=hi)


@dataclass(frozen=True)
class SharedWeightsReader:
    """Copies the weights of one server into a worker's buffer."""

    weights: SharedWeights
    mailbox: GradientMailbox
    _: KW_ONLY
    peer: str
    timeout_s: float
    check_peer: Callable[[], None]
    """Raises if the server is gone."""

    def copy_weights(self, at_least: int, target: torch.Tensor) -> tuple[int, int] | None:
        """Copies the weights, once they have that version and the last push was consumed.

        Returns their version, and how long updates were in progress meanwhile (us); None if they
        changed during every attempt.
        """
        shared, mailbox = self.weights, self.mailbox
        start, applied_us = time.perf_counter_ns(), shared.applied_us
        for _ in range(MAX_COPY_ATTEMPTS):
            self.wait_for(at_least)
            sequence = shared.sequence
            if sequence % 2:
                continue
            version = shared.version
            waited_us = (time.perf_counter_ns() - start) // 1000
            mailbox.begin_reading()
            try:
                target.copy_(shared.weights)
                changed = shared.sequence != sequence
            finally:
                mailbox.end_reading()
            if not changed:
                queued_us = min(waited_us, shared.applied_us - applied_us)
                mailbox.reads += 1
                mailbox.queued_us += queued_us
                return version, queued_us
        return None

    def wait_for(self, at_least: int) -> None:
        """Waits for that version, and until the server has consumed the last push."""
        shared, mailbox = self.weights, self.mailbox

        def ready() -> bool:
            return (
                shared.version >= at_least
                and mailbox.consumed >= mailbox.last_handle
                and not shared.update_pending
            )

        deadline = time.monotonic() + self.timeout_s
        if not shared.words.wait(_CHANGES, ready, deadline=deadline, alive=self.check_peer):
            raise DeadlineExceeded(
                f"{self.peer}: version {at_least} was not available within "
                f"{self.timeout_s:g} s (now {shared.version})"
            )


def _gradient_offset(servers: int) -> int:
    """Returns the bytes for words and headers of all servers, which precede the gradient."""
    return round_up(servers * CACHE_LINE) + servers * HEADER_BYTES


def _tensor(memory: mmap.mmap, offset: int, nbytes: int) -> torch.Tensor:
    if nbytes == 0:
        return torch.zeros(0, dtype=torch.uint8)
    return torch.frombuffer(memory, dtype=torch.uint8, count=nbytes, offset=offset)
