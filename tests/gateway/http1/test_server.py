"""The end of a server, and its limits, as clients see them."""

from __future__ import annotations

import asyncio
import errno
import socket
import sys
from contextlib import AsyncExitStack
from functools import partial
from typing import Any

import pytest

from gateway.errors import ApiError
from gateway.http1.connection_table import MAX_EXTRA_CONNECTIONS, ConnectionLimits
from gateway.http1.exchange import Exchange
from gateway.metrics import GatewayMetrics
from gateway.process.assembly import count_connections
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

GET = b"GET /x HTTP/1.1\r\nHost: t\r\n\r\n"
HEALTH = b"GET /health HTTP/1.1\r\nHost: t\r\n\r\n"


class Gate:
    """A handler that waits until it is let through."""

    def __init__(self) -> None:
        self.num_waiting = 0
        self.is_open = asyncio.Event()

    async def __call__(self, exchange: Exchange) -> None:
        self.num_waiting += 1
        await self.is_open.wait()
        self.num_waiting -= 1
        exchange.respond(200, [], b"ok")


async def test_last_answer_on_a_draining_connection_says_close() -> None:
    gate = Gate()
    async with served(gate) as server, connected(server) as (reader, writer):
        writer.write(GET)
        await until(lambda: gate.num_waiting)
        draining = asyncio.create_task(server.server.drain(10))
        await asyncio.sleep(0)
        gate.is_open.set()
        status, headers = await read_head(reader)
        assert (status, headers["connection"], await reader.read()) == (200, "close", b"ok")
        async with asyncio.timeout(5):
            await draining


async def test_idle_connection_is_closed_when_the_drain_begins() -> None:
    gate = Gate()
    gate.is_open.set()
    async with served(gate) as server, connected(server) as (reader, writer), connected(server) as (_, busy):
        writer.write(GET)
        await read_whole(reader)
        gate.is_open.clear()
        busy.write(GET)
        await until(lambda: gate.num_waiting)
        draining = asyncio.create_task(server.server.drain(10))
        async with asyncio.timeout(5):
            assert await reader.read() == b""
        assert not draining.done()
        gate.is_open.set()
        await draining


async def test_first_request_that_was_on_its_way_when_the_drain_began_is_served() -> None:
    async with served(echo) as server, connected(server) as (reader, writer):
        await until(lambda: server.connections)
        draining = asyncio.create_task(server.server.drain(10))
        await until(lambda: server.server.table.is_draining)
        writer.write(REQUEST)
        status, headers = await read_head(reader)
        assert (status, headers["connection"], await reader.read()) == (200, "close", b"hi")
        await draining


async def test_drain_that_takes_too_long_cuts_what_runs() -> None:
    cuts: list[Exchange] = []
    running: list[Exchange] = []

    async def hang(exchange: Exchange) -> None:
        running.append(exchange)
        exchange.start(200, [])
        exchange.write(b"a")
        await asyncio.sleep(60)

    def cut() -> None:
        cuts.extend(running)
        for exchange in running:
            exchange.finish_and_close(b"cut")

    async with served(hang) as server, connected(server) as (reader, writer):
        writer.write(GET)
        await read_head(reader)
        await server.server.drain(0.1, cut)
        assert (await read_chunked(reader), len(cuts)) == (b"acut", 1)


async def test_all_connections_busy_leaves_room_for_health_alone() -> None:
    gate = Gate()

    async def handle(exchange: Exchange) -> None:
        if exchange.head.path == "/health":
            exchange.respond(200, [], b"live")
        else:
            await gate(exchange)

    limits = ConnectionLimits(max_connections=3)
    async with served(handle, limits, frozenset({"/health"})) as server, AsyncExitStack() as stack:
        busy = [await stack.enter_async_context(connected(server)) for _ in range(3)]
        for _, writer in busy:
            writer.write(GET)
        await until(lambda: gate.num_waiting == 3)
        for request, status in ((HEALTH, 200), (GET, 503), (HEALTH, 200)):
            async with connected(server) as (reader, writer):
                writer.write(request + request)
                head = await read_head(reader)
                assert (head[0], head[1]["connection"]) == (status, "close")
                assert await reader.read()
        gate.is_open.set()
        for reader, _ in busy:
            assert await read_whole(reader) == (200, b"ok")


@pytest.mark.parametrize(("fails_with", "status"), [(ApiError(418, "no"), 418), (ValueError("broken"), 500)])
async def test_error_that_no_endpoint_has_told_carries_the_clients_own_id(fails_with: Exception, status: int) -> None:
    async def fail(exchange: Exchange) -> None:
        raise fails_with

    async with served(fail) as server, connected(server) as (reader, writer):
        writer.write(b"GET /a HTTP/1.1\r\nHost: t\r\nX-Request-Id: mine\r\n\r\n")
        head = await read_head(reader)
        assert (head[0], head[1]["x-request-id"]) == (status, "mine")


async def test_connection_is_one_too_many_for_one_answer_alone_with_its_own_id() -> None:
    limits = ConnectionLimits(max_per_address=1)
    async with served(echo, limits) as server, connected(server) as (first, writer):
        writer.write(REQUEST)
        assert await read_whole(first) == (200, b"hi")
        async with connected(server) as (second, extra):
            extra.write(b"GET /a HTTP/1.1\r\nHost: t\r\nX-Request-Id: mine\r\n\r\n")
            status, headers = await read_head(second)
            assert (status, headers["x-request-id"]) == (503, "mine")
        writer.write(REQUEST)
        assert await read_whole(first) == (200, b"hi")


@pytest.mark.skipif(sys.platform != "linux", reason="other systems have one loopback address")
async def test_addresses_are_told_apart() -> None:
    limits = ConnectionLimits(max_per_address=1)
    async with served(echo, limits) as server, connected(server) as (first, writer):
        reader, other = await asyncio.open_connection("127.0.0.1", server.port, local_addr=("127.0.0.2", 0))
        for stream, sender in ((first, writer), (reader, other)):
            sender.write(REQUEST)
            assert await read_whole(stream) == (200, b"hi")
        other.close()


async def test_connections_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    # They have had their time to send a request at once.
    monkeypatch.setattr("gateway.http1.connection_table.MIN_WAIT_S", 0.0)
    metrics = GatewayMetrics()
    limits = ConnectionLimits(max_connections=2)
    async with served(echo, limits, on_sweep=partial(count_connections, metrics)) as server, AsyncExitStack() as stack:
        for _ in range(2):
            await stack.enter_async_context(connected(server))
        for _ in range(2):
            await stack.enter_async_context(connected(server))
        await until(lambda: metrics.connections == 2 and metrics.connections_evicted == 2)
        assert metrics.connections_limited == 0


async def test_burst_beyond_every_limit_is_answered_whole() -> None:
    gate, limits = Gate(), ConnectionLimits(max_connections=2)
    async with served(gate, limits) as server, AsyncExitStack() as stack:
        streams = [await stack.enter_async_context(connected(server)) for _ in range(2 + 2 * MAX_EXTRA_CONNECTIONS)]
        for _, writer in streams:
            writer.write(GET)

        async def answer(reader: asyncio.StreamReader) -> int:
            return (await read_whole(reader))[0]

        answers = [asyncio.create_task(answer(reader)) for reader, _ in streams]
        await until(lambda: sum(task.done() for task in answers) == len(answers) - 2)
        gate.is_open.set()
        statuses = await asyncio.gather(*answers)
        assert sorted(statuses) == [200] * 2 + [503] * 2 * MAX_EXTRA_CONNECTIONS


class ExhaustedSocket(socket.socket):
    """A listening socket of a process that has no file descriptor free for a while."""

    num_refusals = 3

    def accept(self) -> Any:
        if self.num_refusals:
            self.num_refusals -= 1
            raise OSError(errno.EMFILE, "Too many open files")
        return super().accept()


async def test_client_waits_while_no_file_is_free(caplog: pytest.LogCaptureFixture) -> None:
    async with served(echo, bound=ExhaustedSocket()) as server, connected(server) as (reader, writer):
        writer.write(REQUEST)
        assert await read_whole(reader) == (200, b"hi")
    assert caplog.text.count("raise the limit of open files") == 1


async def test_drain_stops_accepting_at_once() -> None:
    gate = Gate()
    async with served(gate) as server, connected(server) as (_, writer):
        writer.write(GET)
        await until(lambda: gate.num_waiting)
        draining = asyncio.create_task(server.server.drain(10))
        await until(lambda: server.server.table.is_draining)
        with pytest.raises(ConnectionRefusedError):
            await asyncio.open_connection("127.0.0.1", server.port)
        gate.is_open.set()
        await draining


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


@pytest.mark.parametrize("is_pipelined", [False, True])
async def test_request_after_an_answer_that_began_before_the_drain_is_served(is_pipelined: bool) -> None:
    go_on = asyncio.Event()

    async def stream(exchange: Exchange) -> None:
        await exchange.read_body(MAX_BODY_BYTES)
        exchange.start(200, [])
        exchange.write(b"a")
        await go_on.wait()
        exchange.finish(b"b")

    async with served(stream) as server, connected(server) as (reader, writer):
        writer.write(REQUEST * (1 + is_pipelined))
        assert "connection" not in (await read_head(reader))[1]
        draining = asyncio.create_task(server.server.drain(LONG_S))
        await until(lambda: server.server.table.is_draining)
        go_on.set()
        assert await read_chunked(reader) == b"ab"
        writer.write(REQUEST * (not is_pipelined))
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
