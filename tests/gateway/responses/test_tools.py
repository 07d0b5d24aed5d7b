"""Calls of functions, reasoning and formats of the text, with a worker that writes what the test says."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest
from openai.types.responses import ResponseFunctionToolCall, ResponseOutputMessage, ResponseReasoningItem
from pydantic import BaseModel

from tests.gateway.parsed_bodies import response
from tests.gateway.refusals import refused
from tests.gateway.responses.batch_worker import batch_worker
from tests.gateway.responses.test_conversation import answered
from tests.gateway.wire_worker import WireWorker

TOOLS: list[Any] = [
    {
        "type": "function",
        "name": "weather",
        "description": "Of a place.",
        "parameters": {"type": "object", "properties": {"place": {"type": "string"}}, "required": ["place"]},
        "strict": True,
    }
]
CALL = '<tool_call>\n{"name": "weather", "arguments": {"place": "Köln"}}\n</tool_call>'
THOUGHT = f"<think>\nWhere is it?\n</think>\n\nLet me look.\n{CALL}"


async def streamed(client: openai.AsyncOpenAI, **fields: Any) -> tuple[list[Any], Any]:
    """Return the events of a response, and what the library makes of them."""
    async with client.responses.stream(**fields) as stream:
        return [event async for event in stream], await stream.get_final_response()


async def test_call_and_its_result_travel_through_the_conversation(
    thinking: WireWorker, client: openai.AsyncOpenAI
) -> None:
    asking = client.responses.create(
        model=thinking.model, input="Weather?", tools=TOOLS, include=["reasoning.encrypted_content"]
    )
    request, response = await answered(thinking, asking, THOUGHT)
    assert request.chat is not None
    assert request.chat.tools is not None
    assert json.loads(request.chat.tools)[0]["function"]["name"] == "weather"
    reasoning, message, call = response.output
    assert isinstance(reasoning, ResponseReasoningItem)
    assert reasoning.content is not None
    assert reasoning.content[0].text.strip() == "Where is it?"
    assert isinstance(message, ResponseOutputMessage)
    assert response.output_text.strip() == "Let me look."
    assert isinstance(call, ResponseFunctionToolCall)
    assert (call.name, json.loads(call.arguments)) == ("weather", {"place": "Köln"})
    assert response.usage is not None
    assert 0 < response.usage.output_tokens_details.reasoning_tokens < response.usage.output_tokens
    assert [tool.to_dict() for tool in response.tools] == TOOLS

    result: dict[str, Any] = {"type": "function_call_output", "call_id": call.call_id, "output": "rain"}
    stateless = [
        {"role": "user", "content": "Weather?"},
        {"type": "reasoning", "id": reasoning.id, "summary": [], "encrypted_content": reasoning.encrypted_content},
        message.to_dict(),
        call.to_dict(),
        result,
    ]
    references = [
        {"role": "user", "content": "Weather?"},
        *({"type": "item_reference", "id": i.id} for i in response.output),
    ]
    conversations: list[dict[str, Any]] = [
        {"input": [result], "previous_response_id": response.id},
        {"input": stateless, "store": False},
        {"input": [*references, result]},
    ]
    for fields in conversations:
        asking = client.responses.create(model=thinking.model, tools=TOOLS, **fields)
        request, answer = await answered(thinking, asking, "It rains.")
        assert answer.output_text == "It rains."
        assert request.messages is not None
        user, assistant, tool = request.messages
        assert (user.role, user.content) == ("user", "Weather?")
        assert ((assistant.reasoning or "").strip(), assistant.content.strip()) == ("Where is it?", "Let me look.")
        assert [(each.id, each.name) for each in assistant.tool_calls] == [(call.call_id, "weather")]
        assert (tool.role, tool.content, tool.name, tool.tool_call_id) == ("tool", "rain", "weather", call.call_id)


@pytest.mark.parametrize("asked", [{"summary": "auto"}, {"generate_summary": "detailed"}])
async def test_reasoning_is_told_as_a_summary_where_the_client_reads_those(
    thinking: WireWorker, client: openai.AsyncOpenAI, asked: dict[str, Any]
) -> None:
    asking = streamed(client, model=thinking.model, input="Weather?", tools=TOOLS, reasoning=asked)
    _, (events, final) = await answered(thinking, asking, THOUGHT)
    reasoning = final.output[0]
    assert isinstance(reasoning, ResponseReasoningItem)
    [part] = reasoning.summary
    assert (part.type, part.text.strip(), reasoning.content) == ("summary_text", "Where is it?", [])
    told = [event for event in events if event.type.startswith("response.reasoning")]
    kinds = list(dict.fromkeys(event.type.removeprefix("response.reasoning_") for event in told))
    assert kinds == ["summary_part.added", "summary_text.delta", "summary_text.done", "summary_part.done"]
    assert all(event.summary_index == 0 and event.item_id == reasoning.id for event in told)
    deltas = [event.delta for event in told if event.type == "response.reasoning_summary_text.delta"]
    assert "".join(deltas) == part.text
    assert final.reasoning is not None
    assert final.reasoning.summary == next(iter(asked.values()))
    # The next request gives it back, whole.
    again = [{"role": "user", "content": "Weather?"}, *(item.to_dict() for item in final.output)]
    asking = client.responses.create(model=thinking.model, input=again, tools=TOOLS)
    request, _ = await answered(thinking, asking, "It rains.")
    assert request.messages is not None
    assert (request.messages[1].reasoning or "").strip() == "Where is it?"


async def test_streamed_call_is_told_as_it_is_written(thinking: WireWorker, client: openai.AsyncOpenAI) -> None:
    asking = streamed(client, model=thinking.model, input="Weather?", tools=TOOLS)
    _, (events, final) = await answered(thinking, asking, THOUGHT)
    assert [event.sequence_number for event in events] == list(range(len(events)))
    deltas: dict[str, str] = {}
    for event in events:
        if event.type in ("response.reasoning_text.delta", "response.function_call_arguments.delta"):
            deltas[event.type] = deltas.get(event.type, "") + event.delta
    assert deltas["response.reasoning_text.delta"].strip() == "Where is it?"
    call = final.output[-1]
    assert isinstance(call, ResponseFunctionToolCall)
    assert deltas["response.function_call_arguments.delta"] == call.arguments
    assert json.loads(call.arguments) == {"place": "Köln"}
    done = [event.item.type for event in events if event.type == "response.output_item.done"]
    assert done == ["reasoning", "message", "function_call"]


async def test_background_call_is_read_from_the_result(
    thinking: WireWorker, client: openai.AsyncOpenAI, nats_url: str
) -> None:
    async with batch_worker(nats_url, thinking.model) as batch:
        response = await client.responses.create(
            model=thinking.model,
            input="hi",
            tools=TOOLS,
            background=True,
            include=["reasoning.encrypted_content"],
        )
        await batch.end(await batch.take(), THOUGHT)
        done = await client.responses.retrieve(response.id)
        assert [item.type for item in done.output] == ["reasoning", "message", "function_call"]
        assert isinstance(done.output[0], ResponseReasoningItem)
        assert done.output[0].encrypted_content
        stream = await client.responses.retrieve(response.id, stream=True)
        events = [event async for event in stream]
        assert events[-1].type == "response.completed"
        assert events[-1].response.to_dict() == done.to_dict()


async def test_effort_and_verbosity_reach_the_template(worker: WireWorker, client: openai.AsyncOpenAI) -> None:
    for effort, variables in (("low", {"reasoning_effort": "low", "enable_thinking": True, "thinking": True}),
                              ("none", {"enable_thinking": False, "thinking": False})):  # fmt: skip
        fields: dict[str, Any] = {"reasoning": {"effort": effort, "summary": "auto"}, "text": {"verbosity": "low"}}
        request, answer = await answered(worker, client.responses.create(model=worker.model, input="x", **fields))
        assert request.chat is not None
        assert json.loads(request.chat.variables or "{}") == {"verbosity": "low", **variables}
        assert answer.reasoning is not None


class Point(BaseModel):
    x: int
    y: int


async def test_format_becomes_a_grammar_and_is_parsed(worker: WireWorker, client: openai.AsyncOpenAI) -> None:
    asking = client.responses.parse(model=worker.model, input="x", text_format=Point)
    request, response = await answered(worker, asking, '{"x": 1, "y": 2}')
    assert request.sampling.grammar is not None
    assert json.loads(request.sampling.grammar.source)["required"] == ["x", "y"]
    assert response.output_parsed == Point(x=1, y=2)


async def test_item_that_is_referred_to_twice_is_refused(thinking: WireWorker, client: openai.AsyncOpenAI) -> None:
    """It would be stored as often, however large it is."""
    _, answer = await answered(thinking, client.responses.create(model=thinking.model, input="Weather?"), "Rain.")
    reference: Any = {"type": "item_reference", "id": answer.output[0].id}
    with pytest.raises(openai.BadRequestError, match="twice") as refusal:
        await client.responses.create(model=thinking.model, input=[reference, reference])
    assert refusal.value.param == "input.[1].id"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [*TOOLS, {"type": "mcp", "server_label": "a"}]}, "tools.[1].type"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "name": "other"}}, "tool_choice"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"text": {"unknown": 1}}, "text.unknown"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "https://a.test/a.png"}]}]},
            "input.[0].content.[0].image_url",
        ),
        ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input.[0].id"),
        ({"input": [{"role": "user", "content": "x"}, {"type": "item_reference"}]}, "input.[1].id"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"truncation": "middle"}, "truncation"),
        ({"no_such_name": 1}, "no_such_name"),
    ],
)
async def test_what_is_not_served_is_refused_by_name(
    worker: WireWorker, client: openai.AsyncOpenAI, fields: dict[str, Any], param: str
) -> None:
    with pytest.raises(openai.APIStatusError) as refusal:
        await client.responses.create(**{"model": worker.model, "input": "x"}, extra_body=fields)  # type: ignore[call-overload]
    assert (refusal.value.status_code in (400, 404), refusal.value.body["param"]) == (True, param)  # type: ignore[index]


def function(name: str) -> dict[str, Any]:
    return {"type": "function", "name": name, "description": "d", "parameters": {"type": "object"}, "strict": False}


def namespace(name: str, *tools: dict[str, Any]) -> dict[str, Any]:
    return {"type": "namespace", "name": name, "description": "Other agents.", "tools": list(tools)}


NAMESPACES: list[Any] = [
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
    asking = client.responses.create(model=thinking.model, input="Go.", tools=NAMESPACES)
    request, answer = await answered(thinking, asking, f"<think>\n\n</think>\n\n{CALLS}")
    assert request.chat is not None
    shown = [tool["function"]["name"] for tool in json.loads(request.chat.tools or "")]
    assert shown == ["wait", "spawn", "agents__wait", "jobs__wait"]
    assert calls_of(answer.output) == NAMES
    assert [tool.to_dict() for tool in answer.tools] == NAMESPACES
    calls = [item for item in answer.output if isinstance(item, ResponseFunctionToolCall)]
    results: list[Any] = [{"type": "function_call_output", "call_id": call.call_id, "output": "ok"} for call in calls]
    conversations: list[dict[str, Any]] = [
        {"input": results, "previous_response_id": answer.id},
        {"input": [{"role": "user", "content": "Go."}, *(call.to_dict() for call in calls), *results]},
    ]
    for fields in conversations:
        asking = client.responses.create(model=thinking.model, tools=NAMESPACES, **fields)
        request, done = await answered(thinking, asking, "Done.")
        assert done.output_text == "Done."
        assert request.messages is not None
        _, assistant, *tools = request.messages
        assert [call.name for call in assistant.tool_calls] == shown
        assert [tool.name for tool in tools] == shown


async def test_background_call_names_its_namespace(
    thinking: WireWorker, client: openai.AsyncOpenAI, nats_url: str
) -> None:
    async with batch_worker(nats_url, thinking.model) as batch:
        answer = await client.responses.create(model=thinking.model, input="hi", tools=NAMESPACES, background=True)
        await batch.end(await batch.take(), f"<think>\n\n</think>\n\n{CALLS}")
        assert calls_of((await client.responses.retrieve(answer.id)).output) == NAMES


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
    assert refused(response, tools=tools).param == param
