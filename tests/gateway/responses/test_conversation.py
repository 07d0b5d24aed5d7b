"""How items of a conversation become messages."""

from __future__ import annotations

import asyncio
import gzip
import json
from collections.abc import Awaitable
from typing import Any, cast

import httpx2
import msgspec
import openai
import pytest
from openai.types.responses import CompactedResponse

from gateway.admission.auth import Principal
from gateway.api.large_bodies import LargeBodies
from gateway.errors import ApiError
from gateway.responses.body import ItemBody
from gateway.responses.conversation import PREFACE, REQUEST, to_messages
from gateway.responses.endpoint import CompactEndpoint, ResponsesEndpoint
from gateway.responses.reasoning_seal import ReasoningSeals
from gateway.responses.store import ResponseStore
from shared.messages import Finish, Request, Usage
from tests.gateway.gateway_process import API_KEY, GatewayProcess
from tests.gateway.refusals import refused
from tests.gateway.responses.conftest import RESPONSES_SECRET
from tests.gateway.wire_worker import WireWorker


def items(*fields: dict[str, Any]) -> list[ItemBody]:
    return msgspec.convert(list(fields), list[ItemBody])


def message(role: str, text: str) -> dict[str, Any]:
    return {"role": role, "content": text}


def thought(text: str) -> dict[str, Any]:
    return {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": text}]}


def call(number: int) -> dict[str, Any]:
    return {"type": "function_call", "call_id": f"c{number}", "name": f"f{number}", "arguments": "{}"}


def shown(*fields: dict[str, Any]) -> list[tuple[str, str, str | None, list[str]]]:
    messages = to_messages(items(*fields))
    return [(each.role, each.content, each.reasoning, [call.id for call in each.tool_calls]) for each in messages]


def test_what_an_assistant_did_in_one_turn_is_one_message() -> None:
    assert shown(message("user", "q"), thought("t"), message("assistant", "a"), call(1), call(2)) == [
        ("user", "q", None, []),
        ("assistant", "a", "t", ["c1", "c2"]),
    ]


@pytest.mark.parametrize("arguments", [{}, {"arguments": ""}])
def test_call_without_arguments_has_an_empty_object(arguments: dict[str, Any]) -> None:
    (turn,) = to_messages(items({"type": "function_call", "call_id": "c", "name": "f", **arguments}))
    assert [each.arguments for each in turn.tool_calls] == ["{}"]


def test_another_order_begins_another_message() -> None:
    assert shown(
        message("assistant", "a"), message("assistant", "b"), call(1), message("assistant", "c"), thought("t")
    ) == [
        ("assistant", "a", None, []),
        ("assistant", "b", None, ["c1"]),
        ("assistant", "c", None, []),
        ("assistant", "", "t", []),
    ]


def test_results_end_a_turn_and_are_named_by_their_calls() -> None:
    result = {"type": "function_call_output", "call_id": "c1", "output": "r"}
    _, tool, other = to_messages(items(call(1), result, {**result, "call_id": "c9"}))
    assert (tool.role, tool.content, tool.tool_call_id, tool.name) == ("tool", "r", "c1", "f1")
    assert (other.tool_call_id, other.name) == ("c9", None)


def test_text_may_hold_any_character() -> None:
    assert shown(message("user", "a\0b")) == [("user", "a\0b", None, [])]


def test_output_that_no_call_asked_for_is_told_by_the_user() -> None:
    unasked = {"type": "function_call_output", "name": "goal_objective", "namespace": "agent", "output": "win"}
    assert shown(call(1), unasked) == [("assistant", "", None, ["c1"]), ("user", "win", None, [])]
    assert refused(shown, {"type": "function_call_output", "output": "whose?"}).param == "input.[0].call_id"


def test_reasoning_without_content_is_its_summary() -> None:
    summed = {"type": "reasoning", "summary": [{"type": "summary_text", "text": "s"}]}
    both = thought("t") | {"summary": summed["summary"]}
    assert [each[2] for each in shown(summed, message("user", "q"), both)] == ["s", None, "t"]


@pytest.mark.parametrize(
    ("item", "param"),
    [
        ({"role": "tool", "content": "x"}, "role"),
        ({"role": "user"}, "content"),
        ({"role": "user", "content": [{"type": "input_text"}]}, "content.[0].text"),
        ({"type": "function_call", "name": "f"}, "call_id"),
        ({"type": "function_call_output", "call_id": "c"}, "output"),
        ({"type": "computer_call"}, "type"),
    ],
)
def test_item_that_cannot_be_read_is_named_by_its_place(item: dict[str, Any], param: str) -> None:
    assert (
        refused(to_messages, items(message("user", "earlier"), message("user", "ok"), item), num_earlier=1).param
        == f"input.[1].{param}"
    )


TRIGGER = {"type": "compaction_trigger"}
TOOL = {"type": "function", "name": "f", "parameters": {"type": "object"}}
HISTORY: list[dict[str, Any]] = [
    {"role": "developer", "content": "Be brief."},
    {"role": "user", "content": "first"},
    {"role": "assistant", "content": "answer"},
    {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
    {"type": "function_call_output", "call_id": "c", "output": "result"},
    {"role": "user", "content": [{"type": "input_text", "text": "second"}]},
]
SEALS = ReasoningSeals([RESPONSES_SECRET])
SUMMARY = "All is done."


def said(request: Request) -> list[tuple[str, str]]:
    assert request.messages is not None
    return [(message.role, message.content) for message in request.messages]


async def answered(
    worker: WireWorker, asking: Awaitable[Any], text: str = SUMMARY, finish: Finish | None = None
) -> tuple[Request, Any]:
    """Return the request that the worker got, and what the client got for the worker's text."""
    task = asyncio.ensure_future(asking)
    request = await worker.next_request()
    await worker.answer(request, text, finish)
    return request, await task


async def test_trigger_is_answered_with_one_summary(worker: WireWorker, client: openai.AsyncOpenAI) -> None:
    fields: Any = {"input": [*HISTORY, TRIGGER], "tools": [TOOL], "text": {"format": {"type": "json_object"}}}
    request, response = await answered(worker, client.responses.create(model=worker.model, **fields))
    # The call stands in the message of the assistant before it.
    assert [role for role, _ in said(request)] == ["developer", "user", "assistant", "tool", "user", "user"]
    assert said(request)[-2:] == [("user", "second"), (REQUEST.role, REQUEST.content)]
    # Nothing else than text is to come.
    assert (request.chat, request.sampling.grammar) == (None, None)
    [item] = response.output
    assert (response.status, item.type) == ("completed", "compaction")
    assert SEALS.open("default", worker.model, "compaction", item.encrypted_content) == SUMMARY
    listed = [each async for each in client.responses.input_items.list(response.id)]
    assert len(listed) == len(HISTORY)


async def test_streamed_summary_is_one_item_and_its_text_is_not_told(
    worker: WireWorker, client: openai.AsyncOpenAI
) -> None:
    async def events() -> list[Any]:
        stream = await client.responses.create(model=worker.model, input=cast("Any", [*HISTORY, TRIGGER]), stream=True)
        return [event async for event in cast("Any", stream)]

    _, told = await answered(worker, events())
    assert list(dict.fromkeys(event.type for event in told)) == [
        "response.created", "response.in_progress", "response.output_item.added", "response.compaction.compacting",
        "response.output_item.done", "response.completed",
    ]  # fmt: skip
    assert told[-2].item.type == "compaction"
    assert SUMMARY not in "".join(event.to_json() for event in told)


async def test_conversation_is_compacted_and_goes_on(worker: WireWorker, client: openai.AsyncOpenAI) -> None:
    asking = client.responses.with_raw_response.compact(
        model=worker.model, input=cast("Any", HISTORY), instructions="Rule."
    )
    request, raw = await answered(worker, asking)
    compacted, output = raw.parse(), json.loads(raw.content)["output"]
    assert said(request)[0] == ("system", "Rule.")
    assert isinstance(compacted, CompactedResponse)
    assert (compacted.object, compacted.usage.output_tokens) == ("response.compaction", len(SUMMARY))
    # The library has no type for messages of the user in an output, and warns when one is serialized.
    first, second, summary = output
    for item, text in ((first, "first"), (second, "second")):
        assert (item["type"], item["role"], item["status"]) == ("message", "user", "completed")
        assert item["content"] == [{"type": "input_text", "text": text}]
    assert set(summary) == {"id", "type", "encrypted_content"}
    with pytest.raises(openai.NotFoundError):
        await client.responses.retrieve(compacted.id)
    expected = [("user", "first"), ("user", "second"), ("user", f"{PREFACE}\n\n{SUMMARY}"), ("user", "third")]
    third = {"role": "user", "content": "third"}
    request, _ = await answered(worker, client.responses.create(model=worker.model, input=[*output, third]))
    assert said(request) == expected
    # Who leaves nothing out gets the same, the developer's words aside.
    everything = cast("Any", [*HISTORY, summary, third])
    request, response = await answered(worker, client.responses.create(model=worker.model, input=everything))
    assert said(request) == [("developer", "Be brief."), *expected]
    # And so does who goes on from what was stored.
    asking = client.responses.create(model=worker.model, input="fourth", previous_response_id=response.id)
    request, _ = await answered(worker, asking)
    assert said(request) == [("developer", "Be brief."), *expected, ("assistant", SUMMARY), ("user", "fourth")]


async def test_compressed_conversation_is_compacted(worker: WireWorker, gateway: GatewayProcess) -> None:
    headers = {"content-encoding": "gzip", "content-type": "application/json", "authorization": f"Bearer {API_KEY}"}
    body = gzip.compress(json.dumps({"model": worker.model, "input": HISTORY}).encode())
    async with httpx2.AsyncClient() as http:
        asking = http.post(f"{gateway.url}/v1/responses/compact", content=body, headers=headers)
        _, answer = await answered(worker, asking)
    assert [item["type"] for item in answer.json()["output"]] == ["message", "message", "compaction"]


async def test_stored_conversation_is_compacted_by_its_id(worker: WireWorker, client: openai.AsyncOpenAI) -> None:
    _, first = await answered(worker, client.responses.create(model=worker.model, input=cast("Any", HISTORY)), "so")
    asking = client.responses.compact(model=worker.model, previous_response_id=first.id)
    _, compacted = await answered(worker, asking)
    assert [item.type for item in compacted.output] == ["message", "message", "compaction"]
    trigger = client.responses.create(model=worker.model, input=cast("Any", [TRIGGER]), previous_response_id=first.id)
    _, second = await answered(worker, trigger)
    asking = client.responses.create(model=worker.model, input="third", previous_response_id=second.id)
    request, _ = await answered(worker, asking)
    kept = [("developer", "Be brief."), ("user", "first"), ("user", "second")]
    assert said(request) == [*kept, ("user", f"{PREFACE}\n\n{SUMMARY}"), ("user", "third")]


async def test_summary_that_was_cut_off_says_so(worker: WireWorker, client: openai.AsyncOpenAI) -> None:
    asking = client.responses.compact(model=worker.model, input="x")
    _, compacted = await answered(worker, asking, finish=Finish("length", Usage(3, 5)))
    assert (compacted.model_extra or {})["incomplete_details"] == {"reason": "max_output_tokens"}


async def test_thoughts_are_no_part_of_a_summary(thinking: WireWorker, client: openai.AsyncOpenAI) -> None:
    asking = client.responses.compact(model=thinking.model, input="x")
    _, compacted = await answered(thinking, asking, f"<think>hm</think>{SUMMARY}")
    [_, item] = compacted.output
    assert SEALS.open("default", thinking.model, "compaction", item.encrypted_content) == SUMMARY


@pytest.mark.parametrize("text", ["", " \n", "<think>so much to say</think>"])
async def test_conversation_is_not_lost_to_an_empty_summary(
    thinking: WireWorker, client: openai.AsyncOpenAI, text: str
) -> None:
    with pytest.raises(openai.InternalServerError) as failure:
        await answered(thinking, client.responses.compact(model=thinking.model, input="x"), text)
    assert (failure.value.status_code, failure.value.code) == (502, "no_summary")


async def test_stream_without_a_summary_fails(thinking: WireWorker, client: openai.AsyncOpenAI) -> None:
    async def code() -> object:
        fields: Any = {"input": [*HISTORY, TRIGGER], "stream": True}
        try:
            events = [event async for event in await client.responses.create(model=thinking.model, **fields)]
        except openai.APIStatusError as error:
            # The stream had not begun.
            return error.code
        return events[-1].response.error.code

    assert (await answered(thinking, code(), ""))[1] == "no_summary"


def generation(fields: dict[str, Any], *, compacts: bool = False, seals: ReasoningSeals | None = SEALS) -> Any:
    kind = CompactEndpoint if compacts else ResponsesEndpoint
    endpoint = kind(ResponseStore(cast("Any", None), cast("Any", None), seals), LargeBodies())
    body = json.dumps({"model": "m", "input": "x"} | fields).encode()
    return endpoint.generation(body, Principal("key", "default"))


@pytest.mark.parametrize(
    ("fields", "compacts", "param"),
    [
        ({"input": [TRIGGER, *HISTORY]}, False, "input.[0]"),
        ({"input": [*HISTORY, TRIGGER, TRIGGER]}, False, "input.[6]"),
        ({"input": [TRIGGER]}, False, "input"),
        ({"input": [*HISTORY, TRIGGER], "background": True}, False, "background"),
        ({"input": [TRIGGER | {"content": "x"}]}, False, "input.[0].content"),
        ({"input": [*HISTORY, {"type": "compaction"}]}, False, "input.[6].encrypted_content"),
        ({"input": [{"type": "compaction", "encrypted_content": "hr1.AAAA"}]}, False, "input.[0].encrypted_content"),
        ({"stream": True}, True, "stream"),
        ({"background": True}, True, "background"),
        ({"store": True}, True, "store"),
    ],
)
async def test_what_cannot_be_compacted_is_refused_by_name(fields: dict[str, Any], compacts: bool, param: str) -> None:
    with pytest.raises(ApiError) as refusal:
        await generation(fields, compacts=compacts)
    assert (refusal.value.status, refusal.value.param) == (400, param)


async def test_summary_of_another_tenant_is_refused() -> None:
    item = {"type": "compaction", "encrypted_content": SEALS.seal("acme", "m", "compaction", "cmp_1", SUMMARY)}
    with pytest.raises(ApiError, match="could not be verified"):
        await generation({"input": [item]})
