"""pydantic-ai: agents that loop over tools, by OpenAI's chat, its Responses, and Anthropic's Messages."""

from __future__ import annotations

from typing import Annotated, Literal

from cells import CALLING, KEY, MODEL, NUM_TURNS, THINKING, URL, run
from pydantic import BaseModel, Field
from pydantic_ai import Agent, ModelRetry, NativeOutput, ToolOutput
from pydantic_ai.direct import model_request_sync
from pydantic_ai.exceptions import UnexpectedModelBehavior
from pydantic_ai.messages import ModelRequest, ThinkingPart
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.anthropic import AnthropicProvider
from pydantic_ai.providers.openai import OpenAIProvider
from pydantic_ai.usage import UsageLimits

OPENAI = OpenAIProvider(base_url=f"{URL}/v1", api_key=KEY)
ANTHROPIC = AnthropicProvider(base_url=URL, api_key=KEY)
THINKING_OPENAI = OpenAIProvider(base_url=f"{THINKING.url}/v1", api_key=THINKING.key)
THINKING_ANTHROPIC = AnthropicProvider(base_url=THINKING.url, api_key=THINKING.key)
CHAT = OpenAIChatModel(MODEL, provider=OPENAI)
# The demo model would go on calling.
ONE_CALL = {"max_tokens": 300, "parallel_tool_calls": False}


class Person(BaseModel):
    """Somebody."""

    name: str = Field(max_length=8)
    age: int = Field(ge=0, le=120)


class Choice(BaseModel):
    """One of two, without bounds: the library takes them out of what it sends to Anthropic."""

    name: Literal["one", "other"]


class Point(BaseModel):
    """Somewhere."""

    places: dict[Literal["x", "y"], Annotated[int, Field(ge=0, le=99)]]


def chat() -> None:
    assert Agent(CHAT, model_settings={"max_tokens": 8}).run_sync("hello").output


def json_schema() -> None:
    agent = Agent(CHAT, output_type=NativeOutput(Person, strict=True), model_settings={"max_tokens": 400})
    assert isinstance(agent.run_sync("somebody").output, Person)


def tool_output() -> None:
    agent = Agent(CHAT, output_type=ToolOutput(Person, strict=True), model_settings=ONE_CALL)
    assert isinstance(agent.run_sync("somebody").output, Person)


def loop(model: object, num_turns: int = NUM_TURNS, output: type[BaseModel] = Person) -> None:
    """Let an agent call its tool, which sends it back until the last turn.

    What the library writes of a turn is long: of Messages, the demo model's context holds ten.
    """
    num_calls = 0
    agent = Agent(model, output_type=ToolOutput(output, strict=True), model_settings=ONE_CALL, retries=num_turns)

    @agent.output_validator
    def stored(person: BaseModel) -> BaseModel:
        nonlocal num_calls
        num_calls += 1
        if num_calls < num_turns:
            raise ModelRetry("next")
        return person

    result = agent.run_sync("somebody", usage_limits=UsageLimits(request_limit=2 * num_turns))
    assert isinstance(result.output, output)
    assert num_calls == num_turns, num_calls


def response() -> None:
    agent = Agent(OpenAIResponsesModel(MODEL, provider=OPENAI), model_settings={"max_tokens": 16})
    assert agent.run_sync("hello").output


def anthropic_messages() -> None:
    assert Agent(AnthropicModel(MODEL, provider=ANTHROPIC), model_settings={"max_tokens": 8}).run_sync("hello").output


def thoughts(model: object, **settings: object) -> None:
    """Ask once, and again with what was thought."""
    messages: list[object] = [ModelRequest.user_text_prompt("hello")]
    for _ in range(2):
        answer = model_request_sync(model, messages, model_settings={"max_tokens": 16, **settings})
        assert any(isinstance(part, ThinkingPart) and part.content for part in answer.parts), answer
        messages += [answer, ModelRequest.user_text_prompt("again")]


def records() -> None:
    agent = Agent(CHAT, output_type=NativeOutput(Point, strict=True), model_settings={"max_tokens": 200})
    assert set(agent.run_sync("where").output.places) <= {"x", "y"}


def tool_not_offered(model: object) -> None:
    """Let an agent tell the model that there is no such tool, until it gives up."""
    agent = Agent(model, model_settings={"max_tokens": 50}, retries=1)

    # A strict tool would be the only one that the model can call.
    @agent.tool_plain(strict=False)
    def person(name: str) -> str:
        return name

    try:
        agent.run_sync("somebody")
    except UnexpectedModelBehavior as error:
        assert "nobody" in f"{error} {error.__cause__}", error
    else:
        raise AssertionError("an agent ran a tool that it does not have")


run(
    {
        "chat": chat,
        "JSON schema": json_schema,
        "tool call": tool_output,
        "loop of tool calls": lambda: loop(CHAT),
        "Responses with tools": lambda: loop(OpenAIResponsesModel(MODEL, provider=OPENAI)),
        "Messages with tools": lambda: loop(AnthropicModel(MODEL, provider=ANTHROPIC), 10, Choice),
        "Responses": response,
        "Messages": anthropic_messages,
        "reasoning in chat": lambda: thoughts(OpenAIChatModel(THINKING.model, provider=THINKING_OPENAI)),
        "reasoning as summaries": lambda: thoughts(
            OpenAIResponsesModel(THINKING.model, provider=THINKING_OPENAI), openai_reasoning_summary="auto"
        ),
        "records": records,
        "call of a tool that was not offered": lambda: tool_not_offered(
            OpenAIChatModel(CALLING.model, provider=OpenAIProvider(base_url=f"{CALLING.url}/v1", api_key=CALLING.key))
        ),
        "thinking": lambda: thoughts(AnthropicModel(THINKING.model, provider=THINKING_ANTHROPIC)),
    }
)
