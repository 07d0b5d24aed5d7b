"""Functions in namespaces, as Codex offers those of its other agents."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import openai
import pytest
from openai.types.responses import ResponseFunctionToolCall

from gateway.responses.request import own_items, parse_body, to_generation
from tests.gateway.refusals import refused
from tests.gateway.responses.batch_worker import batch_worker
from tests.gateway.responses.test_tools import write
from tests.gateway.wire_worker import WireWorker


def function(name: str) -> dict[str, Any]:
    return {"type": "function", "name": name, "description": "d", "parameters": {"type": "object"}, "strict": False}


def namespace(name: str, *tools: dict[str, Any]) -> dict[str, Any]:
    return {"type": "namespace", "name": name, "description": "Other agents.", "tools": list(tools)}


TOOLS: list[Any] = [
    function("wait"),
    namespace("agents", function("spawn"), function("wait")),
    namespace("jobs", function("wait")),
]
CALLS = "".join(
    f'<tool_call>\n{{"name": "{name}", "arguments": {{}}}}\n</tool_call>\n'
    for name in ("wait", "spawn", "agents__wait", "jobs__wait")
)
NAMES = [("wait", None), ("spawn", "agents"), ("wait", "agents"), ("wait", "jobs")]


def calls_of(output: list[Any]) -> list[tuple[str, str | None]]:
    return [(item.name, item.namespace) for item in output if isinstance(item, ResponseFunctionToolCall)]


async def test_function_of_a_namespace_is_called_and_comes_back_with_it(
    thinking: WireWorker, client: openai.AsyncOpenAI
) -> None:
    asking = asyncio.create_task(client.responses.create(model=thinking.model, input="Go.", tools=TOOLS))
    request = await thinking.begin()
    assert request.chat is not None
    shown = [tool["function"]["name"] for tool in json.loads(request.chat.tools or "")]
    assert shown == ["wait", "spawn", "agents__wait", "jobs__wait"]
    await write(thinking, request, f"<think>\n\n</think>\n\n{CALLS}")
    response = await asking
    assert calls_of(response.output) == NAMES
    assert [tool.to_dict() for tool in response.tools] == TOOLS
    calls = [item for item in response.output if isinstance(item, ResponseFunctionToolCall)]
    results: list[Any] = [{"type": "function_call_output", "call_id": call.call_id, "output": "ok"} for call in calls]
    conversations: list[dict[str, Any]] = [
        {"input": results, "previous_response_id": response.id},
        {"input": [{"role": "user", "content": "Go."}, *(call.to_dict() for call in calls), *results]},
    ]
    for fields in conversations:
        asking = asyncio.create_task(client.responses.create(model=thinking.model, tools=TOOLS, **fields))
        request = await thinking.begin()
        assert request.messages is not None
        _, assistant, *tools = request.messages
        assert [call.name for call in assistant.tool_calls] == shown
        assert [tool.name for tool in tools] == shown
        await write(thinking, request, "Done.")
        assert (await asking).output_text == "Done."


async def test_background_call_names_its_namespace(
    thinking: WireWorker, client: openai.AsyncOpenAI, nats_url: str
) -> None:
    async with batch_worker(nats_url, thinking.model) as batch:
        response = await client.responses.create(model=thinking.model, input="hi", tools=TOOLS, background=True)
        await batch.end(await batch.take(), f"<think>\n\n</think>\n\n{CALLS}")
        assert calls_of((await client.responses.retrieve(response.id)).output) == NAMES


@pytest.mark.parametrize(
    ("tools", "param"),
    [
        ([{"type": "namespace", "tools": [function("f")]}], "tools.[0].name"),
        ([namespace("a", {"type": "custom", "name": "f"})], "tools.[0].tools.[0].type"),
        ([namespace("a", function("f") | {"name": None})], "tools.[0].tools.[0].name"),
        ([namespace("a", namespace("b", function("f")))], "tools.[0].tools.[0].type"),
        ([namespace("a", function("f"), function("f"))], "tools"),
        ([namespace(f"n{n}", *(function(f"f{i}") for i in range(100))) for n in range(100)], "tools"),
    ],
)
def test_namespace_that_is_not_served_is_refused_by_its_place(tools: list[Any], param: str) -> None:
    request = parse_body(json.dumps({"model": "m", "input": "x", "tools": tools}).encode())
    assert refused(to_generation, request, [], own_items(request), ()).param == param
