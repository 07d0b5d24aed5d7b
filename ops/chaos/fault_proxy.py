"""A TCP proxy between two parts that fails on command: partition, one way only, cut, slow and narrow.

Runs on the scenario's event loop. Bytes are passed on as they come, or stay where they are: none is lost, changed or
reordered, because TCP would not do that either.
"""

from __future__ import annotations

import asyncio
import socket
from enum import Enum

_CHUNK_BYTES = 65536
# What a narrow link has on its way is about what a modem or a router keeps. Over loopback the kernel's buffers are made
# for segments of 64 KB, and hold what takes minutes at this rate.
_SEGMENT_BYTES = 1460
_BUFFER_BYTES = 16384


class LinkState(Enum):
    """What happens to the bytes of a link.

    `PARTITIONED` keeps all bytes back and leaves connections open. `HALF_OPEN` keeps back only the server's bytes,
    `MUTE` only the client's. `CUT` closes connections and refuses new ones. `SLOW` delays each piece by `delay_s`,
    `NARROW` passes `bytes_per_s` in each direction.
    """

    WHOLE = "whole"
    PARTITIONED = "partitioned"
    HALF_OPEN = "half-open"
    MUTE = "mute"
    CUT = "cut"
    SLOW = "slow"
    NARROW = "narrow"


class FaultProxy:
    """One link to one server. Use `start` and `close`."""

    def __init__(self, target_port: int, delay_s: float = 0.05, bytes_per_s: float | None = None) -> None:
        """Pass connections on to a port of loopback; only a proxy with `bytes_per_s` can be narrow."""
        self.port = 0
        self.state = LinkState.WHOLE
        self._target_port = target_port
        self._delay_s = delay_s
        self._bytes_per_s = bytes_per_s
        self._piece_bytes = _CHUNK_BYTES if bytes_per_s is None else _SEGMENT_BYTES
        self._buffer_bytes = _CHUNK_BYTES if bytes_per_s is None else _BUFFER_BYTES
        self._changed = asyncio.Event()
        self._server: asyncio.Server | None = None
        self._connections: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        """Listen on a free port of loopback."""
        listener = self._new_socket()
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("127.0.0.1", self.port))
        self._server = await asyncio.start_server(self._accept, sock=listener, limit=self._buffer_bytes)
        self.port = listener.getsockname()[1]

    async def set(self, state: LinkState) -> None:
        """Change what happens to bytes from now on."""
        assert state is not LinkState.NARROW or self._bytes_per_s is not None
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

    def _new_socket(self) -> socket.socket:
        """Return a socket that keeps little if this link may be narrow; it tells its peer to send small segments."""
        new = socket.socket()
        new.setblocking(False)
        if self._bytes_per_s is not None:
            new.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _BUFFER_BYTES)
            new.setsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG, _SEGMENT_BYTES)
        return new

    async def _connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        connecting = self._new_socket()
        try:
            await asyncio.get_running_loop().sock_connect(connecting, ("127.0.0.1", self._target_port))
        except BaseException:
            connecting.close()
            raise
        return await asyncio.open_connection(sock=connecting, limit=self._buffer_bytes)

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
        server_reader, server_writer = await self._connect()
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
        loop = asyncio.get_running_loop()
        passed_at = 0.0
        while data := await reader.read(self._piece_bytes):
            await self._until_open(is_reply)
            if self.state is LinkState.SLOW:
                await asyncio.sleep(self._delay_s)
            elif self.state is LinkState.NARROW and self._bytes_per_s is not None:
                passed_at = max(passed_at, loop.time()) + len(data) / self._bytes_per_s
                await asyncio.sleep(passed_at - loop.time())
            if writer.is_closing():
                return  # whom it was for went away meanwhile
            writer.write(data)
            await writer.drain()
        await self._until_open(is_reply)
        if not writer.is_closing():
            writer.write_eof()

    async def _until_open(self, is_reply: bool) -> None:
        closed = (LinkState.PARTITIONED, LinkState.HALF_OPEN if is_reply else LinkState.MUTE)
        while self.state in closed:
            await self._changed.wait()
