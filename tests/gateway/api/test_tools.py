"""Tools and reasoning through a gateway process: the worker says scripted texts in a family's own markup."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest

from shared.conversation import ChatMessage, ToolCall
from shared.messages import Request
from tests.gateway.gateway_process import GatewayProcess
from tests.gateway.known_worker import known_worker
from tests.gateway.raw_client import RawClient, connected
from tests.gateway.shared_gateway import gateway, nats_url
from tests.gateway.wire_worker import WireWorker

__all__ = ["gateway", "nats_url"]

PATH = "/v1/chat/completions"
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
ASKED = [{"role": "user", "content": "2+3?"}]
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 2, "b": "é\\n</tool_call>"}}\n</tool_call>'
ARGUMENTS = {"a": 2, "b": "é\n</tool_call>"}
THOUGHT = "<think>\nI call <tool_call> or not?\n</think>\n\n"


@pytest.fixture
async def worker(gateway: GatewayProcess, nats_url: str) -> AsyncIterator[WireWorker]:
    async with known_worker(nats_url, gateway, chat_format="hermes-thinking") as worker:
        yield worker


def body(worker: WireWorker, **fields: Any) -> dict[str, Any]:
    return {"model": worker.model, "messages": ASKED, "tools": [TOOL], **fields}


async def asked(worker: WireWorker, client: RawClient, **fields: Any) -> Request:
    client.post(PATH, body(worker, **fields))
    return await worker.next_request()


async def message(client: RawClient) -> tuple[dict[str, Any], str, dict[str, Any]]:
    """Return the only choice's message and finish reason, and the usage."""
    status, answer = await client.whole()
    assert status == 200, answer
    [choice] = answer["choices"]
    return choice["message"], choice["finish_reason"], answer["usage"]


async def test_call_behind_reasoning_is_a_call_and_its_mark_within_is_text(
    worker: WireWorker, client: RawClient
) -> None:
    await worker.answer(await asked(worker, client), THOUGHT + CALL)
    told, reason, usage = await message(client)
    assert reason == "tool_calls"
    assert told["content"] is None
    assert told["reasoning_content"] == told["reasoning"]
    assert told["reasoning"].strip() == "I call <tool_call> or not?"
    [call] = told["tool_calls"]
    assert (call["function"]["name"], json.loads(call["function"]["arguments"])) == ("add", ARGUMENTS)
    details = usage["completion_tokens_details"]
    assert abs(details["reasoning_tokens"] - len(THOUGHT)) <= len("\n\n<tool_call>\n")


async def test_call_within_reasoning_is_not_lost(worker: WireWorker, client: RawClient) -> None:
    await worker.answer(await asked(worker, client), f"<think>\nhm {CALL}")
    told, reason, _ = await message(client)
    assert (told["reasoning"].strip(), reason) == ("hm", "tool_calls")
    assert json.loads(told["tool_calls"][0]["function"]["arguments"]) == ARGUMENTS


async def test_streamed_pieces_add_up_to_the_whole_answer(worker: WireWorker, client: RawClient) -> None:
    request = await asked(worker, client, stream=True, stream_options={"include_usage": True})
    await worker.answer(request, THOUGHT + "Wait." + CALL + "\n" + CALL)
    await client.head()
    chunks = await client.stream()
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks if chunk["choices"]]
    assert "".join(delta.get("content") or "" for delta in deltas).strip() == "Wait."
    assert "<tool_call> or not?" in "".join(delta.get("reasoning_content", "") for delta in deltas)
    calls = [call for delta in deltas for call in delta.get("tool_calls", ())]
    assert [call["function"]["name"] for call in calls if "id" in call] == ["add", "add"]
    for index in range(2):
        texts = [call["function"]["arguments"] for call in calls if call["index"] == index]
        assert json.loads("".join(texts)) == ARGUMENTS
        assert len(texts) > 3
    assert chunks[-2]["choices"][0]["finish_reason"] == "tool_calls"
    assert chunks[-1]["usage"]["completion_tokens_details"]["reasoning_tokens"] > 0


async def test_markup_without_tools_is_text(worker: WireWorker, client: RawClient) -> None:
    await worker.answer(await asked(worker, client, tool_choice="none"), CALL)
    told, reason, _ = await message(client)
    assert (told["content"], reason) == (CALL, "stop")
    assert "tool_calls" not in told


async def test_call_of_a_tool_that_was_not_offered_is_the_clients_to_answer(
    worker: WireWorker, client: RawClient
) -> None:
    other = CALL.replace('"add"', '"subtract"')
    await worker.answer(await asked(worker, client), other)
    told, reason, _ = await message(client)
    assert (told["content"], reason) == (None, "tool_calls")
    [call] = told["tool_calls"]
    assert call["id"].startswith("call_")
    assert (call["function"]["name"], json.loads(call["function"]["arguments"])) == ("subtract", ARGUMENTS)
    # The client's next turn tells that there is none.
    history = [*ASKED, told, {"role": "tool", "tool_call_id": call["id"], "content": "no such tool"}]
    request = await asked(worker, client, messages=history)
    assert request.messages is not None
    assert request.messages[1].tool_calls[0].name == "subtract"
    await worker.answer(request, "Sorry.")
    assert (await message(client))[0]["content"] == "Sorry."


@pytest.mark.parametrize(
    "fields",
    [
        {"tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [TOOL]}}},
        {"response_format": {"type": "json_object"}},
    ],
    ids=["allowed tools", "structured output"],
)
async def test_call_of_a_tool_that_is_forbidden_stays_text(
    worker: WireWorker, client: RawClient, fields: dict[str, Any]
) -> None:
    other = CALL.replace('"add"', '"subtract"')
    await worker.answer(await asked(worker, client, **fields), other)
    told, reason, _ = await message(client)
    assert (told["content"], reason) == (other, "stop")


async def test_required_and_named_choices_constrain_the_worker(worker: WireWorker, client: RawClient) -> None:
    for choice in ("required", {"type": "function", "function": {"name": "add"}}):
        request = await asked(worker, client, tool_choice=choice)
        assert request.sampling.grammar is not None
        assert request.sampling.grammar.kind == "lark"
        await worker.answer(request, CALL)
        assert (await message(client))[1] == "tool_calls"
    assert (await asked(worker, client)).sampling.grammar is None


async def test_history_and_options_travel_to_the_worker(worker: WireWorker, client: RawClient) -> None:
    call = {"id": "call_1", "type": "function", "function": {"name": "add", "arguments": "{}"}}
    history = [
        *ASKED,
        {"role": "assistant", "content": None, "tool_calls": [call], "reasoning_content": "hm"},
        {"role": "tool", "tool_call_id": "call_1", "content": "5"},
    ]
    request = await asked(worker, client, messages=history, reasoning_effort="high")
    called = ToolCall(id="call_1", name="add", arguments="{}")
    assert request.messages == (
        ChatMessage(role="user", content="2+3?"),
        ChatMessage(role="assistant", content="", reasoning="hm", tool_calls=(called,)),
        ChatMessage(role="tool", content="5", tool_call_id="call_1"),
    )
    assert request.chat is not None
    assert json.loads(request.chat.tools or "")[0]["function"]["name"] == "add"
    assert json.loads(request.chat.variables or "")["reasoning_effort"] == "high"


async def test_repeated_answer_has_the_same_calls_under_new_ids(worker: WireWorker, client: RawClient) -> None:
    await worker.answer(await asked(worker, client, temperature=0), CALL)
    first, _, _ = await message(client)
    # The answer is kept a moment after it was given.
    for _ in range(100):
        client.post(PATH, body(worker, temperature=0))
        waiting, asked_again = asyncio.create_task(message(client)), asyncio.create_task(worker.next_request())
        await asyncio.wait([waiting, asked_again], return_when=asyncio.FIRST_COMPLETED)
        if waiting.done():
            asked_again.cancel()
            break
        await worker.answer(await asked_again, CALL)
        await waiting
    again, reason, usage = waiting.result()
    assert reason == "tool_calls"
    assert usage["prompt_tokens_details"]["cached_tokens"] == usage["prompt_tokens"]
    assert again["tool_calls"][0]["function"] == first["tool_calls"][0]["function"]
    assert again["tool_calls"][0]["id"] != first["tool_calls"][0]["id"]


async def test_model_without_a_format_of_calls_cannot_be_made_to_call(gateway: GatewayProcess, nats_url: str) -> None:
    async with known_worker(nats_url, gateway) as plain, connected(gateway) as client:
        client.post(PATH, body(plain, tool_choice="required"))
        status, answer = await client.whole()
        assert (status, answer["error"]["param"]) == (400, "tool_choice")
        request = await asked(plain, client)
        await plain.answer(request, CALL)
        assert (await message(client))[0]["content"] == CALL
