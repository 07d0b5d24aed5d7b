"""A worker that gateway processes already know: what they are asked for its model is not refused."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from tests.gateway.gateway_process import API_KEY, GatewayProcess
from tests.gateway.raw_client import connected
from tests.gateway.wire_worker import WireWorker


@asynccontextmanager
async def known_worker(nats_url: str, *gateways: GatewayProcess, chat_format: str = "") -> AsyncIterator[WireWorker]:
    """Run a worker of a model of its own until the block ends."""
    model = f"m-{uuid.uuid4().hex[:8]}"
    worker = WireWorker(nats_url, model, f"w-{model}")
    worker.chat_format = chat_format
    async with worker:
        for gateway in gateways:
            await until_known(gateway, model)
        yield worker


async def until_known(gateway: GatewayProcess, model: str) -> None:
    """Wait until a gateway lists a model, and its requests are not refused as unknown.

    Raises:
        TimeoutError: It does not.
    """
    head = b"GET /v1/models/%b HTTP/1.1\r\nHost: t\r\nAuthorization: Bearer %b\r\n\r\n"
    for _ in range(1000):
        async with connected(gateway) as client:
            client.post("/v1/completions", {"model": model, "prompt": []})
            client.writer.write(head % (model.encode(), API_KEY.encode()))
            await client.whole()
            status, _ = await client.whole()
        if status == 200:
            return
        await asyncio.sleep(0.01)
    raise TimeoutError(model)
