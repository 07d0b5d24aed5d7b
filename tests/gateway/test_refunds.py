"""Tokens per minute: what refused, failed and broken-off requests give back; and that tenants share no answer."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from gateway.admission.api_keys import create_key
from shared.messages import Finish
from tests.gateway.gateway_process import GatewayProcess, running_gateway
from tests.gateway.raw_client import RawClient, connected
from tests.gateway.wire_worker import WireWorker, until

TOKENS_PER_MINUTE = 1000


@pytest.fixture(scope="module")
def keys_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("keys") / "keys.json"


@pytest.fixture(scope="module")
def keys(keys_file: Path) -> dict[str, str]:
    """A key of each tenant, made before the gateway starts; that of `limited` has few tokens."""
    limits = {"limited": TOKENS_PER_MINUTE, "one": None, "other": None}
    return {
        tenant: create_key(keys_file, tenant=tenant, tokens_per_minute=tokens)[1] for tenant, tokens in limits.items()
    }


@pytest.fixture(scope="module")
def gateway(
    nats_url: str, redis_url: str, tmp_path_factory: pytest.TempPathFactory, keys_file: Path, keys: dict[str, str]
) -> Iterator[GatewayProcess]:
    directory = tmp_path_factory.mktemp("gateway")
    with running_gateway(directory, nats_url, redis_url=redis_url, keys_file=keys_file) as gateway:
        yield gateway


@pytest.fixture
async def client(gateway: GatewayProcess, keys: dict[str, str]) -> AsyncIterator[RawClient]:
    async with connected(gateway, key=keys["limited"]) as client:
        yield client


def body(model: str, **fields: Any) -> dict[str, Any]:
    return {"model": model, "prompt": "x", "max_tokens": 200, "temperature": 0} | fields


async def remaining(client: RawClient, worker: WireWorker) -> int:
    """Ask for a token that is never cached, and return what the key has left; the question itself is given back."""
    client.post("/v1/completions", body(worker.model, max_tokens=1, temperature=1))
    await worker.end(await worker.next_request(), 0, Finish("failed", error="no", error_param="prompt"))
    status, headers = await client.head()
    assert status == 400
    await client.reader.readexactly(int(headers["content-length"]))
    return int(headers["x-ratelimit-remaining-tokens"])


async def rest(client: RawClient, worker: WireWorker) -> int:
    """Return what is left of the limit when two answers in a row say the same: nothing is on its way to Redis then."""
    left, last = await remaining(client, worker), -1
    while left != last:
        await asyncio.sleep(0.05)
        left, last = await remaining(client, worker), left
    return left


async def settled(client: RawClient, worker: WireWorker, expected: int) -> int:
    """Return what is left of the limit; Redis hears of a refund behind the answer, which takes a moment."""
    for _ in range(100):
        if (left := await remaining(client, worker)) == expected:
            break
        await asyncio.sleep(0.05)
    return left


@pytest.mark.parametrize("temperature", [0, 1])
async def test_client_that_leaves_pays_for_what_was_generated(
    gateway: GatewayProcess, client: RawClient, worker: WireWorker, temperature: int
) -> None:
    before = await rest(client, worker)
    async with connected(gateway, key=client.key) as other:
        other.post("/v1/completions", body(worker.model, stream=True, temperature=temperature))
        request = await worker.next_request()
        await worker.claim(request, prompt_tokens=3)
        await worker.say(request, 0, 7)
        await other.reader.readuntil(b'"6 "')
    await until(lambda: any(request.id in cancel.ids for cancel in worker.cancels))
    assert await settled(client, worker, before - 10) == before - 10


async def test_repeated_answer_counts_as_its_usage_says(client: RawClient, worker: WireWorker) -> None:
    before = await rest(client, worker)
    client.post("/v1/completions", body(worker.model))
    request = await worker.begin(4)
    await worker.end(request, 4)
    assert (await client.whole())[0] == 200
    assert await settled(client, worker, before - 7) == before - 7
    client.post("/v1/completions", body(worker.model))
    assert (await client.whole())[0] == 200
    assert await settled(client, worker, before - 14) == before - 14


async def test_tenants_share_neither_a_generation_in_flight_nor_a_cached_answer(
    gateway: GatewayProcess, worker: WireWorker, keys: dict[str, str]
) -> None:
    async with connected(gateway, key=keys["one"]) as one, connected(gateway, key=keys["other"]) as other:
        for client in (one, other):
            client.post("/v1/completions", body(worker.model, max_tokens=1))
        requests = [await worker.next_request() for _ in range(2)]
        assert {request.tenant for request in requests} == {"one", "other"}
        answers = {"one": "1", "other": "2"}
        for request in requests:
            await worker.claim(request)
            await worker.say(request, 0, int(answers[request.tenant]))
            await worker.end(request, int(answers[request.tenant]))
        first = [(await client.whole())[1]["choices"][0]["text"] for client in (one, other)]
        assert first == ["0 ", "0 1 "]
        # Both are in the cache now, each for its own tenant.
        for client, text in ((other, first[1]), (one, first[0])):
            client.post("/v1/completions", body(worker.model, max_tokens=1))
            status, answer = await client.whole()
            assert (status, answer["choices"][0]["text"]) == (200, text)
        assert worker.requests.empty()
