"""Responses through OpenAI's own client and a worker that speaks the wire, and whose they are."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any, cast

import openai
import pytest
from openai.types.responses import Response, ResponseOutputMessage

from gateway.admission.auth import Principal
from gateway.api.answer import Asked, Outcome, ResponseHead
from gateway.api.large_bodies import LargeBodies
from gateway.responses.answers import WholeResponse
from gateway.responses.draft import ResponseGeneration
from gateway.responses.endpoint import ResponsesEndpoint
from gateway.responses.log import ResponseLog, ResponseLogError, ResponseRecord
from gateway.responses.store import ResponseStore
from shared.messages import Delta, Finish, Usage
from tests.gateway.gateway_process import GatewayProcess, running_gateway
from tests.gateway.kept_exchange import kept_exchange
from tests.gateway.known_worker import known_worker
from tests.gateway.parsed_bodies import response as response_to
from tests.gateway.responses.batch_worker import batch_worker
from tests.gateway.responses.conftest import KeyFile
from tests.gateway.wire_worker import WireWorker, expected_text


class BrokenLog:
    """A log that takes nothing."""

    async def put(self, record: ResponseRecord) -> None:
        raise ResponseLogError("the disk is full")


# What OpenAI's own server puts into every response.
ALWAYS = {
    "id", "object", "created_at", "status", "background", "error", "incomplete_details", "instructions",
    "max_output_tokens", "model", "output", "parallel_tool_calls", "previous_response_id", "reasoning", "store",
    "temperature", "text", "tool_choice", "tools", "top_p", "truncation", "usage", "user", "metadata",
}  # fmt: skip


async def _ask(client: openai.AsyncOpenAI, worker: WireWorker, text: Any = "hi", **fields: Any) -> Response:
    response = await client.responses.create(**{"model": worker.model, "input": text, "max_output_tokens": 4} | fields)
    assert isinstance(response, Response)
    return response


async def test_whole_response_has_text_usage_and_every_field(serving: WireWorker, client: openai.AsyncOpenAI) -> None:
    response = await _ask(client, serving, metadata={"a": "b"}, instructions="Count.", user="u")
    Response.model_validate(response.to_dict(), strict=False)
    assert set(response.to_dict()) >= ALWAYS
    assert response.output_text == expected_text(4)
    assert (response.status, response.metadata, response.user) == ("incomplete", {"a": "b"}, "u")
    assert response.incomplete_details is not None
    assert response.incomplete_details.reason == "max_output_tokens"
    assert response.usage is not None
    assert (response.usage.input_tokens, response.usage.output_tokens, response.usage.total_tokens) == (3, 4, 7)


async def test_stream_is_a_sequence_of_typed_events_that_adds_up(
    serving: WireWorker, client: openai.AsyncOpenAI
) -> None:
    async with client.responses.stream(model=serving.model, input="hi", max_output_tokens=3) as stream:
        events = [event async for event in stream]
    deltas = ["response.output_text.delta"] * 3
    assert [event.type for event in events] == [
        "response.created", "response.in_progress", "response.output_item.added", "response.content_part.added",
        *deltas, "response.output_text.done", "response.content_part.done", "response.output_item.done",
        "response.incomplete",
    ]  # fmt: skip
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert events[-1].type == "response.incomplete"
    assert events[-1].response.output_text == expected_text(3)
    (message,) = events[-1].response.output
    assert isinstance(message, ResponseOutputMessage)
    assert message.status == "incomplete"


async def test_stored_response_is_retrieved_listed_and_deleted(serving: WireWorker, client: openai.AsyncOpenAI) -> None:
    response = await _ask(client, serving, [{"role": "user", "content": "one"}, {"role": "user", "content": "two"}])
    assert (await client.responses.retrieve(response.id)).to_dict() == response.to_dict()
    items = [item async for item in client.responses.input_items.list(response.id, limit=1, order="asc")]
    texts = [item.to_dict()["content"] for item in items]
    assert texts == [[{"type": "input_text", "text": text}] for text in ("one", "two")]
    await client.responses.delete(response.id)
    with pytest.raises(openai.NotFoundError) as refusal:
        await client.responses.retrieve(response.id)
    assert (refusal.value.param, refusal.value.code) == ("id", "response_not_found")


async def test_input_is_listed_from_its_end_page_by_page(serving: WireWorker, client: openai.AsyncOpenAI) -> None:
    texts = [{"role": "user", "content": text} for text in ("one", "two", "three")]
    response = await _ask(client, serving, cast("Any", texts))
    pages = [await client.responses.input_items.list(response.id, limit=2)]
    pages.append(await pages[0].get_next_page())
    ids = [[item.to_dict()["id"] for item in page.data] for page in pages]
    contents = [item.to_dict()["content"] for page in pages for item in page.data]
    assert [content[0]["text"] for content in cast("Any", contents)] == ["three", "two", "one"]
    for page, listed in zip(pages, ids, strict=True):
        ends = page.to_dict()
        assert (ends["first_id"], ends["last_id"]) == (listed[0], listed[-1])
    assert [page.to_dict()["has_more"] for page in pages] == [True, False]
    after_all = await client.responses.input_items.list(response.id, after=cast("str", ids[1][-1]))
    assert (after_all.data, after_all.to_dict()["last_id"]) == ([], None)
    for wrong in ({"order": "random"}, {"limit": 101}, {"limit": 0}, {"after": "msg_x"}):
        with pytest.raises(openai.BadRequestError) as refusal:
            await client.responses.input_items.list(response.id, **cast("Any", wrong))
        assert refusal.value.param == next(iter(wrong))


async def test_response_that_is_not_to_be_stored_is_not(serving: WireWorker, client: openai.AsyncOpenAI) -> None:
    response = await _ask(client, serving, store=False)
    with pytest.raises(openai.NotFoundError, match="not found"):
        await client.responses.retrieve(response.id)
    with pytest.raises(openai.BadRequestError) as refusal:
        await _ask(client, serving, previous_response_id=response.id)
    assert (refusal.value.param, refusal.value.code) == ("previous_response_id", "previous_response_not_found")


async def test_conversation_goes_on_from_the_previous_response(worker: WireWorker, client: openai.AsyncOpenAI) -> None:
    previous: str | None = None
    for turn in range(3):
        asking = asyncio.create_task(
            _ask(client, worker, f"question {turn}", previous_response_id=previous, instructions=f"rule {turn}")
        )
        request = await worker.begin(2)
        await worker.end(request, 2)
        previous = (await asking).id
    assert request.messages is not None
    said = [(message.role, message.content) for message in request.messages]
    assert said == [
        ("system", "rule 2"), ("user", "question 0"), ("assistant", expected_text(2)), ("user", "question 1"),
        ("assistant", expected_text(2)), ("user", "question 2"),
    ]  # fmt: skip


async def test_response_that_cannot_be_stored_is_answered_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    store = ResponseStore(cast("ResponseLog", BrokenLog()), cast("Any", None))
    generation = await ResponsesEndpoint(store, LargeBodies()).generation(
        b'{"model":"m","input":"x"}', Principal("key", "tenant")
    )
    assert generation.draft.is_stored
    for _ in range(2):
        assert not await store.keep("tenant", generation, {})
    assert [record.message for record in caplog.records] == ["response not stored: the disk is full"]


@pytest.mark.parametrize("is_kept", [True, False])
async def test_client_is_told_nothing_until_its_response_is_stored_and_whether_it_is(is_kept: bool) -> None:
    stored: asyncio.Future[bool] = asyncio.get_running_loop().create_future()

    class Store(ResponseStore):
        async def keep(self, tenant: str, generation: ResponseGeneration, response: dict[str, Any]) -> bool:
            assert response["output"][0]["content"][0]["text"] == "text"
            return await stored

    exchange, _, transport = kept_exchange()
    store = Store(cast("Any", None), cast("Any", None))
    answer = WholeResponse(Asked(exchange, response_to(), ResponseHead("req_1", 0.0), Principal("k", "t")), store)
    answer.sinks[0].deliver(Delta("r", 0, 0, (1,), "text"))
    answer.sinks[0].deliver(Delta("r", 0, 1, finish=Finish("stop", Usage(1, 1))))
    await asyncio.sleep(0.01)
    assert not transport.writes
    assert not answer.done.done()
    stored.set_result(is_kept)
    assert await answer.done is Outcome.COMPLETED
    told = transport.body()
    assert (told["status"], told["store"]) == ("completed", is_kept)


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
