"""Replies are the same in whatever pieces they come, and what is none is refused."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from redis.exceptions import BusyLoadingError, NoScriptError, ResponseError

from gateway.cache.redis_replies import MAX_LINE_BYTES, Reply, ReplyParser

_replies = st.recursive(
    st.none() | st.integers() | st.binary(max_size=40), lambda inner: st.lists(inner, max_size=4), max_leaves=8
)


def encoded(reply: object) -> bytes:
    if reply is None:
        return b"$-1\r\n"
    if isinstance(reply, int):
        return b":%d\r\n" % reply
    if isinstance(reply, bytes):
        return b"$%d\r\n%b\r\n" % (len(reply), reply)
    assert isinstance(reply, list)
    return b"*%d\r\n" % len(reply) + b"".join(map(encoded, reply))


@given(st.lists(_replies, max_size=5), st.integers(1, 50))
def test_replies_in_any_pieces_are_the_same(replies: list[object], size: int) -> None:
    parser = ReplyParser()
    stream = b"".join(map(encoded, replies))
    found: list[Reply] = []
    for start in range(0, len(stream), size):
        found += parser.feed(stream[start : start + size])
    assert found == replies
    assert not parser._data


def test_errors_are_values_of_their_kind() -> None:
    stream = b"+OK\r\n-NOSCRIPT none\r\n-ERR wrong\r\n-LOADING wait\r\n*-1\r\n"
    done, unknown, refused, loading, nothing = ReplyParser().feed(stream)
    assert (done, nothing) == (b"OK", None)
    assert isinstance(unknown, NoScriptError)
    assert isinstance(refused, ResponseError)
    assert str(refused) == "ERR wrong"
    assert isinstance(loading, BusyLoadingError)


@pytest.mark.parametrize(
    "stream",
    [b"?1\r\n", b"$x\r\n", b"$1\r\nxyz", b":1e9\r\n", b"*1\r\n" * 50, b"+" + b"x" * MAX_LINE_BYTES],
    ids=["kind", "length", "longer", "number", "deep", "line"],
)
def test_bytes_that_are_no_reply_are_refused(stream: bytes) -> None:
    with pytest.raises(ValueError):  # noqa: PT011 - each says something else
        ReplyParser().feed(stream)
