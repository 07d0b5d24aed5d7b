"""OpenAI's Agents SDK, on chat completions and on the Responses API."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Literal

from agents import (
    Agent,
    Model,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    RunResult,
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
# It takes a response that a limit has ended for a failure. One answer in thirty repeats itself until then, if it may.
SHORT = ModelSettings(max_tokens=400, extra_body={"stop": ["("], "frequency_penalty": 1.0})
CALLING = ModelSettings(max_tokens=100, tool_choice="required", parallel_tool_calls=False)


class Choice(BaseModel):
    name: Literal["one", "other"]


def chat_model() -> OpenAIChatCompletionsModel:
    return OpenAIChatCompletionsModel(MODEL, openai_client=new_client())


def responses_model() -> OpenAIResponsesModel:
    return OpenAIResponsesModel(MODEL, openai_client=new_client())


def new_client() -> AsyncOpenAI:
    # One for each run: a client belongs to the event loop of its first request.
    return AsyncOpenAI(base_url=f"{URL}/v1", api_key=KEY, max_retries=0, timeout=120)


@function_tool
def age(number: Literal[1, 2, 3]) -> str:
    """Store an age."""
    return "stored"


def answer(new_model: Callable[[], Model], **more: object) -> RunResult:
    agent = Agent("a", instructions="Be brief.", model=new_model(), model_settings=SHORT)
    return Runner.run_sync(agent, "hello", **more)


def text(new_model: Callable[[], Model]) -> None:
    assert answer(new_model).final_output


def stream(new_model: Callable[[], Model]) -> None:
    async def kinds() -> set[str]:
        result = Runner.run_streamed(Agent("a", model=new_model(), model_settings=SHORT), "hello")
        found = {event.type async for event in result.stream_events()}
        assert result.final_output
        return found

    assert "raw_response_event" in asyncio.run(kinds())


def schema(new_model: Callable[[], Model]) -> None:
    agent = Agent("a", model=new_model(), output_type=Choice, model_settings=ModelSettings(max_tokens=60))
    assert Runner.run_sync(agent, "which").final_output.name in ("one", "other")


def tool_loop(new_model: Callable[[], Model]) -> None:
    agent = Agent("a", model=new_model(), tools=[age], model_settings=CALLING, reset_tool_choice=False)
    try:
        Runner.run_sync(agent, "somebody", max_turns=NUM_TURNS)
    except MaxTurnsExceeded as stopped:
        results = [item.output for item in stopped.run_data.new_items if item.type == "tool_call_output_item"]
        assert results == ["stored"] * NUM_TURNS, results
    else:
        raise AssertionError("a model that has to call a tool in every turn did not")


def handoffs() -> None:
    for new_model in (chat_model, responses_model):
        other = Agent("other", model=new_model(), model_settings=SHORT)
        agent = Agent("a", model=new_model(), handoffs=[other], model_settings=CALLING)
        assert Runner.run_sync(agent, "hello").last_agent is other


def sessions() -> None:
    for new_model in (chat_model, responses_model):
        kept = SQLiteSession(new_model.__name__)
        for _ in range(2):
            assert answer(new_model, session=kept).final_output
        assert len(asyncio.run(kept.get_items())) >= 4


def stored() -> None:
    first = answer(responses_model)
    assert answer(responses_model, previous_response_id=first.last_response_id).final_output


run(
    {
        "chat": lambda: text(chat_model),
        "stream": lambda: stream(chat_model),
        "JSON schema": lambda: schema(chat_model),
        "loop of tool calls": lambda: tool_loop(chat_model),
        "Responses": lambda: text(responses_model),
        "streamed Responses": lambda: stream(responses_model),
        "Responses with a schema": lambda: schema(responses_model),
        "Responses with tools": lambda: tool_loop(responses_model),
        "handoffs": handoffs,
        "conversations kept by the client": sessions,
        "conversations kept by the server": stored,
    }
)
