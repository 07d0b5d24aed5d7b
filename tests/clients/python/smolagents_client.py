"""smolagents: its model for servers with OpenAI's API, and an agent that writes code."""

from __future__ import annotations

import json

from cells import KEY, MODEL, SCHEMA, URL, check_person, run
from smolagents import CodeAgent, OpenAIServerModel
from smolagents.utils import AgentError

MESSAGES = [{"role": "user", "content": [{"type": "text", "text": "Somebody, please."}]}]


def model(**options: object) -> OpenAIServerModel:
    return OpenAIServerModel(model_id=MODEL, api_base=f"{URL}/v1", api_key=KEY, **options)


def chat() -> None:
    answer = model(max_tokens=8)(MESSAGES)
    assert answer.content
    assert answer.token_usage.output_tokens <= 8


def stream() -> None:
    deltas = list(model(max_tokens=8).generate_stream(MESSAGES))
    assert "".join(delta.content or "" for delta in deltas)
    assert deltas[-1].token_usage.output_tokens <= 8


def json_schema() -> None:
    wanted = {"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA, "strict": True}}
    check_person(json.loads(model(max_tokens=400)(MESSAGES, response_format=wanted).content))


def turn() -> None:
    # Its own instructions are longer than the demo model's context.
    agent = CodeAgent(tools=[], model=model(max_tokens=20), max_steps=1, verbosity_level=0)
    agent.prompt_templates["system_prompt"] = "Write Python."
    try:
        agent.run("Say hello.")
    except AgentError as error:
        # The demo model writes no blocks of code.
        assert "code" in str(error), error
    assert agent.memory.steps[1].token_usage.output_tokens <= 20


run({"chat": chat, "stream with usage": stream, "JSON schema": json_schema, "turn of an agent": turn})
