"""An agent's turns through the whole system: the demo model is made to call, and reads what its calls gave."""

from __future__ import annotations

import json
from typing import Any

import pytest
from openai import OpenAI
from openai.types.chat import ChatCompletionMessageParam, ChatCompletionToolParam

from tests.integration.system import System

TOOL: ChatCompletionToolParam = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Says the weather.",
        "strict": True,
        "parameters": {
            "type": "object",
            "properties": {"city": {"enum": ["Oslo", "Lima"]}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
            "required": ["city", "days"],
            "additionalProperties": False,
        },
    },
}
ASKED: list[ChatCompletionMessageParam] = [{"role": "user", "content": "How is the weather?"}]


@pytest.mark.parametrize("stream", [False, True])
def test_loop_of_an_agent_calls_and_reads_the_results(system: System, stream: bool) -> None:
    client = system.client()
    _run_loop(client, system.model, stream)


def _run_loop(client: OpenAI, model: str, stream: bool) -> None:
    messages: list[Any] = [*ASKED]
    for turn in range(3):
        arguments: dict[str, Any] = {"model": model, "messages": messages, "tools": [TOOL], "seed": turn}
        arguments |= {"tool_choice": "required", "parallel_tool_calls": False, "max_tokens": 100}
        if stream:
            with client.chat.completions.stream(**arguments) as events:
                answer: Any = events.get_final_completion()
        else:
            answer = client.chat.completions.create(**arguments)
        [choice] = answer.choices
        assert choice.finish_reason == "tool_calls"
        [call] = choice.message.tool_calls
        given = json.loads(call.function.arguments)
        assert (call.function.name, set(given)) == ("get_weather", {"city", "days"})
        assert given["city"] in ("Oslo", "Lima")
        assert 1 <= given["days"] <= 9
        messages.append(choice.message.model_dump(exclude_none=True))
        messages.append({"role": "tool", "tool_call_id": call.id, "content": "Sunny."})
    last = client.chat.completions.create(model=model, messages=messages, tools=[TOOL], max_tokens=8)
    assert last.usage.prompt_tokens > 200


def test_a_schema_that_cannot_be_compiled_loosens_its_tool_however_often_it_is_sent(system: System) -> None:
    elsewhere = {"type": "function", "function": {"name": "f", "parameters": {"$ref": "http://example.com/schema"}}}
    arguments: dict[str, Any] = {"tools": [TOOL, elsewhere], "tool_choice": "required", "max_tokens": 4}
    client = system.client()
    # The verdict is remembered: a later request waits for nothing before it.
    for _ in range(5):
        answer = client.chat.completions.create(model=system.model, messages=ASKED, **arguments)
        assert answer.choices[0].finish_reason == "length"


def test_tokenizer_counts_tools_and_history_as_the_answer_does(system: System) -> None:
    call = {"id": "call_1", "type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Oslo"}'}}
    history = [
        *ASKED,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "Sunny."},
    ]
    counts = {}
    for name, tools in (("with", [TOOL]), ("without", None)):
        body = {"model": system.model, "messages": history, "tools": tools}
        reply = system.post("/tokenize", body)
        answer = system.post("/v1/chat/completions", body | {"max_tokens": 1})
        counts[name] = reply.json()["count"]
        assert answer.json()["usage"]["prompt_tokens"] == counts[name]
    assert counts["with"] > counts["without"] + 50


def test_template_of_a_request_is_not_allowed_by_default(system: System) -> None:
    body = {"model": system.model, "messages": ASKED, "chat_template": "mine"}
    answer = system.post("/v1/chat/completions", body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "chat_template")
