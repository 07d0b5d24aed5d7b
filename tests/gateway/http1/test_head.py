"""Heads of requests: what is understood, and what is refused with which status."""

from __future__ import annotations

import pytest

from gateway.errors import ApiError
from gateway.http1.head import MAX_HEADERS, MAX_TARGET_BYTES, parse_head

LINE = b"GET /x HTTP/1.1\r\n"
HOST = b"Host: t\r\n"
GET = LINE + HOST


def status_of(data: bytes) -> int:
    with pytest.raises(ApiError) as caught:
        parse_head(data + b"\r\n")
    return caught.value.status


def test_head_is_taken_apart() -> None:
    head = parse_head(b"POST /a%20b/c?d=e%20f HTTP/1.1\r\nHOST: t\r\nX-One:  \tv w\t \r\nContent-Length: 12\r\n\r\n")
    assert (head.method, head.path, head.raw_path, head.query) == ("POST", "/a b/c", b"/a%20b/c", b"d=e%20f")
    assert head.headers == [(b"host", b"t"), (b"x-one", b"v w"), (b"content-length", b"12")]
    assert (head.http_version, head.keep_alive, head.content_length, head.expects_continue) == ("1.1", True, 12, False)


@pytest.mark.parametrize(
    ("more", "keep_alive", "content_length", "expects_continue"),
    [
        (b"", True, 0, False),
        (b"Connection: close\r\n", False, 0, False),
        (b"Connection: keep-alive, Close\r\n", False, 0, False),
        (b"Transfer-Encoding: Chunked\r\n", True, None, False),
        (b"Content-Length: 0\r\n", True, 0, False),
        (b"Content-Length: 7\r\nExpect: 100-Continue\r\nAccept: */*\r\n", True, 7, True),
        (b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nContent-Length: 7\r\n", True, 7, False),
        (b"Connection: Upgrade\r\nUpgrade: websocket\r\n", True, 0, False),
    ],
)
def test_framing_and_persistence_follow_the_headers(
    more: bytes, keep_alive: bool, content_length: int | None, expects_continue: bool
) -> None:
    head = parse_head(GET + more + b"\r\n")
    assert (head.keep_alive, head.content_length, head.expects_continue) == (
        keep_alive,
        content_length,
        expects_continue,
    )


def test_http_1_0_needs_no_host_and_is_not_kept() -> None:
    head = parse_head(b"GET /x HTTP/1.0\r\nConnection: keep-alive\r\n\r\n")
    assert (head.http_version, head.keep_alive) == ("1.0", False)


@pytest.mark.parametrize(
    ("target", "path", "query"),
    [
        (b"/", "/", b""),
        (b"//a/../b", "//a/../b", b""),
        (b"/%2e%2e/%ff", "/../\ufffd", b""),
        (b"http://elsewhere:1/v1/models?x", "/v1/models", b"x"),
        (b"http://elsewhere", "/", b""),
        (b"*", "*", b""),
    ],
)
def test_target_gives_path_and_query_and_never_a_host(target: bytes, path: str, query: bytes) -> None:
    head = parse_head(b"OPTIONS " + target + b" HTTP/1.1\r\nHost: t\r\n\r\n")
    assert (head.path, head.query) == (path, query)


@pytest.mark.parametrize(
    "more",
    [
        b"Content-Length: 2\r\nContent-Length: 2\r\n",
        b"Content-Length: 2\r\nContent-Length: 3\r\n",
        b"Content-Length: 2, 2\r\n",
        b"Content-Length: +2\r\n",
        b"Content-Length: -2\r\n",
        b"Content-Length: 0x2\r\n",
        b"Content-Length: 2_0\r\n",
        b"Content-Length: \xb2\r\n",
        b"Content-Length:\r\n",
        b"Content-Length: 1000000000000000000\r\n",
        b"Content-Length: 99999999999999999999999999\r\n",
        b"Content-Length: 2\r\nTransfer-Encoding: chunked\r\n",
        b"Transfer-Encoding: chunked\r\nContent-Length: 2\r\n",
        b"Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n",
        b"Transfer-Encoding: chunked\r\nTransfer-Encoding: identity\r\n",
        b"Transfer-Encoding: chunked, identity\r\n",
        b"Transfer-Encoding: xchunked\r\n",
        b"Transfer-Encoding: gzip\r\n",
        b"Transfer-Encoding : chunked\r\n",
        b"Transfer-Encoding:\x0bchunked\r\n",
        b"Host: u\r\n",
        b"X: a\r\n b\r\n",
        b" X: a\r\n",
        b"X : a\r\n",
        b"X\r\n",
        b": a\r\n",
        b"X: a\x00b\r\n",
        b"X: a\x01b\r\n",
        b"X: a\nY: b\r\n",
        b"X: a\rY: b\r\n",
        b"X\xff: a\r\n",
    ],
    ids=repr,
)
def test_ambiguous_or_broken_header_is_a_400(more: bytes) -> None:
    assert status_of(GET + more) == 400


@pytest.mark.parametrize(
    ("head", "status"),
    [
        (LINE, 400),
        (b"GET /x#y HTTP/1.1\r\n" + HOST, 400),
        (b"GET x HTTP/1.1\r\n" + HOST, 400),
        (b"GET /\xff HTTP/1.1\r\n" + HOST, 400),
        (b"GET /x HTTP/1.1\n" + HOST, 400),
        (b"GET /x HTTP/1.1 \r\n" + HOST, 400),
        (b"GET /x HTTP/1.2\r\n" + HOST, 400),
        (b"GET /x\r\n", 505),
        (b"GET /x HTTP/2.0\r\n" + HOST, 505),
        (b"PRI * HTTP/2.0\r\n", 505),
        (b"FOO /x HTTP/1.1\r\n" + HOST, 501),
        (b"get /x HTTP/1.1\r\n" + HOST, 501),
        (b"CONNECT t:80 HTTP/1.1\r\n" + HOST, 501),
        (b"POST /x HTTP/1.0\r\nTransfer-Encoding: chunked\r\n", 400),
        (b"GET /" + b"x" * MAX_TARGET_BYTES + b" HTTP/1.1\r\n" + HOST, 414),
        (GET + b"X: y\r\n" * MAX_HEADERS, 431),
        (GET + b"Transfer-Encoding: gzip, chunked\r\n", 501),
    ],
    ids=lambda value: repr(value)[:60],
)
def test_what_is_not_served_has_a_status_of_its_own(head: bytes, status: int) -> None:
    assert status_of(head) == status


def test_too_many_headers_are_refused_by_a_code() -> None:
    with pytest.raises(ApiError) as caught:
        parse_head(GET + b"X: y\r\n" * MAX_HEADERS + b"\r\n")
    assert (caught.value.status, caught.value.code) == (431, "headers_too_large")


def test_half_a_head_is_a_400() -> None:
    with pytest.raises(ApiError, match="head is incomplete") as caught:
        parse_head(GET)
    assert caught.value.status == 400


def test_bytes_after_the_head_are_not_taken_for_another_request() -> None:
    with pytest.raises(ApiError):
        parse_head(GET + b"\r\n" + GET + b"\r\n")
