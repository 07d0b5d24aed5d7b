"""Received bytes, and the heads found in them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.errors import ApiError
from gateway.http1.head import MAX_BLANK_BYTES, MAX_HEAD_BYTES, MAX_REMEMBERED_BYTES, RequestHead, RequestInput

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


def test_equal_heads_in_a_row_are_read_once_and_others_anew() -> None:
    other = HEAD.replace(b"/x", b"/y")
    longer = HEAD.replace(b"Host: t", b"Host: t\r\nX: 1")
    heads, received = heads_of([HEAD, HEAD[:9], HEAD[9:] + HEAD, other, HEAD, longer, HEAD])
    assert [head.path for head in heads] == ["/x", "/x", "/x", "/y", "/x", "/x", "/x"]
    assert heads[0] is heads[1]
    assert heads[1] is heads[2]
    assert len(heads[5].headers) == 2
    assert heads[6].headers == heads[0].headers
    assert not received.has_begun_head


def test_long_head_is_not_remembered_and_nothing_is_of_a_connection_that_has_ended() -> None:
    long = HEAD[:-2] + b"X: ".ljust(MAX_REMEMBERED_BYTES, b"a") + b"\r\n\r\n"
    (first, second), received = heads_of([long, long])
    assert first == second
    assert first is not second
    received.data += HEAD
    before = received.take_head()
    received.clear()
    received.data += HEAD
    assert received.take_head() is not before
