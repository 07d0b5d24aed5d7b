"""What is told to those who write the form of one API into a body of another."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from gateway.generation import Generation
from tests.gateway.parsed_bodies import chat, message, response
from tests.gateway.refusals import refused

_SCHEMA = {"type": "object", "properties": {"a": {"type": "string"}}}
_CHAT_TOOL = {"type": "function", "function": {"name": "f", "parameters": _SCHEMA}}
_RESPONSES_TOOL = {"type": "function", "name": "f", "parameters": _SCHEMA}
_ANTHROPIC_TOOL = {"name": "f", "input_schema": _SCHEMA}


def told(ask: Callable[..., Generation], **fields: Any) -> str:
    return refused(ask, **fields).message


def test_tool_of_another_api_is_told_its_form_here() -> None:
    assert told(response, tools=[_CHAT_TOOL]).endswith("Write its fields into the tool itself.")
    assert told(message, tools=[_CHAT_TOOL]).endswith("Write its fields into the tool itself.")
    assert told(message, tools=[_RESPONSES_TOOL]).endswith("Name it 'input_schema'.")
    assert "Put it into `function`" in told(chat, tools=[_ANTHROPIC_TOOL])


def test_choice_of_another_api_is_told_its_form_here() -> None:
    named = {"type": "function", "function": {"name": "f"}}
    assert told(chat, tools=[_CHAT_TOOL], tool_choice={"type": "function", "name": "f"}).endswith(
        "Write it into 'tool_choice.function'."
    )
    assert "'tool_choice.name'" in told(response, tools=[_RESPONSES_TOOL], tool_choice=named)
    assert "must be a text" in told(response, tools=[_RESPONSES_TOOL], tool_choice={"type": "any"})
    assert told(message, tools=[_ANTHROPIC_TOOL], tool_choice=named) == (
        "'tool_choice.type' must be one of auto, any, tool, none."
    )


def test_schema_in_another_place_is_told_its_own() -> None:
    bare = {"type": "json_schema", "json_schema": _SCHEMA}
    assert "'response_format.json_schema.schema'" in told(chat, response_format=bare)
    flat = {"type": "json_schema", "schema": _SCHEMA}
    assert "'response_format.json_schema.schema'" in told(chat, response_format=flat)
    assert "'response_format.json_schema.schema'" in told(chat, response_format=_SCHEMA)


def test_unknown_names_are_told_what_to_do() -> None:
    assert "into the body itself" in told(chat, extra_body={"top_k": 1})
    assert "--allow-unknown-parameters" in told(chat, ttl=5)
    assert told(message, messages=[{"role": "USER", "content": "x"}]) == (
        "'messages.[0].role' must be one of user, assistant, system."
    )


def test_missing_model_is_told_where_models_are_listed() -> None:
    assert "GET /v1/models" in told(chat, model=None)
