"""What a parameter server and a worker of its machine leave for each other in memory.

The *board* is the server's: its weights, and which version they are. Workers copy them from there.
A *lane* is a worker's, one for each server: a gradient, and what is to be said about it. The
coordinator's order tells the server that it is there. So nothing is sent between the two.

A worker cannot know whether weights change while it copies them, but it sees afterwards that they
did (`turn`), and copies again. That is rare: a server lets those who are reading finish first, for
a moment. Stores are seen by others in the order in which they were made (x86-64).
"""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import torch

from paceline.comm.shm import futex
from paceline.comm.shm.segment import FOLDER, create_segment, open_segment, unlink_segment
from paceline.errors import DeadlineExceeded, WireError

PAGE = 4096
LINE = 64
WORD = 8
HEADER_BYTES = 16384
"""Bytes for what is said about a gradient; more than that is sent."""
GRACE_S, GRACE_BYTES_PER_S = 0.1, 1e9
"""How long an update waits for one who reads: one that was stopped must not stop the others."""
SLICE_S = 0.1
"""How long a server that has gone can go unnoticed."""
MAX_COPY_ATTEMPTS = 4
"""Copies that were disturbed, until the server is asked to send the weights."""

_TURN, _VERSION, _BELL, _WANTED, _APPLIED_US = range(5)
_HANDLE, _HEAD_BYTES, _READING, _READS, _QUEUED_US, _TAKEN = range(6)


class SharedWeights:
    """A server's weights in memory that workers of its machine map; only the server writes."""

    def __init__(self, memory: mmap.mmap, nbytes: int) -> None:
        self._words = memoryview(memory)[:LINE].cast("q")
        self._address = futex.address_of(memory)
        self.weights = _tensor(memory, PAGE, nbytes)

    @property
    def sequence(self) -> int:
        """Odd while an update is under way; another after each."""
        return self._words[_TURN]

    @property
    def version(self) -> int:
        return self._words[_VERSION]

    @property
    def update_pending(self) -> bool:
        """An update is under way, or waits for those who read."""
        return bool(self._words[_WANTED])

    @property
    def applied_us(self) -> int:
        """Time spent on updates so far."""
        return self._words[_APPLIED_US]

    # ---- the server's side --------------------------------------------------------------------

    def begin_update(self, lanes: Iterable[GradientMailbox]) -> None:
        words = self._words
        words[_WANTED] = 1
        for lane in lanes:
            lane.wait_for_reader()
        words[_TURN] += 1

    def end_update(self, version: int, took_us: int) -> None:
        words = self._words
        words[_VERSION] = version
        words[_APPLIED_US] += took_us
        words[_TURN] += 1
        words[_WANTED] = 0
        self.notify()

    def reset(self) -> None:
        """Other weights are there, and versions count from 0 again."""
        self._words[_VERSION] = 0
        self.notify()

    def notify(self) -> None:
        """Something has changed that workers may wait for."""
        self._words[_BELL] += 1
        futex.wake(self._address + _BELL * WORD)

    # ---- the workers' side --------------------------------------------------------------------

    @property
    def notify_count(self) -> int:
        return self._words[_BELL]

    def wait_for_notify(self, seen: int) -> None:
        """Until it has rung since it was seen, or a moment has passed."""
        futex.wait(self._address + _BELL * WORD, seen, SLICE_S)


class SharedWeightsOwner(SharedWeights):
    """As the server makes it: a file without a name, which others reach through this process."""

    def __init__(self, nbytes: int) -> None:
        """Raises OSError where there is no room."""
        name = create_segment(PAGE + nbytes)
        try:
            self._file = os.open(FOLDER / name, os.O_RDWR | os.O_NOFOLLOW)
        finally:
            unlink_segment(name)
        super().__init__(mmap.mmap(self._file, PAGE + nbytes), nbytes)

    def descriptor(self) -> dict[str, int]:
        """For `open_board`, in a process of the same user on the same machine."""
        return {"pid": os.getpid(), "file": self._file}

    def close(self) -> None:
        os.close(self._file)


def open_shared_weights(address: dict[str, int], nbytes: int) -> SharedWeights:
    """Raises OSError where this process may not look into the server's."""
    path = Path(f"/proc/{int(address['pid'])}/fd/{int(address['file'])}")
    handle = os.open(path, os.O_RDWR)
    try:
        size = os.fstat(handle).st_size
        if size != PAGE + nbytes:
            raise WireError(f"a server's weights in {size} bytes, {PAGE + nbytes} expected")
        return SharedWeights(mmap.mmap(handle, size), nbytes)
    finally:
        os.close(handle)


class GradientMailbox:
    """A worker's gradient for one server, with a few words beside it."""

    def __init__(self, memory: mmap.mmap, *, server: int, servers: int, lo: int, hi: int) -> None:
        """Bytes `lo` to `hi` of the gradient are the server's."""
        whole = memoryview(memory)
        self._words = whole[server * LINE : (server + 1) * LINE].cast("q")
        self._address = futex.address_of(memory) + server * LINE
        heads = _round_up(servers * LINE)
        self._head = whole[heads + server * HEADER_BYTES : heads + (server + 1) * HEADER_BYTES]
        self.gradient = _tensor(memory, _overhead(servers) + lo, hi - lo)
        self.last_handle = 0
        """Of the push that lies here, or lay here last; the worker's own note."""
        self._reads = 0
        self._stalled_read = 0
        """The server's own note: the read that it does not wait for any more."""

    @property
    def active_read(self) -> int:
        """Which of its reads the worker is at; 0 for none."""
        return self._words[_READING]

    @property
    def consumed(self) -> int:
        """The last push that the server does not need here any more."""
        return self._words[_TAKEN]

    @property
    def reads(self) -> int:
        """How often weights were copied."""
        return self._words[_READS]

    @property
    def queued_us(self) -> int:
        """How long that had to wait for updates, in all."""
        return self._words[_QUEUED_US]

    # ---- the worker's side --------------------------------------------------------------------

    def post(self, handle: int, head: bytes) -> bool:
        """The gradient lies ready; False where there is not enough room for what is said of it."""
        if len(head) > HEADER_BYTES:
            return False
        self._head[: len(head)] = head
        self._words[_HEAD_BYTES] = len(head)
        self._words[_HANDLE] = self.last_handle = handle
        return True

    def clear(self) -> None:
        """Nothing lies here any more: numbers of pushes begin anew with the next connection."""
        self._words[_HANDLE] = 0

    def begin_reading(self) -> None:
        self._reads += 1
        self._words[_READING] = self._reads

    def end_reading(self) -> None:
        self._words[_READING] = 0
        futex.wake(self._address + _READING * WORD)

    def count_read(self, queued_us: int) -> None:
        self._words[_READS] += 1
        self._words[_QUEUED_US] += queued_us

    # ---- the server's side --------------------------------------------------------------------

    def header_of(self, handle: int) -> bytes | None:
        """What is said of the gradient that lies here, if it is the one of this push."""
        if self._words[_HANDLE] != handle:
            return None
        return bytes(self._head[: self._words[_HEAD_BYTES]])

    def mark_consumed(self, handle: int) -> None:
        """The worker may fill it again."""
        self._words[_TAKEN] = handle

    def wait_for_reader(self) -> None:
        """Until the worker has copied what it began to copy; one that hangs there only once."""
        until = time.monotonic() + GRACE_S + self.gradient.numel() / GRACE_BYTES_PER_S
        while (reading := self.active_read) not in (0, self._stalled_read):
            left = until - time.monotonic()
            if left > 0:
                futex.wait(self._address + _READING * WORD, reading, left)
            else:
                self._stalled_read = reading


class MailboxSegment:
    """A worker's memory for its gradient, and its lanes in it."""

    def __init__(self, servers: int, nbytes: int) -> None:
        """Raises OSError where there is no room."""
        self._servers = servers
        size = _overhead(servers) + nbytes
        self.name = create_segment(size)
        try:
            self._memory = open_segment(self.name, size)
        except OSError:
            unlink_segment(self.name)
            raise
        self.gradient = _tensor(self._memory, _overhead(servers), nbytes)

    def mailbox(self, server: int, lo: int, hi: int) -> GradientMailbox:
        return GradientMailbox(self._memory, server=server, servers=self._servers, lo=lo, hi=hi)

    def unlink(self) -> None:
        """Servers have it open, those that can."""
        unlink_segment(self.name)


def open_mailbox(name: str, *, server: int, servers: int, lo: int, hi: int) -> GradientMailbox:
    """What a worker offers, in the server; raises OSError where it cannot be reached."""
    if not (0 <= server < servers and 0 <= lo <= hi):
        raise WireError(f"a gradient's bytes {lo} to {hi} for server {server} of {servers}")
    memory = open_segment(name, _overhead(servers) + hi)
    return GradientMailbox(memory, server=server, servers=servers, lo=lo, hi=hi)


class SharedWeightsReader:
    """A worker's way to the weights of one server."""

    def __init__(
        self,
        board: SharedWeights,
        lane: GradientMailbox,
        *,
        peer: str,
        timeout_s: float,
        look: Callable[[], None],
    ) -> None:
        """`look` raises when the server is known to be gone."""
        self.board, self.lane = board, lane
        self._peer, self._timeout_s, self._check_peer = peer, timeout_s, look

    def copy_weights(self, at_least: int, target: torch.Tensor) -> tuple[int, int] | None:
        """Copy the weights once they are of that version and the last push has been taken.

        Gives their version, and for how long updates were under way meanwhile (us); None if they
        changed during every attempt.
        """
        board, lane = self.board, self.lane
        asked, applied = time.perf_counter_ns(), board.applied_us
        for _ in range(MAX_COPY_ATTEMPTS):
            self._await(at_least)
            turn = board.sequence
            if turn % 2:
                continue
            version = board.version
            waited_us = (time.perf_counter_ns() - asked) // 1000
            lane.begin_reading()
            try:
                target.copy_(board.weights)
                changed = board.sequence != turn
            finally:
                lane.end_reading()
            if not changed:
                queued_us = min(waited_us, board.applied_us - applied)
                lane.count_read(queued_us)
                return version, queued_us
        return None

    def _await(self, at_least: int) -> None:
        board, lane = self.board, self.lane
        looked = time.monotonic()
        deadline = looked + self._timeout_s
        while True:
            bell = board.notify_count
            here = board.version >= at_least and lane.consumed >= lane.last_handle
            if here and not board.update_pending:
                return
            board.wait_for_notify(bell)
            now = time.monotonic()
            if now >= looked + SLICE_S:  # whatever rings for others meanwhile
                looked = now
                self._check_peer()
                if now > deadline:
                    raise DeadlineExceeded(
                        f"{self._peer}: version {at_least} did not come within "
                        f"{self._timeout_s:g} s (now {board.version})"
                    )


def _overhead(servers: int) -> int:
    return _round_up(servers * LINE) + servers * HEADER_BYTES


def _round_up(nbytes: int) -> int:
    return -(-nbytes // PAGE) * PAGE


def _tensor(memory: mmap.mmap, offset: int, nbytes: int) -> torch.Tensor:
    if nbytes == 0:
        return torch.zeros(0, dtype=torch.uint8)
    return torch.frombuffer(memory, dtype=torch.uint8, count=nbytes, offset=offset)
