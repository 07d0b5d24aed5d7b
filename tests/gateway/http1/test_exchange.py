"""Answers: their heads, and pieces that must not be sent."""

from __future__ import annotations

import asyncio

import pytest

from gateway.http1.exchange import Exchange, head_bytes
from tests.gateway.http1.raw_server import REQUEST, connected, echo, read_chunked, read_head, read_whole, served


def test_head_has_a_status_line_and_one_line_for_each_header() -> None:
    assert head_bytes(404, [(b"x-a", b"b"), (b"x-c", b"")]) == b"HTTP/1.1 404 Not Found\r\nx-a: b\r\nx-c: \r\n\r\n"
    assert head_bytes(599, []) == b"HTTP/1.1 599 \r\n\r\n"


@pytest.mark.parametrize("value", [b"a\r\nset-cookie: b", b"a\nb", b"a\rb"])
def test_header_that_would_begin_another_line_is_refused(value: bytes) -> None:
    with pytest.raises(ValueError, match="line breaks"):
        head_bytes(200, [(b"x-request-id", value)])


async def test_compressed_body_is_refused_where_nothing_inflates_it() -> None:
    packed = REQUEST.replace(b"\r\n\r\n", b"\r\ncontent-encoding: gzip\r\n\r\n")
    async with served(echo) as server, connected(server) as (reader, writer):
        writer.write(packed)
        assert (await read_whole(reader))[0] == 415


@pytest.mark.parametrize("last", [b"end", b""])
async def test_empty_piece_and_pieces_after_the_end_are_not_sent(last: bytes) -> None:
    async def respond(exchange: Exchange) -> None:
        await exchange.read_body(100)
        exchange.start(200, [])
        for piece in (b"", b"one ", b"", b"two "):
            exchange.write(piece)
        exchange.finish(last)
        exchange.write(b"late")
        exchange.finish(b"late")

    async with served(respond) as server, connected(server) as (reader, writer):
        for _ in range(2):
            writer.write(REQUEST)
            assert (await read_head(reader))[0] == 200
            assert await read_chunked(reader) == b"one two " + last


async def test_connection_of_an_answer_that_was_cut_is_closed_behind_its_end() -> None:
    async def respond(exchange: Exchange) -> None:
        await exchange.read_body(100)
        assert (exchange.status, exchange.started, exchange.closed, exchange.disconnected) == (0, False, False, False)
        assert (exchange.paused_since, exchange.on_disconnect, exchange.on_writable) == (None, None, None)
        exchange.start(200, [])
        assert (exchange.status, exchange.started) == (200, True)
        exchange.write(b"one ")
        exchange.finish_and_close(b"end")

    async with served(respond) as server, connected(server) as (reader, writer), asyncio.timeout(10):
        writer.write(REQUEST)
        assert (await read_head(reader))[0] == 200
        assert await read_chunked(reader) == b"one end"
        assert await reader.read() == b""
