"""Bodies of `/tokenize`: what a template gets is counted, and what is not served is refused by name."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from gateway.api.schemas import parse_tokenize
from gateway.errors import ApiError
from shared.conversation import ChatOptions

MESSAGES = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
TOOL = '[{"type":"function","function":{"name":"f","parameters":{"type":"object","properties":{}}}}]'


@pytest.mark.parametrize(
    ("fields", "options"),
    [
        ({}, None),
        ({"tools": None, "continue_final_message": False, "chat_template_kwargs": {}}, None),
        ({"add_generation_prompt": False}, ChatOptions(add_generation_prompt=False)),
        ({"continue_final_message": True}, ChatOptions(add_generation_prompt=False, continue_final_message=True)),
        ({"chat_template": "{{ messages }}"}, ChatOptions(template="{{ messages }}")),
        ({"chat_template_kwargs": {"enable_thinking": False}}, ChatOptions(variables='{"enable_thinking":false}')),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, ChatOptions(tools=TOOL)),
    ],
)
def test_what_the_template_gets_is_passed_on(fields: dict[str, Any], options: ChatOptions | None) -> None:
    _, call = parse_tokenize(msgspec.json.encode({"messages": MESSAGES, **fields}))
    assert call.chat == options


def test_name_of_a_model_that_is_too_long_for_a_subject_is_refused() -> None:
    with pytest.raises(ApiError) as raised:
        parse_tokenize(msgspec.json.encode({"model": "é" * 100, "prompt": "x"}))
    assert (raised.value.status, raised.value.param) == (400, "model")


def test_parameter_that_is_not_served_is_refused_unless_it_changes_nothing() -> None:
    with pytest.raises(ApiError) as raised:
        parse_tokenize(msgspec.json.encode({"messages": MESSAGES, "return_token_strs": True}))
    assert (raised.value.status, raised.value.param) == (400, "return_token_strs")
    _, call = parse_tokenize(msgspec.json.encode({"messages": MESSAGES, "return_token_strs": False}))
    assert call.messages is not None
