"""The coordinator's ear, over real connections: who is let in, who is not, and the key store."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from paceline.comm import wire
from paceline.comm.process_group import CoordinatorStore
from paceline.comm.wire import Channel, ControlConnection
from paceline.errors import PacelineError, PeerLost, WireError
from paceline.launch.hub import MAX_STORE_BYTES, Hub, RendezvousStore
from paceline.protocol.handshake import HELLO, MAGIC, VERSION, make_proof
from paceline.protocol.messages import Heartbeat, Message, PhaseEntered, Quiesce

TOKEN = "a token of this run"
WAIT_S = 5.0
HOST = "127.0.0.1"


class House:
    """A hub that listens, and what it was told."""

    def __init__(self) -> None:
        self.heard: list[tuple[str, Message]] = []
        self.gone: list[str] = []
        self.refused: list[str] = []
        self.hub = Hub(
            TOKEN,
            lambda who, message, view: self.heard.append((who, message)),
            self.gone.append,
            self.refused.append,
        )
        self.port = 0
        self._closing: list[Any] = []

    async def until(self, condition: Callable[[], Any], what: str) -> None:
        deadline = asyncio.get_running_loop().time() + WAIT_S
        while not condition():
            assert asyncio.get_running_loop().time() < deadline, f"not in time: {what}"
            await asyncio.sleep(0.005)

    async def join(self, who: str, token: str = TOKEN) -> ControlConnection:
        control = await asyncio.to_thread(
            ControlConnection, HOST, self.port, token=token, who=who, pid=1, timeout_s=WAIT_S
        )
        self._closing.append(control)
        return control

    async def open_store(self, who: str) -> CoordinatorStore:
        store = await asyncio.to_thread(
            CoordinatorStore, HOST, self.port, token=TOKEN, who=who, timeout_s=WAIT_S
        )
        self._closing.append(store)
        return store

    async def greet(self) -> Channel:
        """A peer that knows the token, and has not yet said who it is."""
        channel = await asyncio.to_thread(
            Channel.connect, HOST, self.port, token=TOKEN, peer="hub", timeout_s=WAIT_S
        )
        self._closing.append(channel)
        return channel

    def connect(self) -> socket.socket:
        sock = socket.create_connection((HOST, self.port), WAIT_S)
        sock.settimeout(WAIT_S)
        self._closing.append(sock)
        return sock

    def close(self) -> None:
        for thing in self._closing:
            thing.close()


def visit(story: Callable[[House], Awaitable[None]]) -> None:
    """Run a story in a house of its own."""

    async def main() -> None:
        house = House()
        house.port = await house.hub.listen(HOST)
        try:
            await asyncio.wait_for(story(house), 20)
        finally:
            house.close()
            await house.hub.close()
            await asyncio.sleep(0)

    asyncio.run(main())


async def assert_dropped(sock: socket.socket) -> None:
    """The hub ends the connection; what it had sent before does not matter."""

    def drain() -> None:
        try:
            while sock.recv(4096):
                pass
        except ConnectionResetError:
            pass

    await asyncio.to_thread(drain)


# ---- members ---------------------------------------------------------------------------------


def test_messages_both_ways_and_the_end() -> None:
    async def story(house: House) -> None:
        worker = await house.join("worker-0")
        server = await house.join("server-0")
        await asyncio.to_thread(worker.send, PhaseEntered(0))
        await asyncio.to_thread(worker.send, Heartbeat(0, 3, "forward", 9))
        await house.until(lambda: len(house.heard) == 2, "two messages")
        assert house.heard == [
            ("worker-0", PhaseEntered(0)),
            ("worker-0", Heartbeat(0, 3, "forward", 9)),
        ]
        await house.until(lambda: len(house.hub.members) == 2, "both to be members")
        house.hub.send("worker-0", Quiesce(4, 8))
        assert await asyncio.to_thread(worker.receive) == Quiesce(4, 8)
        house.hub.send("worker-9", Quiesce(4, 8))  # Nobody: reported elsewhere, not here.
        server.close()
        await house.until(lambda: house.gone == ["server-0"], "the server to be gone")
        assert sorted(house.hub.members) == ["worker-0"]
        assert house.refused == []

    visit(story)


def test_second_of_a_name_is_refused_and_the_first_stays() -> None:
    async def story(house: House) -> None:
        first = await house.join("server-0")
        await house.until(lambda: house.hub.members, "the first")
        second = await house.join("server-0")
        with pytest.raises(PeerLost):
            await asyncio.to_thread(second.receive)
        assert house.refused == ["server-0: server-0 is already connected"]
        house.hub.send("server-0", Quiesce(1, 2))
        assert await asyncio.to_thread(first.receive) == Quiesce(1, 2)
        assert house.gone == []

    visit(story)


def test_without_the_token_nobody_gets_in() -> None:
    async def story(house: House) -> None:
        with pytest.raises(PeerLost):
            await house.join("worker-0", "another token")
        assert house.hub.members == {}
        assert len(house.refused) == 1
        assert "127.0.0.1" in house.refused[0]
        assert "token" in house.refused[0]
        assert house.gone == []

    visit(story)


def test_false_hub_is_refused() -> None:
    """A worker does not talk to a coordinator that does not know the token."""

    async def story(house: House) -> None:
        house.hub.token = "another token"
        with pytest.raises(PacelineError):
            await house.join("worker-0")

    visit(story)


@pytest.mark.parametrize("name", ["replayed", "reflected"])
def test_stolen_proof_is_refused(name: str) -> None:
    async def story(house: House) -> None:
        sock = house.connect()
        greeting = await asyncio.to_thread(sock.recv, HELLO.size, socket.MSG_WAITALL)
        nonce = HELLO.unpack(greeting)[2]
        if name == "replayed":
            # A proof overheard on a connection with another nonce of the hub.
            mine = b"m" * 32
            proof = make_proof(TOKEN, "client", received=b"old nonce".ljust(32), sent=mine)
            sock.sendall(HELLO.pack(MAGIC, VERSION, mine) + proof)
        else:
            sock.sendall(greeting + make_proof(TOKEN, "server", received=nonce, sent=nonce))
        await assert_dropped(sock)
        assert len(house.refused) == 1
        assert house.hub.members == {}

    visit(story)


def test_silent_peer_holds_up_nobody() -> None:
    async def story(house: House) -> None:
        for _ in range(3):
            house.connect()
        shy = house.connect()
        shy.sendall(MAGIC)
        worker = await house.join("worker-0")
        await asyncio.to_thread(worker.send, PhaseEntered(0))
        await house.until(lambda: house.heard, "the message of the one who speaks")
        assert house.refused == []

    visit(story)


@pytest.mark.parametrize(
    "sent",
    [
        b"GET / HTTP/1.1\r\n" + b"x" * 100,
        HELLO.pack(MAGIC, VERSION + 1, b"n" * 32) + b"p" * 32,
    ],
    ids=["browser", "version"],
)
def test_stranger_is_dropped(sent: bytes) -> None:
    async def story(house: House) -> None:
        sock = house.connect()
        sock.sendall(sent)
        await assert_dropped(sock)
        assert len(house.refused) == 1

    visit(story)


def raw(data: bytes) -> bytes:
    return wire.HEADER.pack(MAGIC, VERSION, len(data), 0) + data


ME = wire.pack_head({"who": "worker-0", "pid": 1, "role": "member"})


@pytest.mark.parametrize(
    ("sent", "words"),
    [
        (wire.pack_head(["who"]), "did not send its name"),
        (wire.pack_head({"who": 3}), "did not send its name"),
        (ME + raw(b"\xc1"), "not msgpack"),
        (ME + raw(b"\x81\x91\x01\x02"), "not msgpack"),
        (ME + wire.pack_head({"kind": "Dance"}), "Dance"),
        (ME + wire.pack_head({"kind": "PhaseEntered"}), "fields"),
        (ME + wire.HEADER.pack(MAGIC, VERSION, 1, 1), "bytes"),
        (ME + wire.HEADER.pack(MAGIC, VERSION, wire.MAX_HEAD + 1, 0), "bytes"),
    ],
    ids=["list", "number", "byte", "key", "kind", "fields", "body", "head"],
)
def test_known_peer_that_talks_nonsense_is_dropped(sent: bytes, words: str) -> None:
    async def story(house: House) -> None:
        channel = await house.greet()
        await asyncio.to_thread(channel._send_all, sent)
        with pytest.raises(PeerLost):
            await asyncio.to_thread(channel.receive)
        assert len(house.refused) == 1
        assert words in house.refused[0]
        assert house.heard == []

    visit(story)


def test_messages_in_pieces() -> None:
    async def story(house: House) -> None:
        channel = await house.greet()
        for byte in ME + wire.pack_head({"kind": "PhaseEntered", "worker": 5}):
            await asyncio.to_thread(channel._send_all, bytes([byte]))
        await house.until(lambda: house.heard == [("worker-0", PhaseEntered(5))], "the message")

    visit(story)


# ---- the key store ---------------------------------------------------------------------------


def test_store_operations() -> None:
    async def story(house: House) -> None:
        one, two = await house.open_store("worker-0"), await house.open_store("worker-1")

        async def call(client: CoordinatorStore, *args: Any) -> Any:
            return await asyncio.to_thread(client.call, *args)

        assert await call(one, "set", "a", b"1") is None
        assert await call(two, "get", "a", 1.0) == b"1"
        assert await call(one, "add", "n", 2) == 2
        assert await call(two, "add", "n", 3) == 5
        assert await call(two, "get", "n", 1.0) == b"5"
        assert await call(one, "check", ["a", "n"]) is True
        assert await call(one, "check", ["a", "b"]) is False
        assert await call(one, "compare_set", "c", b"", b"first") == b"first"
        assert await call(two, "compare_set", "c", b"", b"second") == b"first"
        assert await call(two, "compare_set", "c", b"first", b"second") == b"second"
        assert await call(one, "count") == 3
        assert await call(one, "delete", "a") is True
        assert await call(one, "delete", "a") is False
        # Store connections are no members: their end ends nothing.
        one.close()
        assert await call(two, "count") == 2
        assert house.gone == []

    visit(story)


def test_store_get_waits_for_the_key() -> None:
    async def story(house: House) -> None:
        one, two = await house.open_store("worker-0"), await house.open_store("worker-1")
        waiting = asyncio.create_task(asyncio.to_thread(one.call, "get", "late", WAIT_S))
        await house.until(lambda: "late" in house.hub.store._waiting, "the call to arrive")
        assert not waiting.done()
        await asyncio.to_thread(two.call, "set", "late", b"here")
        assert await asyncio.wait_for(waiting, WAIT_S) == b"here"

    visit(story)


def test_store_get_gives_up_in_time() -> None:
    async def story(house: House) -> None:
        store = await house.open_store("worker-0")
        with pytest.raises(WireError, match="'never' was not set in time"):
            await asyncio.to_thread(store.call, "get", "never", 0.05)
        # The connection can be used as before.
        await asyncio.to_thread(store.call, "set", "never", b"after all")
        assert await asyncio.to_thread(store.call, "get", "never", 0.05) == b"after all"

    visit(story)


@pytest.mark.parametrize(
    "call",
    [
        ["dance"],
        ["set", "key"],
        ["set", "key", 5],
        ["set", "key", b"x" * (MAX_STORE_BYTES + 1)],
        ["get", ["key"], 1.0],
        ["get", "key", "soon"],
        ["check", 3],
        ["add", "key", "one"],
        [],
        {"op": "set"},
    ],
)
def test_store_drops_who_talks_nonsense(call: Any) -> None:
    async def story(house: House) -> None:
        channel = await house.greet()
        await asyncio.to_thread(channel.send, {"who": "worker-0", "pid": 0, "role": "store"})
        await asyncio.to_thread(channel.send, call)
        with pytest.raises(PeerLost):
            await asyncio.to_thread(channel.receive)
        assert len(house.refused) == 1
        assert house.gone == []

    visit(story)


def test_store_without_a_wire() -> None:
    replies: list[tuple[str, Any]] = []
    store = RendezvousStore()
    store.serve("set", ["k", b"v"], lambda *reply: replies.append(reply))
    store.serve("get", ["k", 1.0], lambda *reply: replies.append(reply))
    assert replies == [("ok", None), ("ok", b"v")]
    with pytest.raises(WireError, match="unknown operation 'dance'"):
        store.serve("dance", [], lambda *reply: replies.append(reply))


# ---- another coordinator of the same run -------------------------------------------------------


def test_peer_of_another_coordinator_is_refused() -> None:
    """It has the run's token, but belongs to a coordinator that has taken over."""

    async def story(house: House) -> None:
        channel = await house.greet()
        channel.send({"who": "worker-0", "pid": 1, "role": "member", "incarnation": 1})
        await house.until(lambda: house.refused, "the refusal")
        assert house.refused == [
            "127.0.0.1: worker-0 belongs to coordinator 1 of the run, this is number 0"
        ]
        assert house.hub.members == {}
        assert house.gone == []

    visit(story)


def test_member_rejoins_another_coordinator() -> None:
    """Messages to a lost coordinator are dropped; the greeting to the next one comes first."""

    async def story(house: House) -> None:
        other = House()
        other.hub.incarnation = 1
        other.port = await other.hub.listen(HOST)
        returned: list[str] = []
        other.hub.on_return = returned.append
        control = await asyncio.to_thread(
            lambda: ControlConnection(
                HOST, house.port, token=TOKEN, who="worker-0", pid=1, timeout_s=WAIT_S,
                can_rejoin=True,
            )
        )  # fmt: skip
        await house.until(lambda: "worker-0" in house.hub.members, "the member")
        control.greeting = lambda: [PhaseEntered(7)]
        received = asyncio.create_task(asyncio.to_thread(control.receive))
        house.hub.drop_all()
        await house.until(control.lost.is_set, "the loss")
        control.send(PhaseEntered(1))
        await asyncio.to_thread(control.rejoin, HOST, other.port, 1)
        await other.until(lambda: other.heard, "the greeting")
        assert other.heard == [("worker-0", PhaseEntered(7))]
        assert not control.lost.is_set()
        other.hub.send("worker-0", Quiesce(3, 4))
        assert await received == Quiesce(3, 4)
        assert (control.incarnation, control.generation, returned) == (1, 1, [])
        other.hub.drop_all()
        await other.until(lambda: other.gone, "the cut")
        await asyncio.to_thread(control.rejoin, HOST, other.port, 1)
        await other.until(lambda: returned, "the return")
        assert returned == ["worker-0"]
        control.close()
        await other.hub.close()

    visit(story)
