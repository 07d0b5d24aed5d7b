"""Inputs for a fuzz test of the HTTP edge: requests that are valid, broken a little, or broken a lot, from a seed."""

from __future__ import annotations

import random
from collections.abc import Callable

from tests.gateway.gateway_process import API_KEY

_AUTH = f"Authorization: Bearer {API_KEY}\r\n".encode()
_BODY = b'{"model": "nobody-serves-this", "prompt": "a", "stream": true}'
_LENGTH = b"Content-Length: %d\r\n" % len(_BODY)

CORPUS = (
    b"GET /health/live HTTP/1.1\r\nHost: t\r\n\r\n",
    b"GET /v1/models?a=b HTTP/1.1\r\nHost: t\r\n" + _AUTH + b"\r\n",
    b"GET /v1/models HTTP/1.0\r\n\r\n",
    b"POST /v1/completions HTTP/1.1\r\nHost: t\r\n" + _AUTH + _LENGTH + b"\r\n" + _BODY,
    b"POST /v1/chat/completions HTTP/1.1\r\nHost: t\r\n" + _LENGTH + b"Expect: 100-continue\r\n\r\n" + _BODY,
    b"POST /v1/completions HTTP/1.1\r\nHost: t\r\n" + _AUTH + b"Transfer-Encoding: chunked\r\n\r\n"
    b'5;a=b\r\n{"mod\r\n%x\r\n%b\r\n0\r\nX-Trailer: y\r\n\r\n' % (len(_BODY) - 5, _BODY[5:]),
    b"POST /tokenize HTTP/1.1\r\nHost: t\r\n"
    + _AUTH
    + b"Connection: Upgrade\r\nUpgrade: h2c\r\n"
    + _LENGTH
    + b"\r\n"
    + _BODY,
    b"OPTIONS * HTTP/1.1\r\nHost: t\r\nConnection: close\r\n\r\n",
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
)

TOKENS = (
    b"\r\n",
    b"\n",
    b"\r",
    b"\0",
    b" ",
    b"\t",
    b":",
    b";",
    b",",
    b"0",
    b"-1",
    b"ffffffffffffffff",
    b"18446744073709551616",
    b"\xff\xfe",
    b"chunked",
    b"identity",
    b"close",
    b"Content-Length: 5\r\n",
    b"Content-Length: 0\r\n",
    b"Transfer-Encoding: chunked\r\n",
    b"Transfer-Encoding: gzip, chunked\r\n",
    b"Host: u\r\n",
    b" folded\r\n",
    b"X: " + b"y" * 9000 + b"\r\n",
    b"X: y\r\n" * 120,
    b"0\r\n\r\n",
    b"GET /smuggled HTTP/1.1\r\nHost: t\r\n\r\n",
    b"%00%2e%2e/",
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc",
)


def _insert(rng: random.Random, data: bytes) -> bytes:
    at = rng.randrange(len(data) + 1)
    return data[:at] + rng.choice(TOKENS) + data[at:]


def _insert_line(rng: random.Random, data: bytes) -> bytes:
    lines = data.split(b"\r\n")
    lines.insert(rng.randrange(len(lines) + 1), rng.choice(TOKENS).rstrip(b"\r\n"))
    return b"\r\n".join(lines)


def _delete(rng: random.Random, data: bytes) -> bytes:
    start = rng.randrange(len(data) + 1)
    return data[:start] + data[start + rng.choice((1, 1, 2, 5, 30)) :]


def _replace(rng: random.Random, data: bytes) -> bytes:
    start = rng.randrange(len(data) + 1)
    return data[:start] + rng.choice(TOKENS) + data[start + rng.randrange(10) :]


def _flip(rng: random.Random, data: bytes) -> bytes:
    if not data:
        return data
    flipped = bytearray(data)
    flipped[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    return bytes(flipped)


def _repeat(rng: random.Random, data: bytes) -> bytes:
    start = rng.randrange(len(data) + 1)
    return data[:start] + data[start : start + rng.randrange(1, 40)] * rng.randrange(2, 50) + data[start:]


def _truncate(rng: random.Random, data: bytes) -> bytes:
    return data[: rng.randrange(len(data) + 1)]


def _follow(rng: random.Random, data: bytes) -> bytes:
    return data + rng.choice(CORPUS)


def _noise(rng: random.Random, data: bytes) -> bytes:
    return data + rng.randbytes(rng.randrange(1, 200))


_MUTATIONS: tuple[Callable[[random.Random, bytes], bytes], ...] = (
    _insert,
    _insert_line,
    _delete,
    _replace,
    _flip,
    _repeat,
    _truncate,
    _follow,
    _noise,
)


def fuzz_input(rng: random.Random) -> list[bytes]:
    """Return what to send on one connection, in the pieces in which to send it."""
    data = rng.choice(CORPUS)
    for _ in range(rng.choice((0, 1, 1, 1, 2, 3, 6))):
        data = rng.choice(_MUTATIONS)(rng, data)
    cuts = sorted(rng.randrange(len(data) + 1) for _ in range(rng.choice((0, 0, 1, 3))))
    return [data[start:end] for start, end in zip([0, *cuts], [*cuts, len(data)], strict=True)]
