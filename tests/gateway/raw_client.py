"""A bare HTTP/1.1 client for tests that care about bytes, packets and connections."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from tests.gateway.gateway_process import API_KEY, GatewayProcess


class RawClient:
    """One connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, key: str = API_KEY) -> None:
        self.reader = reader
        self.writer = writer
        self.key = key

    def post(self, path: str, body: dict[str, Any], *headers: str) -> None:
        """Send a request."""
        self.post_bytes(path, json.dumps(body).encode(), *headers)

    def post_bytes(self, path: str, payload: bytes, *headers: str) -> None:
        """Send a request with this body as it is."""
        lines = [f"POST {path} HTTP/1.1", "Host: t", f"Authorization: Bearer {self.key}", *headers]
        self.writer.write(
            "\r\n".join([*lines, f"Content-Length: {len(payload)}", "", ""]).encode() + payload,
        )

    async def head(self) -> tuple[int, dict[str, str]]:
        """Read a response's head."""
        lines = (await self.reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
        return int(lines[0].split()[1]), dict(line.split(": ", 1) for line in lines[1:] if line)

    async def events(self) -> AsyncIterator[str]:
        """Yield the events of a chunked stream, to its end."""
        pending = b""
        while size := int(await self.reader.readuntil(b"\r\n"), 16):
            pending += await self.reader.readexactly(size)
            await self.reader.readexactly(2)
            *complete, pending = pending.split(b"\n\n")
            for event in complete:
                yield event.decode()
        await self.reader.readexactly(2)
        assert pending == b""

    async def stream(self) -> list[dict[str, Any]]:
        """Read a stream to its `[DONE]`, and return its objects."""
        events = [event async for event in self.events()]
        assert events[-1] == "data: [DONE]"
        return [json.loads(event.removeprefix("data: ")) for event in events[:-1] if not event.startswith(":")]

    async def whole(self) -> tuple[int, dict[str, Any]]:
        """Read a whole answer."""
        status, headers = await self.head()
        body = await self.reader.readexactly(int(headers["content-length"]))
        return status, json.loads(body)


@asynccontextmanager
async def connected(gateway: GatewayProcess, limit: int = 1 << 20, key: str = API_KEY) -> AsyncIterator[RawClient]:
    # The gateway's clock runs from the moment in which the connection stands: the kernel answers at once, and what is
    # written next goes out without a wait in which a busy machine could keep this process from running.
    connection = socket.create_connection(("127.0.0.1", gateway.port))
    reader, writer = await asyncio.open_connection(sock=connection, limit=limit)
    try:
        yield RawClient(reader, writer, key)
    finally:
        writer.transport.abort()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()
