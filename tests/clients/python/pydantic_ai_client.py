"""pydantic-ai: agents that loop over tools, by OpenAI's chat, its Responses, and Anthropic's Messages."""

from __future__ import annotations

from cells import KEY, MODEL, NUM_TURNS, URL, run
from pydantic import BaseModel, Field
from pydantic_ai import Agent, NativeOutput, ToolOutput
from pydantic_ai.exceptions import UnexpectedModelBehavior, UsageLimitExceeded
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.anthropic import AnthropicProvider
from pydantic_ai.providers.openai import OpenAIProvider
from pydantic_ai.usage import UsageLimits

OPENAI = OpenAIProvider(base_url=f"{URL}/v1", api_key=KEY)
CHAT = OpenAIChatModel(MODEL, provider=OPENAI)


class Person(BaseModel):
    """Somebody."""

    name: str = Field(max_length=8)
    age: int = Field(ge=0, le=120)


def chat() -> None:
    assert Agent(CHAT, model_settings={"max_tokens": 8}).run_sync("hello").output


def json_schema() -> None:
    agent = Agent(CHAT, output_type=NativeOutput(Person, strict=True), model_settings={"max_tokens": 400})
    assert isinstance(agent.run_sync("somebody").output, Person)


def tool_output() -> None:
    agent = Agent(CHAT, output_type=ToolOutput(Person, strict=True), model_settings={"max_tokens": 400})
    assert isinstance(agent.run_sync("somebody").output, Person)


def loop(model: object) -> None:
    """Let an agent call its tools until its turns are used up: it is made to, and so never ends by itself."""
    agent = Agent(model, model_settings={"max_tokens": 300, "tool_choice": "required"})
    calls: list[int] = []

    @agent.tool_plain(strict=True)
    def add(a: int, b: int) -> int:
        """Add."""
        calls.append(a + b)
        return a + b

    try:
        agent.run_sync("add", usage_limits=UsageLimits(request_limit=NUM_TURNS))
    except (UsageLimitExceeded, UnexpectedModelBehavior) as error:
        assert "request_limit" in str(error), error
    assert len(calls) >= NUM_TURNS - 1, len(calls)


def response() -> None:
    agent = Agent(OpenAIResponsesModel(MODEL, provider=OPENAI), model_settings={"max_tokens": 16})
    assert agent.run_sync("hello").output


def anthropic_messages() -> None:
    model = AnthropicModel(MODEL, provider=AnthropicProvider(base_url=URL, api_key=KEY))
    assert Agent(model, model_settings={"max_tokens": 8}).run_sync("hello").output


run(
    {
        "chat": chat,
        "JSON schema": json_schema,
        "tool call": tool_output,
        "loop of tool calls": lambda: loop(CHAT),
        "Responses": response,
        "Messages": anthropic_messages,
    }
)
