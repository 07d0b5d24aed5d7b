"""A TCP proxy between two parts that fails on command: partition, cut, slow, and half-open connections.

Runs on the scenario's event loop. Bytes are passed on as they come, or stay where they are: none is lost, changed or
reordered, because TCP would not do that either.
"""

from __future__ import annotations

import asyncio
from enum import Enum

_CHUNK_BYTES = 65536


class LinkState(Enum):
    """What happens to the bytes of a link.

    `PARTITIONED` keeps all bytes back and leaves connections open. `HALF_OPEN` keeps back only what the server says.
    `CUT` closes connections and refuses new ones. `SLOW` delays each piece by `delay_s`.
    """

    WHOLE = "whole"
    PARTITIONED = "partitioned"
    HALF_OPEN = "half-open"
    CUT = "cut"
    SLOW = "slow"


class FaultProxy:
    """One link to one server. Use `start` and `close`."""

    def __init__(self, target_port: int, delay_s: float = 0.05) -> None:
        """Pass connections on to a port of loopback; `delay_s` is how slow a slow link is."""
        self.port = 0
        self.state = LinkState.WHOLE
        self._target_port = target_port
        self._delay_s = delay_s
        self._changed = asyncio.Event()
        self._server: asyncio.Server | None = None
        self._connections: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        """Listen on a free port of loopback."""
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", self.port)
        self.port = self._server.sockets[0].getsockname()[1]

    async def set(self, state: LinkState) -> None:
        """Change what happens to bytes from now on."""
        self.state = state
        self._changed.set()
        self._changed = asyncio.Event()
        if state is LinkState.CUT:
            await self._stop_listening()
            await self._drop_connections()
        elif self._server is None:
            await self.start()

    async def close(self) -> None:
        """Close everything."""
        await self._stop_listening()
        await self._drop_connections()

    async def _stop_listening(self) -> None:
        if self._server is not None:
            self._server.close()
            self._server = None

    async def _drop_connections(self) -> None:
        for task in self._connections:
            task.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._connections.add(task)
        try:
            await self._serve(reader, writer)
        except (OSError, asyncio.CancelledError):
            return  # either side went away, or the link was cut
        finally:
            writer.transport.abort()
            self._connections.discard(task)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await self._until_open(is_reply=False)
        server_reader, server_writer = await asyncio.open_connection("127.0.0.1", self._target_port)
        directions = [
            asyncio.create_task(self._pass(reader, server_writer, is_reply=False)),
            asyncio.create_task(self._pass(server_reader, writer, is_reply=True)),
        ]
        try:
            await asyncio.gather(*directions)
        finally:
            for direction in directions:
                direction.cancel()
            server_writer.transport.abort()

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, is_reply: bool) -> None:
        while data := await reader.read(_CHUNK_BYTES):
            await self._until_open(is_reply)
            if self.state is LinkState.SLOW:
                await asyncio.sleep(self._delay_s)
            writer.write(data)
            await writer.drain()
        await self._until_open(is_reply)
        if not writer.is_closing():
            writer.write_eof()

    async def _until_open(self, is_reply: bool) -> None:
        while self.state is LinkState.PARTITIONED or (self.state is LinkState.HALF_OPEN and is_reply):
            await self._changed.wait()
