"""OpenAI's Agents SDK, on chat completions and on the Responses API."""

from __future__ import annotations

import asyncio
from typing import Literal

from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    SQLiteSession,
    function_tool,
    set_tracing_disabled,
)
from agents.exceptions import MaxTurnsExceeded
from cells import KEY, MODEL, NUM_TURNS, URL, run
from openai import AsyncOpenAI
from pydantic import BaseModel

# It sends traces to OpenAI otherwise.
set_tracing_disabled(True)
client = AsyncOpenAI(base_url=f"{URL}/v1", api_key=KEY, max_retries=0, timeout=120)
CHAT = OpenAIChatCompletionsModel(MODEL, openai_client=client)
RESPONSES = OpenAIResponsesModel(MODEL, openai_client=client)
SHORT = ModelSettings(max_tokens=8)
CALLING = ModelSettings(max_tokens=100, tool_choice="required", parallel_tool_calls=False)


class Choice(BaseModel):
    name: Literal["one", "other"]


@function_tool
def age(number: Literal[1, 2, 3]) -> str:
    """Store an age."""
    return "stored"


def answer(model: object, **more: object) -> object:
    return Runner.run_sync(Agent("a", instructions="Be brief.", model=model, model_settings=SHORT), "hello", **more)


def text(model: object) -> None:
    assert answer(model).final_output


def stream(model: object) -> None:
    async def kinds() -> set[str]:
        result = Runner.run_streamed(Agent("a", model=model, model_settings=SHORT), "hello")
        found = {event.type async for event in result.stream_events()}
        assert result.final_output
        return found

    assert "raw_response_event" in asyncio.run(kinds())


def schema(model: object) -> None:
    agent = Agent("a", model=model, output_type=Choice, model_settings=ModelSettings(max_tokens=60))
    assert Runner.run_sync(agent, "which").final_output.name in ("one", "other")


def tool_loop(model: object) -> None:
    agent = Agent("a", model=model, tools=[age], model_settings=CALLING, reset_tool_choice=False)
    try:
        Runner.run_sync(agent, "somebody", max_turns=NUM_TURNS)
    except MaxTurnsExceeded as stopped:
        calls = [item for item in stopped.run_data.new_items if item.type == "tool_call_output_item"]
        assert len(calls) == NUM_TURNS, calls
        assert all(call.output == "stored" for call in calls), calls
    else:
        raise AssertionError("a model that has to call a tool in every turn did not")


def handoff(model: object) -> None:
    other = Agent("other", model=model, model_settings=SHORT)
    assert Runner.run_sync(Agent("a", model=model, handoffs=[other], model_settings=CALLING), "hi").last_agent is other


def session(model: object) -> None:
    kept = SQLiteSession("kept")
    for _ in range(2):
        assert answer(model, session=kept).final_output
    assert len(asyncio.run(kept.get_items())) >= 4


def stored() -> None:
    first = answer(RESPONSES)
    assert answer(RESPONSES, previous_response_id=first.last_response_id).final_output


run(
    {
        "chat": lambda: text(CHAT),
        "stream": lambda: stream(CHAT),
        "JSON schema": lambda: schema(CHAT),
        "loop of tool calls": lambda: tool_loop(CHAT),
        "Responses": lambda: text(RESPONSES),
        "streamed Responses": lambda: stream(RESPONSES),
        "Responses with a schema": lambda: schema(RESPONSES),
        "Responses with tools": lambda: tool_loop(RESPONSES),
        "handoffs": lambda: [handoff(model) for model in (CHAT, RESPONSES)],
        "sessions": lambda: [session(model) for model in (CHAT, RESPONSES)],
        "stored conversations": stored,
    }
)
