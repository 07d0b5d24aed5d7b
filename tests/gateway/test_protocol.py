"""The HTTP protocol class with small applications behind it, spoken to over raw sockets."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
import uvicorn
from uvicorn.server import ServerState

from gateway.exchange import EXTENSION, Exchange
from gateway.protocol import MAX_HEAD_BYTES, GatewayProtocol

App = Callable[[dict[str, Any], Any, Any], Awaitable[None]]
Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]

REQUEST = b"POST /x HTTP/1.1\r\nHost: t\r\nContent-Length: 2\r\n\r\nhi"


class Served:
    """A listening server; `connections` are its live protocols."""

    def __init__(self, app: App) -> None:
        config = uvicorn.Config(app, http=GatewayProtocol, ws="none", lifespan="off", log_config=None)
        config.load()
        self.state = ServerState()
        self._make = lambda: GatewayProtocol(config=config, server_state=self.state, app_state={})
        self.server: asyncio.Server

    async def listen(self) -> None:
        self.server = await asyncio.get_running_loop().create_server(self._make, "127.0.0.1", 0)

    @property
    def port(self) -> int:
        return int(self.server.sockets[0].getsockname()[1])

    @property
    def connections(self) -> list[GatewayProtocol]:
        return [c for c in self.state.connections if isinstance(c, GatewayProtocol)]


@asynccontextmanager
async def served(app: App) -> AsyncIterator[Served]:
    server = Served(app)
    await server.listen()
    try:
        yield server
    finally:
        for connection in server.connections:
            connection.transport.abort()
        for task in list(server.state.tasks):
            task.cancel()
        await asyncio.gather(*server.state.tasks, return_exceptions=True)
        server.server.close()
        await server.server.wait_closed()


@asynccontextmanager
async def connected(server: Served) -> AsyncIterator[Connection]:
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    try:
        yield reader, writer
    finally:
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()


async def read_head(reader: asyncio.StreamReader) -> tuple[int, dict[str, str]]:
    lines = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
    headers = dict(line.split(": ", 1) for line in lines[1:] if line)
    return int(lines[0].split()[1]), headers


async def read_chunked(reader: asyncio.StreamReader) -> bytes:
    body = b""
    while size := int(await reader.readuntil(b"\r\n"), 16):
        body += await reader.readexactly(size)
        assert await reader.readexactly(2) == b"\r\n"
    assert await reader.readexactly(2) == b"\r\n"
    return body


async def flood(writer: asyncio.StreamWriter, num_bytes: int) -> None:
    for _ in range(0, num_bytes, 1 << 20):
        writer.write(b"x" * (1 << 20))
        await writer.drain()


async def drain_body(receive: Any) -> bytes:
    body = b""
    while True:
        event = await receive()
        body += event.get("body", b"")
        if not event.get("more_body", False):
            return body


async def stream_three(scope: dict[str, Any], receive: Any, send: Any) -> None:
    """Stream the path in three pieces."""
    await drain_body(receive)
    exchange: Exchange = scope["extensions"][EXTENSION]
    exchange.start(200, [(b"content-type", b"text/plain")])
    for number in range(3):
        exchange.write(b"%b-%d;" % (scope["path"].encode(), number))
        await asyncio.sleep(0.001)
    exchange.finish(b"end")


async def test_accepted_connection_has_no_delay() -> None:
    async with served(stream_three) as server, connected(server) as (_, _writer):
        await asyncio.sleep(0.05)
        [connection] = server.connections
        accepted = connection.transport.get_extra_info("socket")
        assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) == 1


async def test_head_leaves_with_the_first_bytes() -> None:
    async with served(stream_three) as server, connected(server) as (reader, writer):
        writer.write(REQUEST)
        first = await reader.read(65536)
        assert b"\r\n\r\n5\r\n/x-0;\r\n" in first


async def test_connection_serves_the_next_request_after_a_stream() -> None:
    async with served(stream_three) as server, connected(server) as (reader, writer):
        for _ in range(3):
            writer.write(REQUEST)
            status, headers = await read_head(reader)
            assert (status, headers["transfer-encoding"]) == (200, "chunked")
            assert await read_chunked(reader) == b"/x-0;/x-1;/x-2;end"


async def test_pipelined_requests_are_answered_one_after_the_other() -> None:
    async with served(stream_three) as server, connected(server) as (reader, writer):
        writer.write(REQUEST + REQUEST.replace(b"/x", b"/y") + REQUEST.replace(b"/x", b"/z"))
        for name in (b"/x", b"/y", b"/z"):
            await read_head(reader)
            assert await read_chunked(reader) == b"".join(b"%b-%d;" % (name, i) for i in range(3)) + b"end"


async def test_pipelined_request_behind_asgi_route_gets_its_own_answer() -> None:
    async def both(scope: dict[str, Any], receive: Any, send: Any) -> None:
        if scope["path"] == "/x":
            await drain_body(receive)
            await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
            await send({"type": "http.response.body", "body": b"ok"})
        else:
            await stream_three(scope, receive, send)

    async with served(both) as server, connected(server) as (reader, writer):
        writer.write(REQUEST + REQUEST.replace(b"/x", b"/y"))
        await read_head(reader)
        assert await reader.readexactly(2) == b"ok"
        await read_head(reader)
        assert await read_chunked(reader) == b"/y-0;/y-1;/y-2;end"


async def test_http_1_0_stream_ends_with_the_connection() -> None:
    async with served(stream_three) as server, connected(server) as (reader, writer):
        writer.write(REQUEST.replace(b"HTTP/1.1", b"HTTP/1.0"))
        status, headers = await read_head(reader)
        assert "transfer-encoding" not in headers
        assert headers["connection"] == "close"
        assert (status, await reader.read()) == (200, b"/x-0;/x-1;/x-2;end")


async def test_whole_response_has_its_length() -> None:
    async def whole(scope: dict[str, Any], receive: Any, send: Any) -> None:
        await drain_body(receive)
        scope["extensions"][EXTENSION].respond(201, [(b"x-a", b"b")], b"abc")

    async with served(whole) as server, connected(server) as (reader, writer):
        for _ in range(2):
            writer.write(REQUEST)
            status, headers = await read_head(reader)
            assert (status, headers["content-length"], headers["x-a"]) == (201, "3", "b")
            assert await reader.readexactly(3) == b"abc"


async def test_client_that_leaves_is_noticed_in_mid_stream() -> None:
    gone = asyncio.Event()

    async def hang(scope: dict[str, Any], receive: Any, send: Any) -> None:
        exchange: Exchange = scope["extensions"][EXTENSION]
        exchange.on_disconnect = gone.set
        exchange.start(200, [])
        exchange.write(b"x")
        await gone.wait()
        exchange.write(b"into the void")
        exchange.finish()

    async with served(hang) as server, connected(server) as (reader, writer):
        writer.write(REQUEST)
        await read_head(reader)
        writer.transport.abort()
        async with asyncio.timeout(1):
            await gone.wait()


async def test_reader_that_stops_pauses_its_exchange_and_resumes_it() -> None:
    paused, done = asyncio.Event(), asyncio.Event()

    async def overflow(scope: dict[str, Any], receive: Any, send: Any) -> None:
        await drain_body(receive)
        exchange: Exchange = scope["extensions"][EXTENSION]
        resumed = asyncio.Event()
        exchange.on_writable = resumed.set
        exchange.start(200, [])
        while exchange.paused_since is None:
            exchange.write(b"x" * 65536)
        paused.set()
        await resumed.wait()
        assert exchange.paused_since is None
        exchange.finish(b"end")
        done.set()

    async with served(overflow) as server, connected(server) as (reader, writer):
        writer.write(REQUEST)
        await paused.wait()
        await read_head(reader)
        async with asyncio.timeout(5):
            body = await read_chunked(reader)
            await done.wait()
        assert body.endswith(b"xend")


@pytest.mark.parametrize(
    "head",
    [
        b"GET /x HTTP/1.1\r\nHost: t\r\nX-Big: " + b"a" * MAX_HEAD_BYTES + b"\r\n\r\n",
        b"GET /" + b"a" * MAX_HEAD_BYTES + b" HTTP/1.1\r\nHost: t\r\n\r\n",
        b"GET /x HTTP/1.1\r\nHost: t\r\n" + b"".join(b"X-%d: v\r\n" % i for i in range(8000)) + b"\r\n",
        b"GET /x HTTP/1.1\r\nHost: t\r\nX-Endless: " + b"a" * (4 * MAX_HEAD_BYTES),
    ],
    ids=["one header", "url", "many headers", "no end"],
)
async def test_head_that_is_too_large_gets_a_431(head: bytes) -> None:
    async with served(stream_three) as server, connected(server) as (reader, writer):
        for start in range(0, len(head), 16384):
            writer.write(head[start : start + 16384])
            await asyncio.sleep(0)
        status, _ = await read_head(reader)
        error = json.loads(await reader.read())["error"]
        assert (status, error["code"]) == (431, "headers_too_large")
        assert set(error) == {"message", "type", "param", "code"}


async def test_head_just_below_the_limit_is_served() -> None:
    async with served(stream_three) as server, connected(server) as (reader, writer):
        writer.write(REQUEST.replace(b"Host: t", b"Host: t\r\nX-Big: " + b"a" * (MAX_HEAD_BYTES - 200)))
        assert (await read_head(reader))[0] == 200


async def test_bytes_that_are_not_http_get_a_400_in_four_keys() -> None:
    async with served(stream_three) as server, connected(server) as (reader, writer):
        writer.write(b"\x16\x03\x01 hello\r\n\r\n")
        status, _ = await read_head(reader)
        error = json.loads(await reader.read())["error"]
        assert (status, set(error)) == (400, {"message", "type", "param", "code"})


async def test_body_that_goes_on_after_the_answer_is_cut() -> None:
    async def refuse(scope: dict[str, Any], receive: Any, send: Any) -> None:
        scope["extensions"][EXTENSION].respond(413, [], b"no")

    async with served(refuse) as server, connected(server) as (reader, writer):
        writer.write(b"POST /x HTTP/1.1\r\nHost: t\r\nContent-Length: 1000000000\r\n\r\n")
        assert (await read_head(reader))[0] == 413
        with pytest.raises(ConnectionError):
            await flood(writer, 1000 << 20)


async def test_closing_header_closes_after_the_stream() -> None:
    async with served(stream_three) as server, connected(server) as (reader, writer):
        writer.write(REQUEST.replace(b"Host: t", b"Host: t\r\nConnection: close"))
        _, headers = await read_head(reader)
        assert headers["connection"] == "close"
        assert await read_chunked(reader) == b"/x-0;/x-1;/x-2;end"
        assert await reader.read() == b""
