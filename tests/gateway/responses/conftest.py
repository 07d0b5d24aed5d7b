from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import openai
import pytest

from gateway.admission.api_keys import create_key
from tests.gateway.gateway_process import API_KEY, GatewayProcess, running_gateway
from tests.gateway.wire_worker import WireWorker
from tests.servers import NatsServer

# Keys beside the bootstrap key, by name; the first part of each is its tenant.
KEYS: dict[str, dict[str, Any]] = {
    "acme": {},
    "acme-2": {},
    "acme-other-model": {"models": ["other"]},
    "evil": {},
    "default-limited": {"tokens_per_minute": 1000},
}


RESPONSES_SECRET = "secret-of-all-gateways-in-these-tests"

_TOOLS: list[Any] = [{"type": "function", "name": "f", "parameters": {"type": "object"}, "strict": True}]


@dataclass(frozen=True)
class KeyFile:
    """A key file, and the keys in it by name."""

    path: Path
    keys: dict[str, str]


@pytest.fixture(scope="package")
def key_file(tmp_path_factory: pytest.TempPathFactory) -> KeyFile:
    path = tmp_path_factory.mktemp("keys") / "keys.json"
    return KeyFile(
        path, {name: create_key(path, tenant=name.split("-")[0], **limits)[1] for name, limits in KEYS.items()}
    )


@pytest.fixture(scope="package")
def nats_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A NATS server for as long as the gateway."""
    with NatsServer(tmp_path_factory.mktemp("nats")).running() as server:
        yield server.url


@pytest.fixture(scope="package")
def gateway(nats_url: str, key_file: KeyFile, tmp_path_factory: pytest.TempPathFactory) -> Iterator[GatewayProcess]:
    settings = {"keys_file": key_file.path, "responses_secret": RESPONSES_SECRET}
    with running_gateway(tmp_path_factory.mktemp("gateway"), nats_url, **settings) as gateway:
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


@pytest.fixture
async def thinking(worker: WireWorker, client: openai.AsyncOpenAI) -> WireWorker:
    """A worker of a model that thinks, and calls functions as Hermes does; its gateway knows that."""
    worker.chat_format = "hermes-thinking"
    for _ in range(200):
        asking = asyncio.create_task(client.responses.create(model=worker.model, input="x", tools=_TOOLS, store=False))
        request = await worker.begin()
        await worker.end(request, 0)
        await asking
        if request.sampling.grammar is not None:
            break
    return worker
