"""The wire format: a fixed header, a small msgpack head, raw bytes behind it. No pickle.

    magic "PCLN" | version u8 | reserved u8 x3 | head length u32 | body length u64 | head | body

Sizes are checked before anything is allocated. Before the first message both sides prove that
they know the run's token (`greet`): each sends a nonce and answers the other's with an HMAC, so
the token itself never crosses the wire.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import select
import socket
import struct
import time
from typing import Any

import msgpack

from paceline.errors import DeadlineExceeded, PeerLost, WireError

VERSION = 2
MAGIC = b"PCLN"
HEADER = struct.Struct("<4sB3xIQ")
MAX_HEAD = 64 << 20
MAX_BODY = 1 << 40
HELLO = struct.Struct("<4sB3x32s")
PROOF_BYTES = 32
HANDSHAKE_TIMEOUT_S = 10.0


def pack(head: Any) -> bytes:
    packed: bytes = msgpack.packb(head, use_bin_type=True)
    return packed


def pack_head(head: Any, body_bytes: int = 0) -> bytes:
    """Header and head of a message whose body, if any, follows separately."""
    packed = pack(head)
    if len(packed) > MAX_HEAD:
        raise WireError(f"a message head of {len(packed)} bytes: at most {MAX_HEAD} are sent")
    return HEADER.pack(MAGIC, VERSION, len(packed), body_bytes) + packed


def unpack_header(header: bytes, max_body: int) -> tuple[int, int]:
    """Lengths of head and body; anything not in the format, or too large, is refused here."""
    magic, version, head_bytes, body_bytes = HEADER.unpack(header)
    if magic != MAGIC:
        raise WireError(f"a peer that does not speak Paceline's wire format (sent {magic!r})")
    if version != VERSION:
        raise WireError(f"a peer with wire format {version}, this side has {VERSION}")
    if head_bytes > MAX_HEAD or body_bytes > max_body:
        raise WireError(
            f"a message of {head_bytes}+{body_bytes} bytes: at most {MAX_HEAD}+{max_body} expected"
        )
    return head_bytes, body_bytes


def unpack_head(packed: bytes | bytearray) -> Any:
    try:
        return msgpack.unpackb(packed, raw=False, strict_map_key=False)
    except (ValueError, TypeError) as error:  # TypeError: a map with a list for a key.
        raise WireError(f"a message head that is not msgpack ({error})") from None


def make_greeting() -> tuple[bytes, bytes]:
    nonce = os.urandom(32)
    return HELLO.pack(MAGIC, VERSION, nonce), nonce


def read_greeting(greeting: bytes) -> bytes:
    magic, version, nonce = HELLO.unpack(greeting)
    if magic != MAGIC:
        raise WireError(f"a peer that does not speak Paceline's wire format (sent {magic!r})")
    if version != VERSION:
        raise WireError(f"a peer with wire format {version}, this side has {VERSION}")
    assert isinstance(nonce, bytes)
    return nonce


def prove(token: str, role: str, theirs: bytes, mine: bytes) -> bytes:
    """Proof of the token over both nonces; the role keeps a proof from being sent back."""
    return hmac.new(token.encode(), role.encode() + theirs + mine, hashlib.sha256).digest()


def check_proof(proof: bytes, token: str, role: str, theirs: bytes, mine: bytes) -> None:
    # The peer computed it with the two nonces the other way round.
    if not hmac.compare_digest(proof, prove(token, role, mine, theirs)):
        raise WireError("a peer that does not know this run's token")


class Channel:
    """A blocking message channel over a connected socket; every wait has a deadline."""

    def __init__(self, sock: socket.socket, peer: str, timeout_s: float) -> None:
        self._sock = sock
        self.peer = peer
        self.timeout_s = timeout_s
        self.bytes_sent = 0
        self.bytes_received = 0
        """Bodies alone, in both directions."""
        sock.settimeout(timeout_s)
        if sock.family in (socket.AF_INET, socket.AF_INET6):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    @property
    def local_address(self) -> str:
        return str(self._sock.getsockname()[0])

    @classmethod
    def connect(cls, host: str, port: int, *, token: str, peer: str, timeout_s: float) -> Channel:
        """Connect and greet; retries until the deadline, for a peer that is still starting."""
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                sock = socket.create_connection((host, port), timeout=timeout_s)
                break
            except OSError as error:
                if time.monotonic() > deadline:
                    raise PeerLost(f"no connection to {peer} at {host}:{port} ({error})") from None
                time.sleep(0.02)
        channel = cls(sock, peer, timeout_s)
        channel.greet(token, "client", "server")
        return channel

    @classmethod
    def accept(cls, sock: socket.socket, *, token: str, peer: str, timeout_s: float) -> Channel:
        """Greet a peer that connected; raises WireError if it does not know the token."""
        channel = cls(sock, peer, min(timeout_s, HANDSHAKE_TIMEOUT_S))
        channel.greet(token, "server", "client")
        channel.set_timeout(timeout_s)
        return channel

    def set_timeout(self, timeout_s: float) -> None:
        """How long a peer may be silent from now on."""
        self.timeout_s = timeout_s
        self._sock.settimeout(timeout_s)

    def greet(self, token: str, my_role: str, their_role: str) -> None:
        greeting, mine = make_greeting()
        self._send_all(greeting)
        theirs = read_greeting(bytes(self._receive(HELLO.size)))
        if my_role == "client":
            # The client proves itself first: a server answers nobody it does not know.
            self._send_all(prove(token, my_role, theirs, mine))
            check_proof(bytes(self._receive(PROOF_BYTES)), token, their_role, theirs, mine)
        else:
            check_proof(bytes(self._receive(PROOF_BYTES)), token, their_role, theirs, mine)
            self._send_all(prove(token, my_role, theirs, mine))

    def send(self, head: Any, *body: memoryview) -> None:
        total = sum(part.nbytes for part in body)
        self._send_all(pack_head(head, total))
        for part in body:
            self._send_all(part)
        self.bytes_sent += total

    def receive(self, *, max_body: int = 0, patient: bool = False) -> tuple[Any, bytearray]:
        head, body_bytes = self.receive_head(max_body=max_body, patient=patient)
        return head, self._receive(body_bytes)

    def receive_head(self, *, max_body: int, patient: bool = False) -> tuple[Any, int]:
        """The head, and how many body bytes must be fetched next with `receive_into`.

        `patient` is for a side that is merely idle: nothing need come until it is asked for, so
        the deadline counts only from the first byte. A peer that goes away still ends the wait.
        """
        if patient:
            select.select([self._sock], [], [])
        head_bytes, body_bytes = unpack_header(bytes(self._receive(HEADER.size)), max_body)
        self.bytes_received += body_bytes
        return unpack_head(self._receive(head_bytes)), body_bytes

    def has_input(self) -> bool:
        """Something is there to be received."""
        return bool(select.select([self._sock], [], [], 0)[0])

    def receive_into(self, target: memoryview) -> None:
        got = 0
        while got < target.nbytes:
            try:
                count = self._sock.recv_into(target[got:])
            except TimeoutError:
                raise DeadlineExceeded(
                    f"nothing from {self.peer} for {self.timeout_s:g} s"
                ) from None
            except OSError as error:
                raise PeerLost(f"the connection to {self.peer} broke ({error})") from None
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
            raise DeadlineExceeded(f"{self.peer} took nothing for {self.timeout_s:g} s") from None
        except OSError as error:
            raise PeerLost(f"the connection to {self.peer} broke ({error})") from None

    def close(self) -> None:
        # shutdown wakes a thread that is blocked in recv; close alone would not.
        try:
            self._sock.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass
        self._sock.close()
