"""Responses through OpenAI's own client, against a gateway process and a worker that speaks the wire."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import openai
import pytest
from openai.types.responses import Response, ResponseOutputMessage

from gateway.admission.auth import Principal
from gateway.api.large_bodies import LargeBodies
from gateway.responses.endpoint import ResponsesEndpoint
from gateway.responses.log import ResponseLog, ResponseLogError, ResponseRecord
from gateway.responses.store import ResponseStore
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
