"""Whose responses a key can reach, and through which gateway."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack
from dataclasses import dataclass

import openai
import pytest

from tests.gateway.gateway_process import GatewayProcess, running_gateway
from tests.gateway.known_worker import known_worker
from tests.gateway.responses.batch_worker import batch_worker
from tests.gateway.responses.conftest import KeyFile
from tests.gateway.wire_worker import WireWorker


@dataclass
class Fleet:
    """Two gateways with the same keys, and a worker that answers everything."""

    gateways: list[GatewayProcess]
    keys: dict[str, str]
    worker: WireWorker
    stack: AsyncExitStack

    async def client(self, name: str, gateway: int = 0) -> openai.AsyncOpenAI:
        client = openai.AsyncOpenAI(
            base_url=f"{self.gateways[gateway].url}/v1", api_key=self.keys[name], max_retries=0, timeout=30
        )
        return await self.stack.enter_async_context(client)


@pytest.fixture(scope="module")
def other_gateway(
    nats_url: str, key_file: KeyFile, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[GatewayProcess]:
    with running_gateway(tmp_path_factory.mktemp("other"), nats_url, keys_file=key_file.path) as gateway:
        yield gateway


@pytest.fixture
async def fleet(
    nats_url: str, gateway: GatewayProcess, other_gateway: GatewayProcess, key_file: KeyFile
) -> AsyncIterator[Fleet]:
    async with AsyncExitStack() as stack, known_worker(nats_url, gateway, other_gateway) as worker:
        serving = asyncio.create_task(worker.serve(0.001))
        yield Fleet([gateway, other_gateway], key_file.keys, worker, stack)
        serving.cancel()


async def test_response_belongs_to_its_tenant_at_every_gateway(fleet: Fleet) -> None:
    model = fleet.worker.model
    acme = await fleet.client("acme")
    response = await acme.responses.create(model=model, input="secret", max_output_tokens=2)
    for name in ("acme", "acme-2"):
        colleague = await fleet.client(name, gateway=1)
        assert (await colleague.responses.retrieve(response.id)).output_text == response.output_text
        following = await colleague.responses.create(
            model=model, input="and?", previous_response_id=response.id, max_output_tokens=2
        )
        assert following.previous_response_id == response.id
    for name in ("evil", "acme-other-model"):
        stranger = await fleet.client(name)
        with pytest.raises(openai.NotFoundError):
            await stranger.responses.retrieve(response.id)
        with pytest.raises(openai.NotFoundError):
            await stranger.responses.delete(response.id)
        with pytest.raises(openai.NotFoundError):
            await stranger.responses.cancel(response.id)
        with pytest.raises(openai.NotFoundError):
            _ = [item async for item in stranger.responses.input_items.list(response.id)]
    evil = await fleet.client("evil")
    with pytest.raises(openai.BadRequestError, match="not found"):
        await evil.responses.create(model=model, input="and?", previous_response_id=response.id)
    with pytest.raises(openai.NotFoundError, match="not found"):
        await evil.responses.create(model=model, input=[{"type": "item_reference", "id": response.output[0].id}])
    assert (await acme.responses.retrieve(response.id)).id == response.id


async def test_item_of_a_model_that_the_key_may_not_use_is_not_found(fleet: Fleet) -> None:
    acme = await fleet.client("acme")
    response = await acme.responses.create(model=fleet.worker.model, input="secret", max_output_tokens=2)
    colleague = await fleet.client("acme-other-model")
    with pytest.raises(openai.NotFoundError) as refusal:
        await colleague.responses.create(model="other", input=[{"type": "item_reference", "id": response.output[0].id}])
    assert (refusal.value.param, refusal.value.code) == ("input.[0].id", "item_not_found")


async def test_tenant_without_a_batch_queue_is_told_so(fleet: Fleet) -> None:
    client = await fleet.client("evil")
    with pytest.raises(openai.BadRequestError, match="no batch queue") as refusal:
        await client.responses.create(model=fleet.worker.model, input="x", background=True)
    assert (refusal.value.param, refusal.value.code) == ("background", "background_unavailable")


async def test_job_counts_all_that_it_may_use_against_its_key(fleet: Fleet, nats_url: str) -> None:
    client = await fleet.client("default-limited")
    async with batch_worker(nats_url, fleet.worker.model) as batch:
        await client.responses.create(model=batch.model, input="x", background=True, max_output_tokens=900)
        with pytest.raises(openai.RateLimitError):
            await client.responses.create(model=batch.model, input="x", background=True, max_output_tokens=900)
        assert (await batch.take()).sampling.max_tokens == 900
