from __future__ import annotations

import asyncio

from ops.load_generator.connection import Address
from ops.load_generator.rounds import Samples, count_streams


async def refuse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Refuse one request and keep the connection open, as gateways do that shed load."""
    await reader.readuntil(b"\r\n\r\n")
    writer.write(b"HTTP/1.1 503 Service Unavailable\r\nRetry-After: 1\r\nContent-Length: 2\r\n\r\n{}")
    await reader.read()
    writer.close()


async def test_refused_request_is_a_failure_and_not_waited_for() -> None:
    async with await asyncio.start_server(refuse, "127.0.0.1", 0) as server, asyncio.timeout(10):
        port: int = server.sockets[0].getsockname()[1]
        address = Address("127.0.0.1", port, "demo")
        samples: Samples = await count_streams(address, [address.completion("a", 1)], 1)
    assert samples.num_failures == 1
    assert samples.num_requests == 0
