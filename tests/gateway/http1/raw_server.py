"""A server of the test's own process, with a small handler behind it, and connections to it."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from starlette.types import Receive, Scope, Send

from gateway.api.door import Door, Port, exchange_of
from gateway.http1.connection import Connection
from gateway.http1.connection_table import ConnectionLimits, ConnectionTable
from gateway.http1.exchange import Exchange
from gateway.http1.handlers import AsgiHandler, Handler
from gateway.http1.server import HttpServer
from gateway.metrics import GatewayMetrics
from tests.gateway.wire_worker import until

Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]

REQUEST = b"POST /x HTTP/1.1\r\nHost: t\r\nContent-Length: 2\r\n\r\nhi"
MAX_BODY_BYTES = 1 << 20
PORT = Port(GatewayMetrics(), lambda path: "")


class CountingServer(HttpServer):
    """A server that counts the bytes which its connections have received."""

    num_received = 0

    def _new_connection(self) -> Connection:
        return CountingConnection(self)


class CountingConnection(Connection):
    """One of its connections."""

    def __init__(self, server: CountingServer) -> None:
        super().__init__(server.table, server._runner, server._receive_buffer)
        self._server = server

    def buffer_updated(self, nbytes: int) -> None:
        super().buffer_updated(nbytes)
        self._server.num_received += nbytes


class Served:
    """A listening server. `pass_time` moves its connections' clock without waiting."""

    def __init__(self, server: CountingServer, port: int) -> None:
        self.server = server
        self.port = port

    async def has_received(self, num_bytes: int) -> None:
        """Wait until this many bytes have come, over all connections."""
        await until(lambda: self.server.num_received >= num_bytes)

    @property
    def connections(self) -> set[Connection]:
        return self.server.table.members

    def pass_time(self, seconds: float) -> None:
        now = asyncio.get_running_loop().time() + seconds
        for connection in list(self.connections):
            connection.expire(now)


def behind_door(handler: Handler) -> Handler:
    """Return a handler whose errors are told as in the gateway: by the door, which finds its exchange in the scope."""

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await handler(exchange_of(scope))

    return AsgiHandler(Door(app, PORT), MAX_BODY_BYTES)


@asynccontextmanager
async def served(
    handler: Handler,
    limits: ConnectionLimits | None = None,
    exempt_paths: frozenset[str] = frozenset(),
    on_sweep: Callable[[ConnectionTable[Connection]], None] = lambda table: None,
    tls: ssl.SSLContext | None = None,
    bound: socket.socket | None = None,
) -> AsyncIterator[Served]:
    bound = bound or socket.socket()
    bound.bind(("127.0.0.1", 0))
    handler = handler if isinstance(handler, AsgiHandler) else behind_door(handler)
    server = CountingServer(handler, limits or ConnectionLimits(), exempt_paths, on_sweep, tls=tls)
    await server.start(bound)
    try:
        yield Served(server, bound.getsockname()[1])
    finally:
        await server.close()


@asynccontextmanager
async def connected(served: Served) -> AsyncIterator[Streams]:
    reader, writer = await asyncio.open_connection("127.0.0.1", served.port)
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


async def read_whole(reader: asyncio.StreamReader) -> tuple[int, bytes]:
    status, headers = await read_head(reader)
    return status, await reader.readexactly(int(headers["content-length"]))


async def read_chunked(reader: asyncio.StreamReader) -> bytes:
    body = b""
    while size := int(await reader.readuntil(b"\r\n"), 16):
        body += await reader.readexactly(size)
        assert await reader.readexactly(2) == b"\r\n"
    assert await reader.readexactly(2) == b"\r\n"
    return body


async def stream_three(exchange: Exchange) -> None:
    """Stream the path in three pieces."""
    await exchange.read_body(MAX_BODY_BYTES)
    exchange.start(200, [(b"content-type", b"text/plain")])
    for number in range(3):
        exchange.write(b"%b-%d;" % (exchange.head.path.encode(), number))
        await asyncio.sleep(0.001)
    exchange.finish(b"end")


async def echo(exchange: Exchange) -> None:
    """Answer with the body."""
    exchange.respond(200, [], await exchange.read_body(MAX_BODY_BYTES))


async def never_read(exchange: Exchange) -> None:
    """Answer without reading the body."""
    exchange.respond(200, [], b"ok")
