"""Bodies of `/tokenize`: what is not served is refused by name."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from gateway.api.schemas import parse_tokenize
from gateway.errors import ApiError

MESSAGES = [{"role": "user", "content": "a"}]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("chat_template", "{{ messages }}"),
        ("chat_template_kwargs", {"enable_thinking": False}),
        ("continue_final_message", True),
        ("return_token_strs", True),
        ("tools", [{"type": "function"}]),
    ],
)
def test_parameter_of_vllm_that_would_change_the_tokens_or_the_answer_is_refused(name: str, value: Any) -> None:
    with pytest.raises(ApiError) as raised:
        parse_tokenize(msgspec.json.encode({"messages": MESSAGES, name: value}))
    assert (raised.value.status, raised.value.param, raised.value.code) == (400, name, "unsupported_parameter")


@pytest.mark.parametrize(
    ("name", "value"), [("return_token_strs", False), ("continue_final_message", False), ("tools", None)]
)
def test_unsupported_parameter_that_changes_nothing_is_accepted(name: str, value: Any) -> None:
    _, call = parse_tokenize(msgspec.json.encode({"messages": MESSAGES, name: value}))
    assert call.messages is not None
