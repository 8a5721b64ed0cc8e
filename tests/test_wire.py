"""The wire format and the handshake over real sockets; how a parameter server treats its peers."""

from __future__ import annotations

import queue
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import msgpack
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from conftest import wait_until
from paceline.comm import wire
from paceline.comm.shm.parameters import (
    MailboxSegment,
    SharedWeightsOwner,
    SharedWeightsReader,
    open_shared_weights,
)
from paceline.comm.shm.segment import shm_domain_id
from paceline.comm.wire import Channel, pack
from paceline.errors import DeadlineExceeded, PacelineError, PeerLost, WireError
from paceline.protocol import messages
from paceline.protocol.handshake import HELLO, MAGIC, VERSION, Role, make_proof
from paceline.protocol.messages import ApplyUpdate, GradientRef, Message, ServerReady, StopServer
from paceline.strategies.ps.messages import (
    Loaded,
    LoadShard,
    MemoryReply,
    OfferMemory,
    Pull,
    PushGradient,
    PushHeader,
    PushShared,
    SliceEntry,
    Weights,
    data_from_wire,
    data_to_wire,
)
from paceline.strategies.ps.server import ParameterServerProcess, warm_up_torch
from paceline.telemetry.sampler import ServerCounters

TOKEN = "a token of this run"
WAIT_S = 5.0

plain = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats(allow_nan=False)
    | st.text()
    | st.binary(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text() | st.integers(0, 99), inner),
    max_leaves=20,
)


@contextmanager
def sockets() -> Iterator[tuple[socket.socket, socket.socket]]:
    one, two = socket.socketpair()
    with one, two:
        one.settimeout(WAIT_S)
        two.settimeout(WAIT_S)
        yield one, two


@contextmanager
def channels(timeout_s: float = WAIT_S) -> Iterator[tuple[Channel, Channel]]:
    with sockets() as (one, two):
        yield Channel(one, "the first", timeout_s), Channel(two, "the second", timeout_s)


def together(*calls: Callable[[], Any]) -> list[BaseException | Any]:
    """Run calls at the same time; what each gave or raised."""
    with ThreadPoolExecutor(len(calls)) as pool:
        futures = [pool.submit(call) for call in calls]
        return [f.exception(WAIT_S) or f.result() for f in futures]


# ---- frames ----------------------------------------------------------------------------------


@given(head=plain, parts=st.lists(st.binary(max_size=200), max_size=4))
def test_message_round_trip(head: Any, parts: list[bytes]) -> None:
    with channels() as (one, two):
        one.send(head, *(memoryview(part) for part in parts))
        one.send("next")
        got, body = two.receive(max_body=10_000)
        assert (got, bytes(body)) == (head, b"".join(parts))
        assert two.receive() == ("next", bytearray())
        assert one.bytes_sent == sum(map(len, parts))


def test_large_body_round_trip() -> None:
    """Larger than any socket buffer, so that it goes in many pieces both ways."""
    body = bytes(range(256)) * (4 << 12)
    with channels() as (one, two):
        sent, got = together(
            lambda: one.send({"n": 1}, memoryview(body)),
            lambda: two.receive(max_body=len(body)),
        )
        assert sent is None
        assert got == ({"n": 1}, bytearray(body))


@given(header=st.binary(min_size=wire.HEADER.size, max_size=wire.HEADER.size))
def test_any_header_is_read_or_refused(header: bytes) -> None:
    try:
        head_bytes, body_bytes = wire.unpack_header(header, max_body=1000)
    except WireError:
        return
    assert header[:4] == MAGIC
    assert head_bytes <= wire.MAX_HEAD
    assert body_bytes <= 1000


@given(packed=st.binary(max_size=60))
@example(packed=msgpack.packb({1: 2}).replace(b"\x01", b"\x91\x01"))
@example(packed=b"\xc1")
@example(packed=b"\x91" * 5000)
@example(packed=b"\xdd\xff\xff\xff\xff")
@example(packed=b"\xc7\x0c\xff" + b"\xff" * 12)
def test_any_head_is_read_or_refused(packed: bytes) -> None:
    """A map with a list for a key, a byte of no meaning, endless nesting, a lie about sizes."""
    try:
        wire.unpack_head(packed)
    except WireError:
        pass


def with_header(
    magic: bytes = MAGIC, version: int = VERSION, head: int = 1, body: int = 0
) -> bytes:
    return wire.HEADER.pack(magic, version, head, body)


@pytest.mark.parametrize(
    ("header", "words"),
    [
        (with_header(magic=b"HTTP"), "does not use"),
        (with_header(version=9), "wire format 9"),
        (with_header(head=wire.MAX_HEAD + 1), str(wire.MAX_HEAD + 1)),
        (with_header(body=101), "101"),
        (with_header(body=2**64 - 1), str(2**64 - 1)),
    ],
    ids=["magic", "version", "head", "body", "largest body"],
)
def test_bad_header_is_refused_before_anything_is_allocated(
    header: bytes, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with channels() as (one, two):
        asked: list[int] = []
        receive = two._receive
        monkeypatch.setattr(two, "_receive", lambda n: (asked.append(n), receive(n))[1])
        one._send_all(header)
        with pytest.raises(WireError, match=words):
            two.receive(max_body=100)
        assert asked == [wire.HEADER.size]


def test_head_too_large_is_not_sent() -> None:
    with pytest.raises(WireError, match="message head too large"):
        wire.pack_head(b"x" * (wire.MAX_HEAD + 1))


@pytest.mark.parametrize("cut", [0, 1, wire.HEADER.size - 1, wire.HEADER.size, -1])
def test_message_cut_off_is_a_lost_peer(cut: int) -> None:
    whole = wire.pack_head({"op": "pull"}, 4) + b"body"
    with sockets() as (one, two):
        one.sendall(whole[:cut])
        one.close()
        with pytest.raises(PeerLost, match="server 3 closed"):
            Channel(two, "server 3", WAIT_S).receive(max_body=4)


def test_silence_is_a_deadline() -> None:
    with (
        channels(timeout_s=0.05) as (_, two),
        pytest.raises(DeadlineExceeded, match=r"received nothing from the second for 0\.05 s"),
    ):
        two.receive()


def test_nobody_there_is_told_at_the_deadline() -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    with pytest.raises(PeerLost, match=f"could not connect to server 7 at 127.0.0.1:{port}"):
        Channel.connect("127.0.0.1", port, token=TOKEN, peer="server 7", timeout_s=0.1)


# ---- messages --------------------------------------------------------------------------------


def test_messages_round_trip() -> None:
    order = ApplyUpdate(7, (GradientRef(0, 3, 0.5), GradientRef(1, 2, 0.5)), 1.0, None)
    go = messages.LeaseGranted(3, messages.Lease(1, 0, 0, 8, 4, 8), 2)
    enter = messages.EnterPhase(1, (("127.0.0.1", 5), ("127.0.0.1", 6)), True)
    pushed = messages.GradientPushed(1, 2, 3, 4, 5, 6, messages.StepStats(4, 4, 1.5, 2))
    for message in (order, go, enter, pushed, StopServer()):
        packed = wire.pack_head(messages.message_to_wire(message))[wire.HEADER.size :]
        assert messages.message_from_wire(wire.unpack_head(packed)) == message


@given(value=plain)
@example(value={"kind": []})
@example(value={"kind": "LeaseGranted", "version": 1, "staleness": 0, "lease": {"id": 1}})
@example(value={"kind": "ApplyUpdate", "version": 1, "parts": 3, "lr_scale": 1.0, "clip": None})
@example(
    value={"kind": "ApplyUpdate", "version": 1, "parts": [{1: 2}], "lr_scale": 1, "clip": None}
)
@example(value={"kind": "PhaseEntered", "worker": 1, 7: 8})
def test_any_message_is_read_or_refused(value: Any) -> None:
    try:
        messages.message_from_wire(value)
    except WireError:
        pass


# ---- the handshake over a channel; `test_handshake.py` has its cases -----------------------


def authenticate(client: str, server: str) -> tuple[Any, Any]:
    """Both sides of a handshake with these tokens: what each returned or raised."""

    with channels(timeout_s=2.0) as (one, two):

        def attempt(channel: Channel, role: Role, token: str) -> Any:
            try:
                channel.authenticate(role, token)
            finally:
                channel.close()

        return tuple(  # type: ignore[return-value]
            together(lambda: attempt(one, "client", client), lambda: attempt(two, "server", server))
        )


def test_channels_with_the_token_authenticate() -> None:
    assert authenticate(TOKEN, TOKEN) == (None, None)


def test_client_without_the_token_is_refused_and_learns_nothing() -> None:
    client, server = authenticate("another token", TOKEN)
    assert isinstance(server, WireError)
    assert "token" in str(server)
    # The server sends nothing to it: the connection just ends.
    assert isinstance(client, PeerLost)


def test_server_without_the_token_is_refused() -> None:
    """A server that skips its own check and answers anyway is not trusted by the client."""
    with sockets() as (one, two):
        hello = HELLO.pack(MAGIC, VERSION, b"n" * 32)
        two.sendall(hello + make_proof("another token", "server", received=b"x" * 32, sent=hello))
        with pytest.raises(WireError, match="token"):
            Channel(one, "the coordinator", WAIT_S).authenticate("client", TOKEN)


def test_reflected_hello_is_refused_over_a_channel() -> None:
    with sockets() as (one, two):

        def echo() -> None:
            two.sendall(two.recv(HELLO.size, socket.MSG_WAITALL))

        def call() -> None:
            Channel(one, "the coordinator", WAIT_S).authenticate("client", TOKEN)

        _, outcome = together(echo, call)
        assert isinstance(outcome, WireError)


def test_replayed_proof_is_refused() -> None:
    """A proof made for one connection is not accepted on the next."""
    mine = b"m" * 32
    proof = make_proof(TOKEN, "client", received=b"t" * 32, sent=mine)
    with sockets() as (one, two):
        one.sendall(HELLO.pack(MAGIC, VERSION, mine) + proof)
        with pytest.raises(WireError, match="token"):
            Channel.accept(two, token=TOKEN, peer="stranger", timeout_s=WAIT_S)


# ---- a parameter server ----------------------------------------------------------------------


class Orders:
    """In place of a control connection: orders in, reports out."""

    def __init__(self) -> None:
        self.told: queue.Queue[Message] = queue.Queue()
        self.orders: queue.Queue[Message] = queue.Queue()

    def send(self, message: Message) -> None:
        self.told.put(message)

    def receive(self) -> Message:
        return self.orders.get(timeout=WAIT_S)


class Served:
    """A server in a thread of this process."""

    def __init__(self) -> None:
        warm_up_torch()  # As a server's process does: torch's first step imports for seconds.
        self.control = Orders()
        self.serving = ServerCounters()
        self.server = ParameterServerProcess(
            index=4,
            host="127.0.0.1",
            token=TOKEN,
            control=self.control,  # type: ignore[arg-type]
            timeout_s=WAIT_S,
            serving=self.serving,
        )
        self._thread = threading.Thread(target=self.server.run)
        self._thread.start()
        ready = self.control.told.get(timeout=WAIT_S)
        assert isinstance(ready, ServerReady)
        assert ready.server == 4
        self.host, self.port = ready.host, ready.port

    def connect(self, token: str = TOKEN) -> Channel:
        return Channel.connect(self.host, self.port, token=token, peer="server 4", timeout_s=WAIT_S)

    def fill(self, channel: Channel, weights: torch.Tensor) -> None:
        """Make it hold these weights under plain SGD."""
        body = weights.numpy().tobytes()
        message = LoadShard(
            view=0,
            nbytes=len(body),
            slices=(SliceEntry("w", 0, len(body), "float32", 0, (len(weights),)),),
            options=({"lr": 0.5},),
            optimizer="torch.optim.sgd:SGD",
            slots=(),
            codec=None,
        )
        channel.send(data_to_wire(message), memoryview(body))
        assert data_from_wire(channel.receive()[0]) == Loaded()

    def stop(self) -> None:
        self.control.orders.put(StopServer())
        self._thread.join(WAIT_S)


@pytest.fixture
def served() -> Iterator[Served]:
    running = Served()
    yield running
    running.stop()


def push(channel: Channel, body: bytes) -> None:
    message = PushGradient(
        worker=0, view=0, handle=1, missing=(), options=({"lr": 0.5},), payload=None
    )
    channel.send(data_to_wire(message), memoryview(body))


def pull(channel: Channel, version: int) -> tuple[int, torch.Tensor]:
    channel.send(data_to_wire(Pull(at_least=version, after=None, exact=True)))
    head, body = channel.receive(max_body=1 << 20)
    answer = data_from_wire(head)
    assert isinstance(answer, Weights)
    return answer.version, torch.frombuffer(body, dtype=torch.float32)


def offer(channel: Channel, memory: MailboxSegment, worker: int) -> MemoryReply:
    """Offers 16 bytes of shared memory for one server."""
    domain = shm_domain_id()
    assert domain is not None
    message = OfferMemory(
        worker=worker, domain=domain, segment=memory.name, server=0, servers=1, lo=0, hi=16
    )
    channel.send(data_to_wire(message))
    reply = data_from_wire(channel.receive()[0])
    memory.unlink()
    assert isinstance(reply, MemoryReply)
    return reply


def test_server_stores_applies_and_answers(served: Served) -> None:
    channel = served.connect()
    weights, gradient = torch.arange(8.0), torch.ones(8)
    served.fill(channel, weights)
    assert pull(channel, 0)[0] == 0
    push(channel, gradient.numpy().tobytes())
    served.control.orders.put(ApplyUpdate(1, (GradientRef(0, 1, 1.0),), 0.5, None))
    version, now = pull(channel, 1)
    assert version == 1
    torch.testing.assert_close(now, weights - 0.25, rtol=0, atol=0)
    channel.close()


def test_gradients_in_memory_are_applied_by_order_alone(served: Served) -> None:
    """Left there they are used in place; told of by a push they are kept for the worker."""
    channel = served.connect()
    memory = MailboxSegment(1, 16)
    descriptor = offer(channel, memory, 3).descriptor
    assert descriptor is not None
    served.fill(channel, torch.zeros(4))
    lane = memory.mailbox(0, 0, 16)
    board = open_shared_weights(descriptor, 16)
    reader = SharedWeightsReader(
        board, lane, peer="server 4", timeout_s=WAIT_S, check_peer=lambda: None
    )
    weights, gradient = torch.zeros(16, dtype=torch.uint8), memory.gradient.view(torch.float32)

    def announce(handle: int, *, in_place: bool) -> None:
        message = PushShared(
            worker=3, view=0, handle=handle, missing=(), options=({"lr": 1.0},), in_place=in_place
        )
        channel.send(data_to_wire(message))

    for handle, value in ((1, 1.0), (2, 2.0)):
        gradient.fill_(value)
        lane.last_handle = handle
        announce(handle, in_place=False)
        # Nothing is ordered yet: the gradient still waits when the worker goes on.
        assert reader.copy_weights(0, weights) == (0, 0)
        gradient.fill_(77.0)
    assert weights.view(torch.float32).tolist() == [0.0] * 4
    for version in (1, 2):
        served.control.orders.put(ApplyUpdate(version, (GradientRef(3, version, 1.0),), 1.0, None))

    gradient.fill_(4.0)
    header = PushHeader(worker=3, view=0, handle=3, missing=(), options=({"lr": 1.0},))
    assert lane.post(3, pack(data_to_wire(header)))
    order = ApplyUpdate(3, (GradientRef(3, 3, 1.0),), 1.0, None)
    served.control.orders.put(order)
    found = reader.copy_weights(3, weights)
    assert found is not None
    assert found[0] == 3
    assert weights.view(torch.float32).tolist() == [-7.0] * 4
    # Said twice, it is done once; weights are sent as well to whoever asks.
    served.control.orders.put(order)
    assert pull(channel, 3)[1].tolist() == [-7.0] * 4

    # Told of by a push and staying where it is, it is waited for.
    gradient.fill_(8.0)
    lane.last_handle = 4
    announce(4, in_place=True)
    served.control.orders.put(ApplyUpdate(4, (GradientRef(3, 4, 1.0),), 1.0, None))
    assert reader.copy_weights(0, weights) is not None
    assert weights.view(torch.float32).tolist() == [-15.0] * 4
    served.stop()
    assert served.serving.snapshot_and_reset()["pushes"] == 4
    assert served.serving.snapshot_and_reset()["pulls"] == lane.reads + 1
    assert served.server.bytes_received == 4 * 16 + 16
    assert served.server.bytes_sent == (lane.reads + 1) * 16
    channel.close()


def test_weights_stay_when_there_is_no_shared_memory(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker that asks for it after another has brought them must not find zeros."""

    def no_room(nbytes: int) -> SharedWeightsOwner:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("paceline.strategies.ps.store.SharedWeightsOwner", no_room)
    channel = served.connect()
    served.fill(channel, torch.arange(4.0))
    memory = MailboxSegment(1, 16)
    assert offer(channel, memory, 0) == MemoryReply(
        descriptor=None, reason="no room for a server's weights in shared memory"
    )
    assert pull(channel, 0)[1].tolist() == [0.0, 1.0, 2.0, 3.0]
    channel.close()


def test_server_refuses_who_does_not_know_the_token(
    served: Served, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(PeerLost):
        served.connect("another token")
    with socket.create_connection((served.host, served.port), WAIT_S) as stranger:
        stranger.sendall(b"\0" * 200)
        stranger.settimeout(WAIT_S)
        with pytest.raises(OSError):  # noqa: PT012
            while stranger.recv(1000):
                pass
            raise ConnectionResetError("closed in order")
    printed = wait_until(lambda: _count_refusals(capfd, served), "two refusals", WAIT_S)
    assert all("server 4: refused a connection from 127.0.0.1" in line for line in printed)
    # It still serves those who do.
    channel = served.connect()
    served.fill(channel, torch.zeros(2))
    assert pull(channel, 0)[0] == 0
    channel.close()


def _count_refusals(capfd: pytest.CaptureFixture[str], served: Served) -> list[str]:
    seen: list[str] = served.__dict__.setdefault("seen", [])
    seen += capfd.readouterr().out.splitlines()
    return seen if len(seen) >= 2 else []


def test_server_is_not_held_up_by_a_silent_peer(served: Served) -> None:
    with socket.create_connection((served.host, served.port), WAIT_S):
        channel = served.connect()
        served.fill(channel, torch.zeros(2))
        assert pull(channel, 0)[0] == 0
        channel.close()


@pytest.mark.parametrize("size", [0, 28, 36])
def test_gradient_of_wrong_size_names_both(served: Served, size: int) -> None:
    channel = served.connect()
    served.fill(channel, torch.zeros(8))
    push(channel, b"\0" * size)
    head, _ = channel.receive()
    assert f"a gradient has {size} bytes, expected 32" in head["error"]
    assert "server 4" in head["error"]
    channel.close()


@pytest.mark.parametrize(
    "head", [{"kind": "Dance"}, {}, ["kind"], {"kind": "PushGradient"}, struct.pack("d", 0)]
)
def test_nonsense_is_answered_with_an_error(served: Served, head: Any) -> None:
    channel = served.connect()
    channel.send(head)
    answer, _ = channel.receive()
    assert answer["error"].startswith("server 4: ")
    with pytest.raises(PacelineError):
        channel.receive()
    channel.close()
