"""Control connections of all processes to the coordinator, and the rendezvous store.

Runs in the supervisor's event loop. Messages are accepted only from peers that have proved that
they have the run's token; a peer that does not follow the format is disconnected.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from paceline.comm.wire import (
    HANDSHAKE_TIMEOUT_S,
    HEADER,
    begin_handshake,
    pack_head,
    unpack_head,
    unpack_header,
)
from paceline.errors import UsageError, WireError
from paceline.protocol.messages import Message, message_from_wire, message_to_wire

MAX_STORE_BYTES = 1 << 20


@dataclass(eq=False)
class Hub:
    """Accepts connections; calls `on_message(who, message, view)` and `on_gone(who)`."""

    token: str = field(repr=False)
    on_message: Callable[[str, Message, int | None], None]
    on_gone: Callable[[str], None]
    on_refused: Callable[[str], None]
    on_return: Callable[[str], None] = lambda who: None
    """Called when a member has connected again: messages in both directions may be lost."""
    incarnation: int = 0
    """Number of this coordinator among those of the run; peers that expect another are rejected."""

    def __post_init__(self) -> None:
        self.members: dict[str, HubConnection] = {}
        self.known: set[str] = set()
        """Names of all that have been members and are not forgotten."""
        self.store = RendezvousStore()
        self.alerts: dict[str, HubConnection] = {}
        """Connections on which workers learn that their view has ended."""
        self._ended_views: dict[str, int] = {}
        self._server: asyncio.Server | None = None

    async def listen(self, host: str) -> int:
        """Listens on a free port; raises UsageError for an address of another machine."""
        loop = asyncio.get_running_loop()
        try:
            self._server = await loop.create_server(lambda: HubConnection(self), host, 0)
        except OSError as error:
            raise UsageError(
                f"--listen {host}: cannot listen there ({error.strerror or error}); use an address "
                "of this machine"
            ) from None
        port: int = self._server.sockets[0].getsockname()[1]
        return port

    def send(self, who: str, message: Message) -> None:
        """Sends to a member; a lost member is reported by `on_gone`, not here."""
        peer = self.members.get(who)
        if peer is not None:
            peer.send(message_to_wire(message))

    def interrupt(self, who: str, view: int) -> None:
        """Sends a worker the number of a view that has ended, as soon as it has connected."""
        self._ended_views[who] = view
        if who in self.alerts:
            self.alerts[who].send(view)

    def forget(self, who: str) -> None:
        """Drops the connections of a process that is gone; another may take its name."""
        self._ended_views.pop(who, None)
        self.known.discard(who)
        for peer in (self.members.pop(who, None), self.alerts.pop(who, None)):
            if peer is not None:
                peer.drop()

    def on_alerts(self, who: str, peer: "HubConnection") -> None:
        self.alerts[who] = peer
        if who in self._ended_views:
            peer.send(self._ended_views[who])

    def drop_all(self) -> None:
        """Closes the connections of all members, who are reported as gone."""
        for peer in [*self.members.values(), *self.alerts.values()]:
            peer.drop()

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()
        self.drop_all()
        self.members.clear()
        self.alerts.clear()


class HubConnection(asyncio.Protocol):
    """One connection: handshake, then the introduction of the peer, then messages."""

    def __init__(self, hub: Hub) -> None:
        self._hub = hub
        self._buffer = bytearray()
        self._transport: asyncio.Transport
        self._address = "?"
        self._handshake = begin_handshake("server", hub.token)
        self.who: str | None = None
        self.role = ""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self._address = str((transport.get_extra_info("peername") or "?")[0])
        transport.write(self._handshake.start())
        loop = asyncio.get_running_loop()
        self._deadline = loop.call_later(HANDSHAKE_TIMEOUT_S, self._drop_unauthenticated)

    def _drop_unauthenticated(self) -> None:
        if self.who is None:
            self._hub.on_refused(f"{self._address}: the peer did not identify itself in time")
            self.drop()

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        try:
            if not self._handshake.done:
                self._take_handshake()
            while self._handshake.done and (head := self._take_head()) is not None:
                self._handle(head)
        except WireError as error:
            self._hub.on_refused(f"{self.who or self._address}: {error}")
            self.drop()

    def connection_lost(self, exc: Exception | None) -> None:
        self._deadline.cancel()
        if self.who is not None and self._hub.alerts.get(self.who) is self:
            del self._hub.alerts[self.who]
        # A refused second member of the same name must not remove the first.
        if self.who is not None and self._hub.members.get(self.who) is self:
            del self._hub.members[self.who]
            self._hub.on_gone(self.who)

    def drop(self) -> None:
        self._transport.close()

    def send(self, head: Any) -> None:
        self._transport.write(pack_head(head))

    def _take_handshake(self) -> None:
        """Leaves in the buffer what follows a complete handshake."""
        self._transport.write(self._handshake.feed(bytes(self._buffer)))
        self._buffer[:] = self._handshake.remainder

    def _handle(self, head: Any) -> None:
        if self.who is None:
            self._introduce(head)
        elif self.role == "member":
            view = head.pop("view", None) if isinstance(head, dict) else None
            if self._hub.members.get(self.who) is self:  # Else its name belongs to another by now.
                self._hub.on_message(self.who, message_from_wire(head), view)
        elif self.role == "alerts":
            raise WireError("unexpected message on an alert connection")
        elif not isinstance(head, list) or not head or not isinstance(head[0], str):
            raise WireError("malformed store call")
        else:
            self._hub.store.serve(head[0], head[1:], lambda *reply: self.send(list(reply)))

    def _introduce(self, head: Any) -> None:
        if not isinstance(head, dict) or not isinstance(head.get("who"), str):
            raise WireError("malformed introduction: the peer did not send its name")
        self.who, self.role = head["who"], str(head.get("role"))
        if head.get("incarnation", self._hub.incarnation) != self._hub.incarnation:
            self.who, who = None, self.who
            raise WireError(
                f"{who} belongs to coordinator {head['incarnation']} of the run, this is number "
                f"{self._hub.incarnation}"
            )
        if self.role == "alerts":
            self._hub.on_alerts(self.who, self)
        elif self.role != "store":
            self.role = "member"
            if self.who in self._hub.members:
                raise WireError(f"{self.who} is already connected")
            self._hub.members[self.who] = self
            if self.who in self._hub.known:
                self._hub.on_return(self.who)
            self._hub.known.add(self.who)

    def _take_head(self) -> Any | None:
        if len(self._buffer) < HEADER.size:
            return None
        head_bytes, _ = unpack_header(bytes(self._buffer[: HEADER.size]), max_body=0)
        end = HEADER.size + head_bytes
        if len(self._buffer) < end:
            return None
        head = unpack_head(self._buffer[HEADER.size : end])
        del self._buffer[:end]
        return head


Reply = Callable[[str, Any], None]


class RendezvousStore:
    """Keys and values for rendezvous; `get` waits until the key is set."""

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}
        self._waiting: dict[str, list[tuple[Reply, asyncio.TimerHandle]]] = {}

    def serve(self, operation: str, args: list[Any], reply: Reply) -> None:
        operations: dict[str, Callable[..., object]] = {
            "set": self._put,
            "add": self._add,
            "check": lambda keys: all(key in self._values for key in keys),
            "compare_set": self._compare_set,
            "delete": lambda key: self._values.pop(key, None) is not None,
            "count": lambda: len(self._values),
        }
        try:
            if operation == "get":
                self._get(reply, *args)
            elif operation in operations:
                reply("ok", operations[operation](*args))
            else:
                raise WireError(f"store: unknown operation {operation!r}")
        except (TypeError, ValueError) as error:
            raise WireError(f"store: {operation}: {error}") from None

    def _put(self, key: str, value: bytes) -> None:
        if len(value) > MAX_STORE_BYTES:
            raise WireError(f"store: value of {len(value)} bytes exceeds {MAX_STORE_BYTES}")
        self._values[key] = value
        for waiting, timer in self._waiting.pop(key, []):
            timer.cancel()
            waiting("ok", value)

    def _get(self, reply: Reply, key: str, timeout_s: float) -> None:
        if key in self._values:
            reply("ok", self._values[key])
            return
        timer = asyncio.get_running_loop().call_later(timeout_s, self._give_up, key, reply)
        self._waiting.setdefault(key, []).append((reply, timer))

    def _give_up(self, key: str, reply: Reply) -> None:
        self._waiting[key] = [w for w in self._waiting.get(key, []) if w[0] is not reply]
        reply("timeout", f"{key!r} was not set in time")

    def _add(self, key: str, amount: int) -> int:
        value = int(self._values.get(key, b"0")) + amount
        self._put(key, str(value).encode())
        return value

    def _compare_set(self, key: str, expected: bytes, desired: bytes) -> bytes:
        now = self._values.get(key)
        if now == expected or (now is None and expected == b""):
            self._put(key, desired)
            return desired
        return now if now is not None else expected
