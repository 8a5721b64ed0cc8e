"""The wire format: a fixed header, a small msgpack head, then raw bytes. No pickle.

    magic "PCLN" | version u8 | reserved u8 x3 | head length u32 | body length u64 | head | body

Sizes are checked before anything is allocated. Before the first message both sides prove that
they have the run's token (`protocol/handshake.py`). Workers and servers send the coordinator typed
messages (`protocol/messages.py`) over a `ControlConnection`.
"""

from __future__ import annotations

import contextlib
import secrets
import select
import socket
import struct
import threading
import time
from collections.abc import Callable
from typing import Any, Protocol

import msgpack

from paceline.errors import DeadlineExceeded, PeerLost, WireError
from paceline.protocol.handshake import MAGIC, NONCE_BYTES, VERSION, Handshake, Role, check_format
from paceline.protocol.messages import Message, message_from_wire, message_to_wire

HEADER = struct.Struct("<4sB3xIQ")
MAX_HEAD = 64 << 20
MAX_BODY = 1 << 40
HANDSHAKE_TIMEOUT_S = 10.0
REJOIN_TIMEOUT_S = 2.0
"""Time to connect to a coordinator that must be listening already."""


def pack(head: Any) -> bytes:
    packed: bytes = msgpack.packb(head, use_bin_type=True)
    return packed


def pack_head(head: Any, body_bytes: int = 0) -> bytes:
    """Header and head of a message; the body, if any, is sent separately."""
    packed = pack(head)
    if len(packed) > MAX_HEAD:
        raise WireError(f"message head too large: {len(packed)} bytes, the limit is {MAX_HEAD}")
    return HEADER.pack(MAGIC, VERSION, len(packed), body_bytes) + packed


def unpack_header(header: bytes, max_body: int) -> tuple[int, int]:
    """Lengths of head and body. Raises WireError for another format or too large a message."""
    magic, version, head_bytes, body_bytes = HEADER.unpack(header)
    check_format(magic, version)
    if head_bytes > MAX_HEAD or body_bytes > max_body:
        raise WireError(
            f"message too large: {head_bytes}+{body_bytes} bytes, the limit here is "
            f"{MAX_HEAD}+{max_body}"
        )
    return head_bytes, body_bytes


def unpack_head(packed: bytes | bytearray) -> Any:
    try:
        return msgpack.unpackb(packed, raw=False, strict_map_key=False)
    except (ValueError, TypeError) as error:  # TypeError: a map with a list for a key.
        raise WireError(f"malformed message head: not msgpack ({error})") from None


def begin_handshake(role: Role, token: str) -> Handshake:
    """A handshake with a fresh nonce."""
    return Handshake(role, token, secrets.token_bytes(NONCE_BYTES))


class Channel:
    """Blocking messages over a socket, with deadlines; any thread may send, one receives."""

    def __init__(self, sock: socket.socket, peer: str, timeout_s: float) -> None:
        self._sock = sock
        self.peer = peer
        self.timeout_s = timeout_s
        self.bytes_sent = self.bytes_received = 0
        """Bodies only."""
        self._send_lock = threading.Lock()
        sock.settimeout(timeout_s)
        if sock.family in (socket.AF_INET, socket.AF_INET6):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    @property
    def local_address(self) -> str:
        return str(self._sock.getsockname()[0])

    @classmethod
    def connect(
        cls,
        host: str,
        port: int,
        *,
        token: str,
        peer: str,
        timeout_s: float,
        retry_s: float | None = None,
    ) -> Channel:
        """Connects and authenticates.

        A peer that does not listen may be starting: it is tried for `retry_s`, by default until the
        deadline.
        """
        deadline = time.monotonic() + (timeout_s if retry_s is None else retry_s)
        while True:
            try:
                sock = socket.create_connection((host, port), timeout=timeout_s)
                break
            except OSError as error:
                if time.monotonic() > deadline:
                    raise PeerLost(
                        f"could not connect to {peer} at {host}:{port} ({error})"
                    ) from None
                time.sleep(0.02)
        channel = cls(sock, peer, timeout_s)
        channel.authenticate("client", token)
        return channel

    @classmethod
    def accept(cls, sock: socket.socket, *, token: str, peer: str, timeout_s: float) -> Channel:
        """Authenticates a peer that connected; raises WireError if it does not have the token."""
        channel = cls(sock, peer, min(timeout_s, HANDSHAKE_TIMEOUT_S))
        channel.authenticate("server", token)
        channel.set_timeout(timeout_s)
        return channel

    def set_timeout(self, timeout_s: float) -> None:
        """Sets how long the peer may be silent from now on."""
        self.timeout_s = timeout_s
        self._sock.settimeout(timeout_s)

    def authenticate(self, role: Role, token: str) -> None:
        """Performs the handshake; raises WireError if the peer does not have the token."""
        handshake = begin_handshake(role, token)
        self._send_all(handshake.start())
        while not handshake.done:
            reply = handshake.feed(self._receive(handshake.bytes_needed))
            if reply:
                self._send_all(reply)

    def send(self, head: Any, *body: memoryview) -> None:
        total = sum(part.nbytes for part in body)
        with self._send_lock:
            self._send_all(pack_head(head, total))
            for part in body:
                self._send_all(part)
            self.bytes_sent += total

    def receive(self, *, max_body: int = 0, patient: bool = False) -> tuple[Any, bytearray]:
        head, body_bytes = self.receive_head(max_body=max_body, patient=patient)
        return head, self._receive(body_bytes)

    def receive_head(self, *, max_body: int, patient: bool = False) -> tuple[Any, int]:
        """The head, and the number of body bytes to fetch next with `receive_into`.

        `patient` is for an idle side: the deadline counts from the first byte of the message.
        A peer that closes the connection still ends the wait.
        """
        if patient:
            select.select([self._sock], [], [])
        head_bytes, body_bytes = unpack_header(bytes(self._receive(HEADER.size)), max_body)
        self.bytes_received += body_bytes
        return unpack_head(self._receive(head_bytes)), body_bytes

    def has_input(self) -> bool:
        """True if bytes can be received without waiting."""
        return bool(select.select([self._sock], [], [], 0)[0])

    def receive_into(self, target: memoryview) -> None:
        got = 0
        while got < target.nbytes:
            try:
                count = self._sock.recv_into(target[got:])
            except TimeoutError:
                raise DeadlineExceeded(
                    f"received nothing from {self.peer} for {self.timeout_s:g} s"
                ) from None
            except OSError as error:
                raise PeerLost(f"lost the connection to {self.peer} ({error})") from None
            if count == 0:
                raise PeerLost(f"{self.peer} closed the connection")
            got += count

    def _receive(self, count: int) -> bytearray:
        buffer = bytearray(count)
        if count:
            self.receive_into(memoryview(buffer))
        return buffer

    def _send_all(self, data: bytes | memoryview) -> None:
        try:
            self._sock.sendall(data)
        except TimeoutError:
            raise DeadlineExceeded(
                f"{self.peer} accepted no data for {self.timeout_s:g} s"
            ) from None
        except OSError as error:
            raise PeerLost(f"lost the connection to {self.peer} ({error})") from None

    def shut_down(self) -> None:
        """Ends the connection; a thread that waits here wakes up, which close alone does not do."""
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self.shut_down()
        self._sock.close()


class CoordinatorLink(Protocol):
    """Messages to and from the coordinator."""

    def send(self, message: Message) -> None: ...

    def receive(self) -> Message: ...


class ControlConnection:
    """The link of a process of the run; sending is thread-safe.

    If the process outlives the coordinator, messages to one that is lost are dropped, and `receive`
    waits until `rejoin` has connected to another one, which asks for all that it must know.
    """

    def __init__(
        self,
        host: str,
        port: int,
        *,
        token: str,
        who: str,
        pid: int,
        timeout_s: float,
        incarnation: int = 0,
        can_rejoin: bool = False,
    ) -> None:
        self.host, self.port, self.incarnation = host, port, incarnation
        """Address of the coordinator, and its number among those of the run."""
        self._token, self._timeout_s, self._can_rejoin = token, timeout_s, can_rejoin
        self._introduction = {"who": who, "pid": pid, "role": "member"}
        self._channel = self._connect(host, port, incarnation, retry_s=timeout_s)
        self.view = 0
        """Number of the view that this process belongs to; every message carries it."""
        self.lost = threading.Event()
        """Set when the coordinator is lost, until `rejoin`."""
        self.closed = False
        self._rejoined = threading.Condition()
        self.generation = 0
        """Number of times that this process has rejoined."""
        self.greeting: Callable[[], list[Message]] = list
        """Returns the messages that another coordinator needs first."""

    def _connect(self, host: str, port: int, incarnation: int, *, retry_s: float) -> Channel:
        channel = Channel.connect(
            *(host, port),
            token=self._token,
            peer="the coordinator",
            timeout_s=retry_s,
            retry_s=retry_s,
        )
        channel.set_timeout(self._timeout_s)
        channel.send({**self._introduction, "incarnation": incarnation})
        return channel

    def rejoin(self, host: str, port: int, incarnation: int) -> None:
        """Connects to another coordinator, or again to the same. Raises PacelineError on failure.

        To be called by one thread only.
        """
        channel = self._connect(host, port, incarnation, retry_s=REJOIN_TIMEOUT_S)
        with self._rejoined:
            before, self._channel = self._channel, channel
            self.host, self.port, self.incarnation = host, port, incarnation
            self.generation += 1
            self.lost.clear()
            self._rejoined.notify_all()
        before.shut_down()
        for message in self.greeting():
            self.send(message)

    def wait_until_rejoined(self, generation: int) -> None:
        """Waits until this process has rejoined more often than this."""
        with self._rejoined:
            self._rejoined.wait_for(lambda: self.generation > generation or self.closed)

    @property
    def local_address(self) -> str:
        """Local address of the route to the coordinator."""
        return self._channel.local_address

    def send(self, message: Message) -> None:
        channel = self._channel
        try:
            channel.send({**message_to_wire(message), "view": self.view})
        except (PeerLost, DeadlineExceeded):
            if not self._can_rejoin:
                raise
            self._lose(channel)

    def receive(self) -> Message:
        """Waits for the next message. Raises PeerLost if the coordinator is gone for good.

        There is no deadline here, because the supervisor detects workers without progress.
        """
        while True:
            generation, channel = self.generation, self._channel
            try:
                head, _ = channel.receive(patient=True)
                return message_from_wire(head)
            except PeerLost:
                if not self._can_rejoin or self.closed:
                    raise
                self._lose(channel)
                self.wait_until_rejoined(generation)

    def _lose(self, channel: Channel) -> None:
        with self._rejoined:
            if self._channel is channel:
                self.lost.set()

    def close(self) -> None:
        with self._rejoined:
            self.closed = True
            self._rejoined.notify_all()
        self._channel.close()


class AlertConnection:
    """Receives the numbers of views that have ended, next to the control connection.

    A worker in an exchange with a lost one does not read its control connection. A separate thread
    waits here.
    """

    def __init__(
        self,
        host: str,
        port: int,
        *,
        token: str,
        who: str,
        pid: int,
        timeout_s: float,
        incarnation: int = 0,
    ) -> None:
        self._channel = Channel.connect(
            *(host, port),
            token=token,
            peer="the coordinator",
            timeout_s=timeout_s,
            retry_s=REJOIN_TIMEOUT_S,
        )
        introduction = {"who": who, "pid": pid, "role": "alerts", "incarnation": incarnation}
        self._channel.send(introduction)

    def receive(self) -> int:
        """Waits for the end of a view. Raises PeerLost if the coordinator is gone."""
        head, _ = self._channel.receive(patient=True)
        if not isinstance(head, int):
            raise WireError("malformed alert")
        return head

    def close(self) -> None:
        self._channel.close()
