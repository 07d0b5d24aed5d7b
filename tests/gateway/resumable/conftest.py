from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from gateway.admission.api_keys import create_key
from tests.gateway.gateway_process import API_KEY, GatewayProcess, running_gateway
from tests.gateway.known_worker import known_worker
from tests.gateway.resumable.stream_reader import Client
from tests.gateway.wire_worker import WireWorker
from tests.servers import NatsServer

GRACE_S = 1.0


@pytest.fixture(scope="package")
def nats_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A NATS server for as long as the gateways."""
    with NatsServer(tmp_path_factory.mktemp("nats")).running() as server:
        yield server.url


@pytest.fixture(scope="package")
def key_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("keys") / "keys.json"


@pytest.fixture(scope="package")
def other_key(key_file: Path) -> str:
    """A key of another tenant."""
    return create_key(key_file, tenant="other")[1]


@pytest.fixture(scope="package")
def slow_key(key_file: Path) -> str:
    """A key that may read twice a minute."""
    return create_key(key_file, tenant="other", reads_per_minute=2)[1]


@pytest.fixture(scope="package")
def gateways(
    nats_url: str, key_file: Path, other_key: str, slow_key: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[list[GatewayProcess]]:
    """Two gateways that cancel what nobody has read for a second."""
    settings: dict[str, Any] = {"keys_file": key_file, "resume_grace_s": GRACE_S, "resume_stream_bytes": 32 << 10}
    directory = tmp_path_factory.mktemp("gateways")
    with (
        running_gateway(directory / "one", nats_url, **settings) as one,
        running_gateway(directory / "two", nats_url, **settings) as two,
    ):
        yield [one, two]


@pytest.fixture
async def worker(gateways: list[GatewayProcess], nats_url: str) -> AsyncIterator[WireWorker]:
    async with known_worker(nats_url, *gateways) as worker:
        yield worker


@pytest.fixture
async def serving(worker: WireWorker) -> AsyncIterator[WireWorker]:
    """A worker that answers everything, one token in 2 ms."""
    task = asyncio.create_task(worker.serve(0.002))
    yield worker
    task.cancel()


@pytest.fixture
def one(gateways: list[GatewayProcess]) -> Client:
    return Client(gateways[0].url, API_KEY)


@pytest.fixture
def two(gateways: list[GatewayProcess]) -> Client:
    return Client(gateways[1].url, API_KEY)
