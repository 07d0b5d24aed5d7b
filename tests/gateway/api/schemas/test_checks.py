"""What is told to those who write the form of one API into a body of another."""

from __future__ import annotations

import json
from typing import Any

import pytest

from gateway.anthropic.parsing import parse_messages
from gateway.api.schemas.parsing import parse_chat
from gateway.errors import ApiError
from gateway.responses.request import own_items, parse_body, to_generation

_SCHEMA = {"type": "object", "properties": {"a": {"type": "string"}}}
_CHAT_TOOL = {"type": "function", "function": {"name": "f", "parameters": _SCHEMA}}
_RESPONSES_TOOL = {"type": "function", "name": "f", "parameters": _SCHEMA}
_ANTHROPIC_TOOL = {"name": "f", "input_schema": _SCHEMA}


def told_by_chat(**fields: Any) -> str:
    body = {"model": "m", "messages": [{"role": "user", "content": "x"}], **fields}
    with pytest.raises(ApiError) as caught:
        parse_chat(json.dumps(body).encode())
    return caught.value.message


def told_by_responses(**fields: Any) -> str:
    with pytest.raises(ApiError) as caught:
        _generation(json.dumps({"model": "m", "input": "x", **fields}).encode())
    return caught.value.message


def _generation(body: bytes) -> None:
    request = parse_body(body)
    to_generation(request, [], own_items(request), ())


def told_by_messages(**fields: Any) -> str:
    body = {"model": "m", "max_tokens": 1, "messages": [{"role": "user", "content": "x"}], **fields}
    with pytest.raises(ApiError) as caught:
        parse_messages(json.dumps(body).encode())
    return caught.value.message


def test_tool_of_another_api_is_told_its_form_here() -> None:
    assert told_by_responses(tools=[_CHAT_TOOL]).endswith("Write its fields into the tool itself.")
    assert told_by_messages(tools=[_CHAT_TOOL]).endswith("Write its fields into the tool itself.")
    assert told_by_messages(tools=[_RESPONSES_TOOL]).endswith("Name it 'input_schema'.")
    assert "Put it into `function`" in told_by_chat(tools=[_ANTHROPIC_TOOL])


def test_choice_of_another_api_is_told_its_form_here() -> None:
    named = {"type": "function", "function": {"name": "f"}}
    assert told_by_chat(tools=[_CHAT_TOOL], tool_choice={"type": "function", "name": "f"}).endswith(
        "Write it into 'tool_choice.function'."
    )
    assert "'tool_choice.name'" in told_by_responses(tools=[_RESPONSES_TOOL], tool_choice=named)
    assert "must be a text" in told_by_responses(tools=[_RESPONSES_TOOL], tool_choice={"type": "any"})
    assert told_by_messages(tools=[_ANTHROPIC_TOOL], tool_choice=named) == (
        "'tool_choice.type' must be one of auto, any, tool, none."
    )


def test_schema_in_another_place_is_told_its_own() -> None:
    bare = {"type": "json_schema", "json_schema": _SCHEMA}
    assert "'response_format.json_schema.schema'" in told_by_chat(response_format=bare)
    flat = {"type": "json_schema", "schema": _SCHEMA}
    assert "'response_format.json_schema.schema'" in told_by_chat(response_format=flat)
    assert "'response_format.json_schema.schema'" in told_by_chat(response_format=_SCHEMA)


def test_unknown_names_are_told_what_to_do() -> None:
    assert "into the body itself" in told_by_chat(extra_body={"top_k": 1})
    assert "--allow-unknown-parameters" in told_by_chat(ttl=5)
    assert told_by_messages(messages=[{"role": "USER", "content": "x"}]) == (
        "'messages.[0].role' must be one of user, assistant, system."
    )


def test_missing_model_is_told_where_models_are_listed() -> None:
    with pytest.raises(ApiError, match="GET /v1/models"):
        parse_chat(b'{"messages": [{"role": "user", "content": "x"}]}')
