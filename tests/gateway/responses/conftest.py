from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator

import openai
import pytest

from tests.gateway.gateway_process import API_KEY, GatewayProcess, running_gateway
from tests.gateway.wire_worker import WireWorker


@pytest.fixture(scope="package")
def gateway(nats_url: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[GatewayProcess]:
    with running_gateway(tmp_path_factory.mktemp("gateway"), nats_url) as gateway:
        yield gateway


@pytest.fixture
async def serving(worker: WireWorker) -> AsyncIterator[WireWorker]:
    """A worker that answers everything, one token a step."""
    task = asyncio.create_task(worker.serve(0.001))
    yield worker
    task.cancel()


@pytest.fixture
async def client(gateway: GatewayProcess) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key=API_KEY, max_retries=0, timeout=30) as client:
        yield client
