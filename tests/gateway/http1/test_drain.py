"""What clients on kept connections see of a drain: an answer that says it is the last, or a closed idle connection."""

from __future__ import annotations

import asyncio

from gateway.http1.exchange import Exchange
from tests.gateway.http1.raw_server import (
    MAX_BODY_BYTES,
    REQUEST,
    connected,
    echo,
    read_chunked,
    read_head,
    read_whole,
    served,
)
from tests.gateway.wire_worker import until

LONG_S = 60.0


async def test_request_on_a_kept_connection_is_answered_for_the_last_time() -> None:
    async with served(echo) as server, connected(server) as (reader, writer):
        writer.write(REQUEST)
        assert await read_whole(reader) == (200, b"hi")
        draining = asyncio.create_task(server.server.drain(LONG_S))
        await until(lambda: server.server.table.is_draining)
        writer.write(REQUEST)
        status, headers = await read_head(reader)
        assert (status, headers["connection"]) == (200, "close")
        assert await reader.read() == b"hi"
        await asyncio.wait_for(draining, 10)


async def test_request_after_an_answer_that_began_before_the_drain_is_served() -> None:
    go_on = asyncio.Event()

    async def stream(exchange: Exchange) -> None:
        await exchange.read_body(MAX_BODY_BYTES)
        exchange.start(200, [])
        exchange.write(b"a")
        await go_on.wait()
        exchange.finish(b"b")

    async with served(stream) as server, connected(server) as (reader, writer):
        writer.write(REQUEST)
        assert "connection" not in (await read_head(reader))[1]
        draining = asyncio.create_task(server.server.drain(LONG_S))
        await until(lambda: server.server.table.is_draining)
        go_on.set()
        assert await read_chunked(reader) == b"ab"
        writer.write(REQUEST)
        assert (await read_head(reader))[1]["connection"] == "close"
        assert await read_chunked(reader) == b"ab"
        assert await reader.read() == b""
        await asyncio.wait_for(draining, 10)


async def test_idle_connections_do_not_hold_up_a_drain_for_long() -> None:
    async with served(echo) as server, connected(server) as (idle, _), connected(server) as (reader, writer):
        writer.write(REQUEST)
        assert await read_whole(reader) == (200, b"hi")
        await until(lambda: len(server.connections) == 2)
        await asyncio.wait_for(server.server.drain(LONG_S), LONG_S / 6)
        assert await idle.read() == await reader.read() == b""
