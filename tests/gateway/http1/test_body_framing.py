"""Where bodies end, whatever pieces they come in, and what chunks may cost."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.errors import ApiError
from gateway.http1.body_framing import (
    MAX_CHUNK_LINE_BYTES,
    MAX_TRAILER_BYTES,
    BodyFraming,
    ChunkedFraming,
    LengthFraming,
)

NEXT = b"GET /next HTTP/1.1\r\n"


def take_all(framing: BodyFraming, sent: bytes, cuts: list[int]) -> tuple[bytes, bytes]:
    """Feed `sent` in pieces that end at `cuts`; return the payload and what was left for the next request."""
    source, payload, start = bytearray(), b"", 0
    for end in [*sorted(cut % (len(sent) + 1) for cut in cuts), len(sent)]:
        source += sent[start:end]
        start = end
        if not framing.is_complete:
            payload += framing.take(source)
    return payload, bytes(source)


@given(body=st.binary(max_size=300), cuts=st.lists(st.integers(0, 1000), max_size=20))
def test_announced_body_ends_after_its_length(body: bytes, cuts: list[int]) -> None:
    framing = LengthFraming(len(body))
    assert take_all(framing, body + NEXT, cuts) == (body, NEXT)
    assert framing.is_complete


@given(
    pieces=st.lists(st.binary(min_size=1, max_size=100), max_size=10),
    extension=st.sampled_from([b"", b";a", b';a="b c"', b" ;a=b"]),
    trailers=st.lists(st.sampled_from([b"X: y\r\n", b"Content-Length: 5\r\n", b"Z:\r\n"]), max_size=3),
    cuts=st.lists(st.integers(0, 2000), max_size=20),
)
def test_chunked_body_ends_after_its_trailers(
    pieces: list[bytes], extension: bytes, trailers: list[bytes], cuts: list[int]
) -> None:
    chunks = b"".join(b"%X%b\r\n%b\r\n" % (len(piece), extension, piece) for piece in pieces)
    framing = ChunkedFraming()
    sent = chunks + b"0\r\n" + b"".join(trailers) + b"\r\n" + NEXT
    assert take_all(framing, sent, cuts) == (b"".join(pieces), NEXT)
    assert framing.is_complete


@pytest.mark.parametrize(
    "sent",
    [
        b"\r\n",
        b"x\r\n",
        b"-1\r\n",
        b"+1\r\n",
        b"0x1\r\n",
        b"1 \r\n",
        b" 1\r\n",
        b"1_0\r\n",
        b"\xb2\r\n",
        b"fffffffffffffffff\r\n",
        b"1\nx",
        b"1;a\nb\r\n",
        b"1;\x00\r\n",
        b"1\r\nxy\r\n",
        b"1\r\nx\n0\r\n\r\n",
        b"0\r\nX\r\n\r\n",
        b"0\r\nX : y\r\n\r\n",
        b"0\r\n X: y\r\n\r\n",
        b"0\r\nX: a\nb\r\n\r\n",
        b"0\r\nX: a\rb\r\n\r\n",
        b"0\r\nX: \x00\r\n\r\n",
    ],
    ids=repr,
)
def test_broken_chunk_is_a_400(sent: bytes) -> None:
    sent += b" " * MAX_CHUNK_LINE_BYTES
    with pytest.raises(ApiError) as caught:
        ChunkedFraming().take(bytearray(sent))
    assert caught.value.status == 400


@pytest.mark.parametrize(
    ("opening", "piece", "max_bytes", "status"),
    [
        (b"0\r\n", b"X: y\r\n", MAX_TRAILER_BYTES, 431),
        (b"0\r\nX: ", b"y", MAX_TRAILER_BYTES, 431),
        (b"1;", b"x", MAX_CHUNK_LINE_BYTES, 400),
        (b"", b"1;" + b"x" * 100 + b"\r\n \r\n", 32 << 10, 400),
    ],
    ids=["many trailers", "a long trailer", "a long extension", "many extensions"],
)
def test_framing_without_end_is_refused(opening: bytes, piece: bytes, max_bytes: int, status: int) -> None:
    framing, source = ChunkedFraming(), bytearray(opening)

    def feed() -> None:
        for _ in range(max_bytes // len(piece) + 2):
            source.extend(piece)
            framing.take(source)

    with pytest.raises(ApiError) as caught:
        feed()
    assert caught.value.status == status
    assert (caught.value.code == "headers_too_large") == (status == 431)


def test_body_of_tiny_chunks_is_served() -> None:
    sent = b"1\r\nx\r\n" * 100_000 + b"0\r\n\r\n"
    assert take_all(ChunkedFraming(), sent, []) == (b"x" * 100_000, b"")
