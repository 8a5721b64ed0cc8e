"""The handshake: both sides prove that they have the run's token, without any I/O."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from paceline.errors import WireError
from paceline.protocol.handshake import (
    HELLO,
    MAGIC,
    PROOF_BYTES,
    VERSION,
    Handshake,
    Role,
    make_proof,
)

TOKEN = "a token of this run"
CLIENT_NONCE = b"c" * 32
SERVER_NONCE = b"s" * 32
NO_TOKEN = "authentication failed: the peer does not have this run's token"
REFLECTED = "authentication failed: the peer sent this side's nonce back"


def client(token: str = TOKEN, nonce: bytes = CLIENT_NONCE) -> Handshake:
    return Handshake("client", token, nonce)


def server(token: str = TOKEN, nonce: bytes = SERVER_NONCE) -> Handshake:
    return Handshake("server", token, nonce)


def test_both_sides_finish_with_the_same_token() -> None:
    one, two = client(), server()
    proof = one.feed(two.start())
    assert two.feed(one.start()) == b""
    assert not one.done
    assert not two.done
    answer = two.feed(proof)
    assert two.done
    assert one.feed(answer) == b""
    assert one.done
    assert one.bytes_needed == two.bytes_needed == 0
    assert one.remainder == two.remainder == b""


def test_token_never_crosses_the_wire() -> None:
    one, two = client(), server()
    proof = one.feed(two.start())
    two.feed(one.start())
    sent = one.start() + two.start() + proof + two.feed(proof)
    assert TOKEN.encode() not in sent


def test_client_without_the_token_gets_no_proof() -> None:
    one, two = client(token="another token"), server()
    two.feed(one.start())
    with pytest.raises(WireError) as refused:
        two.feed(one.feed(two.start()))
    assert str(refused.value) == NO_TOKEN
    assert not two.done


def test_server_without_the_token_is_refused() -> None:
    one, two = client(), server(token="another token")
    one.feed(two.start())
    forged = make_proof("another token", "server", received=CLIENT_NONCE, sent=SERVER_NONCE)
    with pytest.raises(WireError) as refused:
        one.feed(forged)
    assert str(refused.value) == NO_TOKEN
    assert not one.done


@pytest.mark.parametrize("role", ["client", "server"])
@pytest.mark.parametrize(
    ("hello", "message"),
    [
        (
            HELLO.pack(MAGIC, VERSION - 1, b"n" * 32),
            f"the peer uses wire format {VERSION - 1}, this side uses {VERSION}; "
            "install the same version of Paceline on both",
        ),
        (
            b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n" + b"." * 40,
            "the peer does not use Paceline's wire format (sent b'GET ')",
        ),
    ],
    ids=["version", "browser"],
)
def test_other_format_is_refused(role: Role, hello: bytes, message: str) -> None:
    with pytest.raises(WireError) as refused:
        Handshake(role, TOKEN, CLIENT_NONCE).feed(hello)
    assert str(refused.value) == message


@pytest.mark.parametrize("cut", [0, 1, HELLO.size - 1, HELLO.size, HELLO.size + PROOF_BYTES - 1])
def test_truncated_handshake_is_not_done(cut: int) -> None:
    two = server()
    proof = client().feed(server().start())
    whole = client().start() + proof
    assert two.feed(whole[:cut]) == b""
    assert not two.done
    assert 0 < two.bytes_needed <= len(whole) - cut
    assert two.feed(whole[cut:])
    assert two.done


def test_replayed_proof_is_refused() -> None:
    """A recorded client conversation does not fit the nonce of another connection."""
    first = server()
    recorded = client().start() + client().feed(first.start())
    first.feed(recorded)
    assert first.done
    with pytest.raises(WireError) as refused:
        server(nonce=b"t" * 32).feed(recorded)
    assert str(refused.value) == NO_TOKEN


@pytest.mark.parametrize("role", ["client", "server"])
def test_reflected_hello_is_refused(role: Role) -> None:
    """A peer that echoes what it receives gets no proof to echo."""
    side = Handshake(role, TOKEN, CLIENT_NONCE)
    with pytest.raises(WireError) as refused:
        side.feed(side.start())
    assert str(refused.value) == REFLECTED


def test_reflected_proof_is_refused() -> None:
    """The role in the proof: a client's own proof does not pass as the server's."""
    one = client()
    proof = one.feed(server().start())
    with pytest.raises(WireError) as refused:
        one.feed(proof)
    assert str(refused.value) == NO_TOKEN


def test_proof_with_the_role_of_the_other_side_is_refused() -> None:
    two = server()
    two.feed(client().start())
    proof = make_proof(TOKEN, "server", received=SERVER_NONCE, sent=CLIENT_NONCE)
    with pytest.raises(WireError, match=NO_TOKEN):
        two.feed(proof)


def test_failed_handshake_stays_failed() -> None:
    two = server()
    with pytest.raises(WireError):
        two.feed(b"x" * HELLO.size)
    with pytest.raises(WireError, match="failed already"):
        two.feed(client().start() + client().feed(server().start()))
    assert not two.done


def test_nonce_of_another_length_is_refused() -> None:
    with pytest.raises(ValueError, match="32 bytes, not 5"):
        Handshake("client", TOKEN, b"short")


@given(pieces=st.lists(st.integers(1, 40), max_size=30), rest=st.binary(max_size=50))
def test_pieces_of_any_size_make_one_handshake(pieces: list[int], rest: bytes) -> None:
    """What follows the handshake in the same piece is kept for the reader of messages."""
    two = server()
    whole = client().start() + client().feed(two.start()) + rest
    answer, at = b"", 0
    while at < len(whole):
        size = pieces.pop() if pieces else len(whole)
        if two.done:
            break
        answer += two.feed(whole[at : at + size])
        at += size
    assert two.done
    assert two.remainder + whole[at:] == rest
    one = client()
    one.feed(server().start())
    one.feed(answer)
    assert one.done


@given(role=st.sampled_from(["client", "server"]), data=st.lists(st.binary(max_size=90)))
@example(role="server", data=[HELLO.pack(MAGIC, VERSION, b"n" * 32), bytes(PROOF_BYTES)])
@example(role="client", data=[HELLO.pack(MAGIC, VERSION, b"n" * 32) + bytes(PROOF_BYTES)])
def test_any_bytes_are_refused_or_wait_for_more(role: Role, data: list[bytes]) -> None:
    """No input without the token completes a handshake, or raises anything but WireError."""
    side = Handshake(role, TOKEN, CLIENT_NONCE)
    for piece in data:
        try:
            side.feed(piece)
        except WireError:
            break
        assert side.bytes_needed > 0
    assert not side.done
    assert side.remainder == b""


@given(flip=st.integers(0, (HELLO.size + PROOF_BYTES) * 8 - 1))
def test_any_flipped_bit_is_refused_or_ignored(flip: int) -> None:
    """Only the three reserved bytes may differ."""
    whole = bytearray(client().start() + client().feed(server().start()))
    whole[flip // 8] ^= 1 << (flip % 8)
    two = server()
    if flip // 8 in (5, 6, 7):
        two.feed(whole)
        assert two.done
        return
    with pytest.raises(WireError):
        two.feed(whole)
    assert not two.done
