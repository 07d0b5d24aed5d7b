"""A TCP proxy in this event loop that delays what a server answers, as an overloaded one would."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable


class SlowProxy:
    """Use as `async with`. Bytes from clients pass at once; each read from the server waits `delay_s()` first.

    Attributes:
        url: Where to connect instead.
        delay_s: May be changed at any time.
    """

    def __init__(self, host: str, port: int, delay_s: Callable[[], float]) -> None:
        self._target = (host, port)
        self._pumps: set[asyncio.Task[None]] = set()
        self._writers: list[asyncio.StreamWriter] = []
        self.delay_s = delay_s
        self.port = 0

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}"

    async def __aenter__(self) -> SlowProxy:
        self._server = await asyncio.start_server(self._connect, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        for pump in self._pumps:
            pump.cancel()
        await asyncio.gather(*self._pumps, return_exceptions=True)
        for writer in self._writers:
            writer.transport.abort()
        await self._server.wait_closed()

    async def _connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        server_reader, server_writer = await asyncio.open_connection(*self._target)
        self._writers += [writer, server_writer]
        for pump in (self._pump(reader, server_writer, False), self._pump(server_reader, writer, True)):
            task = asyncio.create_task(pump)
            self._pumps.add(task)
            task.add_done_callback(self._pumps.discard)

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, is_slow: bool) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(65536):
                if is_slow:
                    await asyncio.sleep(self.delay_s())
                writer.write(data)
        writer.close()
