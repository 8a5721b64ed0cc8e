"""Mutual authentication of two peers that share the run's token, without any I/O.

Each side sends a hello with a random nonce; each proves that it has the token with an HMAC over
both nonces, so the token itself never crosses the wire:

    hello = magic "PCLN" | version u8 | reserved u8 x3 | nonce (32 bytes)
    proof = HMAC-SHA256(token, role | nonce received | nonce sent)

The client proves itself first: a server sends no proof to an unauthenticated peer. The role in
the proof prevents a proof from being sent back to the side that made it.
"""

import hashlib
import hmac
import struct
from typing import Literal

from paceline.errors import WireError

MAGIC = b"PCLN"
VERSION = 5
"""Version of the wire format: of the handshake, of frames and of the messages in them."""
HELLO = struct.Struct("<4sB3x32s")
NONCE_BYTES = 32
PROOF_BYTES = 32

Role = Literal["client", "server"]


def check_format(magic: bytes, version: int) -> None:
    """Raises WireError unless the peer uses this side's wire format."""
    if magic != MAGIC:
        raise WireError(f"the peer does not use Paceline's wire format (sent {magic!r})")
    if version != VERSION:
        raise WireError(
            f"the peer uses wire format {version}, this side uses {VERSION}; "
            "install the same version of Paceline on both"
        )


def make_proof(token: str, role: Role, *, received: bytes, sent: bytes) -> bytes:
    """Proof of the token by the side with this role, over the nonces it received and sent."""
    return hmac.new(token.encode(), role.encode() + received + sent, hashlib.sha256).digest()


class Handshake:
    """One side of a handshake: send `start()`, pass received bytes to `feed`, send what it returns.

    Received bytes may arrive in pieces of any size. A caller that must not read too far reads
    `bytes_needed` at a time; other callers find what follows the handshake in `remainder`.
    A peer that does not have the token, or does not follow the format, raises WireError; the
    handshake has failed then, and every further `feed` raises too.
    """

    def __init__(self, role: Role, token: str, nonce: bytes) -> None:
        if len(nonce) != NONCE_BYTES:
            raise ValueError(f"a nonce has {NONCE_BYTES} bytes, not {len(nonce)}")
        self._role: Role = role
        self._peer_role: Role = "server" if role == "client" else "client"
        self._token = token
        self._nonce = nonce
        self._peer_nonce: bytes | None = None
        self._buffer = bytearray()
        self._failed = False
        self.done = False

    def start(self) -> bytes:
        """This side's hello, to be sent first."""
        return HELLO.pack(MAGIC, VERSION, self._nonce)

    @property
    def bytes_needed(self) -> int:
        """Bytes still missing for the next step; 0 when the handshake is done."""
        if self.done:
            return 0
        expected = HELLO.size if self._peer_nonce is None else PROOF_BYTES
        return expected - len(self._buffer)

    @property
    def remainder(self) -> bytes:
        """Bytes received after the end of the handshake: the first messages."""
        return bytes(self._buffer) if self.done else b""

    def feed(self, data: bytes | bytearray) -> bytes:
        """Takes received bytes and returns what to send now, which may be empty."""
        if self._failed:
            raise WireError("the handshake with this peer has failed already")
        self._buffer += data
        reply = b""
        try:
            while not self.done and self.bytes_needed <= 0:
                reply += self._take_proof() if self._peer_nonce else self._take_hello()
        except WireError:
            self._failed = True
            raise
        return reply

    def _take_hello(self) -> bytes:
        magic, version, peer_nonce = HELLO.unpack(self._take(HELLO.size))
        check_format(magic, version)
        if hmac.compare_digest(peer_nonce, self._nonce):
            raise WireError("authentication failed: the peer sent this side's nonce back")
        self._peer_nonce = peer_nonce
        return self._proof() if self._role == "client" else b""

    def _take_proof(self) -> bytes:
        assert self._peer_nonce is not None
        # The peer received this side's nonce, and sent its own.
        expected = make_proof(
            self._token, self._peer_role, received=self._nonce, sent=self._peer_nonce
        )
        if not hmac.compare_digest(self._take(PROOF_BYTES), expected):
            raise WireError("authentication failed: the peer does not have this run's token")
        self.done = True
        return self._proof() if self._role == "server" else b""

    def _proof(self) -> bytes:
        assert self._peer_nonce is not None
        return make_proof(self._token, self._role, received=self._peer_nonce, sent=self._nonce)

    def _take(self, count: int) -> bytes:
        taken = bytes(self._buffer[:count])
        del self._buffer[:count]
        return taken
