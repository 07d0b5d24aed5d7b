"""Received bytes, and the heads found in them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.errors import ApiError
from gateway.http1.head import MAX_HEAD_BYTES, RequestHead
from gateway.http1.request_input import MAX_BLANK_BYTES, RequestInput

HEAD = b"GET /x HTTP/1.1\r\nHost: t\r\n\r\n"


def heads_of(pieces: list[bytes]) -> tuple[list[RequestHead], RequestInput]:
    """Feed the pieces one after the other, as a connection does, and return the heads found."""
    received, heads = RequestInput(), []
    for piece in pieces:
        received.data += piece
        while received.data and (head := received.take_head()) is not None:
            heads.append(head)
    return heads, received


@given(
    blanks=st.lists(st.sampled_from([b"", b"\r\n", b"\n", b"\r\n\r\n\r\n"]), min_size=3, max_size=3),
    piece_bytes=st.integers(1, 40),
)
def test_heads_behind_empty_lines_are_found_in_pieces_of_any_size(blanks: list[bytes], piece_bytes: int) -> None:
    stream = b"".join(blank + HEAD for blank in blanks)
    pieces = [stream[start : start + piece_bytes] for start in range(0, len(stream), piece_bytes)]
    heads, received = heads_of(pieces)
    assert [(head.method, head.path) for head in heads] == [("GET", "/x")] * 3
    assert not received.has_begun_head


def test_empty_lines_are_counted_over_pieces_and_anew_behind_each_head() -> None:
    heads, received = heads_of([b"\n"] * MAX_BLANK_BYTES + [HEAD] + [b"\n"] * MAX_BLANK_BYTES)
    assert len(heads) == 1
    assert received.has_begun_head
    received.data += b"\n"
    with pytest.raises(ApiError) as caught:
        received.take_head()
    assert caught.value.status == 400


def test_head_may_fill_the_room_and_not_exceed_it() -> None:
    received = RequestInput()
    received.data += b"GET /x HTTP/1.1\r\nHost: t\r\nX: ".ljust(MAX_HEAD_BYTES - 1, b"a")
    assert (received.take_head(), received.room) == (None, 1)
    received.data += b"a"
    with pytest.raises(ApiError) as caught:
        received.take_head()
    assert caught.value.status == 431


@pytest.mark.parametrize("byte", [b"@", b"[", b" ", b"\0", b"g"])
def test_bytes_that_begin_with_no_method_are_refused_at_once(byte: bytes) -> None:
    received = RequestInput()
    received.data += byte
    with pytest.raises(ApiError) as caught:
        received.take_head()
    assert caught.value.status == 400


@pytest.mark.parametrize("method", ["ABC", "ZYX"])
def test_any_capital_letter_may_begin_a_method(method: str) -> None:
    received = RequestInput()
    received.data += method[:1].encode()
    assert received.take_head() is None
