"""Weights and gradients that a server and workers of its machine leave for each other."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator

import pytest
import torch

from paceline.comm.shm import parameters as boards
from paceline.comm.shm import segment
from paceline.comm.shm.parameters import (
    MailboxSegment,
    SharedWeights,
    SharedWeightsOwner,
    SharedWeightsReader,
    open_mailbox,
    open_shared_weights,
)
from paceline.comm.shm.segment import shm_domain_id
from paceline.errors import DeadlineExceeded, PeerLost, WireError

pytestmark = pytest.mark.skipif(
    shm_domain_id() is None, reason="shared memory needs Linux on x86-64 with /dev/shm"
)
COUNT = 1 << 18
WAIT_S = 10.0


class Pair:
    """A server's end and a worker's end, in one process."""

    def __init__(self, nbytes: int = 4 * COUNT) -> None:
        self.own = SharedWeightsOwner(nbytes)
        self.memory = MailboxSegment(1, nbytes)
        self.theirs = open_mailbox(self.memory.name, server=0, servers=1, lo=0, hi=nbytes)
        self.memory.unlink()
        self.board = open_shared_weights(self.own.descriptor(), nbytes)
        self.lane = self.memory.mailbox(0, 0, nbytes)
        self.target = torch.zeros(nbytes, dtype=torch.uint8)

    def reader(self, timeout_s: float = WAIT_S) -> SharedWeightsReader:
        return SharedWeightsReader(
            self.board, self.lane, peer="server 7", timeout_s=timeout_s, check_peer=lambda: None
        )

    def update(self, version: int, value: float) -> None:
        self.own.begin_update([self.theirs])
        self.own.weights.view(torch.float32).fill_(value)
        self.own.end_update(version, 0)


@pytest.fixture
def pair() -> Iterator[Pair]:
    made = Pair()
    yield made
    made.own.close()


def test_weights_are_seen_by_whoever_opened_the_board(pair: Pair) -> None:
    pair.update(1, 3.0)
    assert pair.reader().copy_weights(1, pair.target) == (1, 0)
    assert pair.target.view(torch.float32).unique().tolist() == [3.0]
    assert pair.theirs.reads == 1


def test_nothing_is_left_in_the_file_system(pair: Pair) -> None:
    assert not [n for n in os.listdir("/dev/shm") if n == pair.memory.name]


def test_weights_are_never_of_two_versions(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the server waits for nobody and updates without a pause."""
    monkeypatch.setattr(boards, "GRACE_S", -1.0)
    over = threading.Event()

    def keep_updating() -> None:
        version = 0
        while not over.is_set():
            version += 1
            pair.update(version, float(version))
            time.sleep(0.0002)

    thread = threading.Thread(target=keep_updating)
    thread.start()
    reader, seen, given_up = pair.reader(), 0, 0
    deadline = time.monotonic() + WAIT_S
    try:
        while seen < 50 and time.monotonic() < deadline:
            found = reader.copy_weights(0, pair.target)
            if found is None:
                given_up += 1
                continue
            assert pair.target.view(torch.float32).unique().tolist() == [float(found[0])]
            seen += 1
    finally:
        over.set()
        thread.join()
    assert seen == 50, f"given up {given_up} times"


def test_disturbed_copy_is_made_again_and_given_up_at_last(pair: Pair) -> None:
    """The weights change between the beginning and the end of a copy."""
    times = 0
    reader = pair.reader()
    begin = pair.lane.begin_reading

    def disturb(count: int) -> None:
        nonlocal times

        def begun() -> None:
            nonlocal times
            begin()
            times += 1
            if times <= count:
                pair.own.begin_update([])
                pair.own.end_update(times, 0)

        times = 0
        pair.lane.begin_reading = begun  # type: ignore[method-assign]

    disturb(2)
    assert reader.copy_weights(0, pair.target) == (2, 0)
    assert times == 3
    disturb(99)
    assert reader.copy_weights(0, pair.target) is None
    assert times == boards.MAX_COPY_ATTEMPTS


def test_update_waits_for_one_who_reads(pair: Pair) -> None:
    pair.lane.begin_reading()
    began = threading.Event()

    def update() -> None:
        began.set()
        pair.update(1, 1.0)

    thread = threading.Thread(target=update)
    thread.start()
    began.wait(WAIT_S)
    seen = pair.board.version
    pair.lane.end_reading()
    thread.join(WAIT_S)
    assert (seen, pair.board.version) == (0, 1)


def test_reader_that_hangs_is_waited_for_once(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float] = []

    def wait(address: int, value: int, seconds: float) -> int:
        waits.append(seconds)
        time.sleep(seconds)
        return 0

    monkeypatch.setattr(boards, "GRACE_S", 0.02)
    monkeypatch.setattr(segment, "futex_wait", wait)
    pair.lane.begin_reading()
    for version in (1, 2, 3):
        pair.update(version, 1.0)
    assert len(waits) == 1
    pair.lane.end_reading()
    pair.lane.begin_reading()  # another read: there is hope again
    pair.update(4, 1.0)
    assert len(waits) == 2


def test_gradient_is_found_by_its_handle_until_taken(pair: Pair) -> None:
    assert pair.lane.post(5, b"about it")
    assert pair.theirs.header_of(4) is None
    assert pair.theirs.header_of(5) == b"about it"
    with pytest.raises(DeadlineExceeded, match="server 7: version 0 was not available"):
        pair.reader(0.2).copy_weights(0, pair.target)
    pair.theirs.consumed = 5
    assert pair.reader().copy_weights(0, pair.target) is not None


def test_withdrawn_gradient_is_not_found(pair: Pair) -> None:
    pair.lane.post(1, b"")
    pair.lane.handle = 0
    assert pair.theirs.header_of(1) is None


def test_much_to_say_about_a_gradient_is_not_left(pair: Pair) -> None:
    assert not pair.lane.post(1, b"x" * (boards.HEADER_BYTES + 1))
    assert pair.theirs.header_of(1) is None


def test_waiting_ends_when_the_server_is_gone(pair: Pair) -> None:
    def look() -> None:
        raise PeerLost("server 7 closed the connection")

    reader = SharedWeightsReader(
        pair.board, pair.lane, peer="server 7", timeout_s=60.0, check_peer=look
    )
    with pytest.raises(PeerLost, match="server 7"):
        reader.copy_weights(1, pair.target)


def test_waiting_ends_also_while_the_server_works_for_others(pair: Pair) -> None:
    over = threading.Event()

    def ring() -> None:
        while not over.wait(0.01):
            pair.own.notify()

    thread = threading.Thread(target=ring)
    thread.start()
    try:
        with pytest.raises(DeadlineExceeded, match="server 7"):
            pair.reader(0.3).copy_weights(1, pair.target)
    finally:
        over.set()
        thread.join()


def test_waiting_for_updates_is_told_apart(pair: Pair) -> None:
    """Only the time that updates took meanwhile counts as queueing."""

    def update_later() -> None:
        time.sleep(0.1)
        pair.own.begin_update([])
        pair.own.end_update(1, 30_000)

    thread = threading.Thread(target=update_later)
    thread.start()
    found = pair.reader().copy_weights(1, pair.target)
    thread.join()
    assert found == (1, 30_000)
    assert pair.theirs.queued_us == 30_000


def test_lanes_of_several_servers_lie_side_by_side() -> None:
    memory = MailboxSegment(3, 100)
    memory.gradient.copy_(torch.arange(100, dtype=torch.uint8))
    for server, (lo, hi) in enumerate(((0, 40), (40, 40), (40, 100))):
        theirs = open_mailbox(memory.name, server=server, servers=3, lo=lo, hi=hi)
        assert theirs.gradient.tolist() == list(range(lo, hi))
        memory.mailbox(server, lo, hi).post(1, bytes([server]))
        assert theirs.header_of(1) == bytes([server])
    memory.unlink()


def test_nothing_is_left_open_when_there_is_no_room(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(nbytes: int) -> str:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(boards, "create_segment", fail)
    for make in (lambda: SharedWeightsOwner(10), lambda: MailboxSegment(1, 10)):
        with pytest.raises(OSError, match="No space"):
            make()


@pytest.mark.parametrize("place", [(3, 3, 0, 10), (-1, 3, 0, 10), (0, 3, 10, 5), (0, 3, -1, 5)])
def test_impossible_places_are_refused(place: tuple[int, int, int, int]) -> None:
    server, servers, lo, hi = place
    with pytest.raises(WireError, match="invalid gradient range: bytes"):
        open_mailbox("any", server=server, servers=servers, lo=lo, hi=hi)


def test_board_of_another_size_is_refused(pair: Pair) -> None:
    with pytest.raises(WireError, match="expected"):
        open_shared_weights(pair.own.descriptor(), 8)


def test_full_board_of_nothing() -> None:
    own = SharedWeightsOwner(0)
    assert isinstance(open_shared_weights(own.descriptor(), 0), SharedWeights)
    assert own.weights.numel() == 0
    own.close()
