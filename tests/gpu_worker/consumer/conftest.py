from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest

from shared.nats_connection import connect
from tests.gpu_worker.consumer.harness import MakeWorker, RunningWorker, TestGateway, fresh_name, start_worker


@pytest.fixture
def model() -> str:
    return fresh_name("m")


@pytest.fixture
async def gateway(nats_url: str, model: str) -> AsyncIterator[TestGateway]:
    nats = await connect(nats_url, role="gateway", name="test")
    gateway = TestGateway(nats, model)
    await gateway.start()
    yield gateway
    await nats.close()


@pytest.fixture
async def make_worker(nats_url: str, model: str) -> AsyncIterator[MakeWorker]:
    """Start workers of the test's model; they are stopped when the test ends."""
    workers: list[RunningWorker] = []

    async def make(url: str = nats_url, **settings: Any) -> RunningWorker:
        workers.append(await start_worker(url, model, **settings))
        return workers[-1]

    yield make
    for worker in workers:
        await worker.close()


@pytest.fixture
async def worker(make_worker: MakeWorker) -> RunningWorker:
    return await make_worker()
