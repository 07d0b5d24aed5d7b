"""Messages: roles, text parts, and what is not text."""

from __future__ import annotations

import json
from typing import Any

import pytest

from gateway.api.schemas import parse_chat
from gateway.errors import ApiError
from gateway.generation import Generation
from shared.conversation import ChatMessage


def parse(messages: Any, **fields: Any) -> Generation:
    return parse_chat(json.dumps({"model": "m", "messages": messages, **fields}).encode())


def refused(messages: Any, **fields: Any) -> ApiError:
    with pytest.raises(ApiError) as caught:
        parse(messages, **fields)
    assert caught.value.status == 400
    return caught.value


def test_text_parts_are_joined() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    generation = parse([{"role": "system", "content": "s"}, {"role": "user", "content": parts, "name": "bob"}])
    assert generation.prompts[0].messages == (
        ChatMessage(role="system", content="s"),
        ChatMessage(role="user", content="ab", name="bob"),
    )


@pytest.mark.parametrize("role", ["system", "developer", "user", "assistant", "tool", "function"])
def test_known_role_passes(role: str) -> None:
    assert parse([{"role": role, "content": "x", "tool_call_id": "1"}])


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ({"role": "root", "content": "x"}, "messages.[1].role"),
        ({"content": "x"}, "messages.[1].role"),
        ({"role": "user"}, "messages.[1].content"),
        ({"role": "user", "content": None}, "messages.[1].content"),
        ({"role": "user", "content": 5}, "messages.[1].content"),
        ({"role": "user", "content": "a\0b"}, "messages.[1].content"),
        (
            {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]},
            "messages.[1].content.[0].image_url",
        ),
        ({"role": "user", "content": [{"type": "input_audio"}]}, "messages.[1].content"),
        ({"role": "user", "content": [{"type": "text"}]}, "messages.[1].content"),
        ({"role": "user", "content": [{"type": "text", "text": 5}]}, "messages.[1].content.[0].text"),
        ({"role": "user", "content": "x", "name": "a\0b"}, "messages.[1].name"),
        ({"role": "user", "content": "x", "name": "x" * 257}, "messages.[1].name"),
        ({"role": "assistant", "content": None, "tool_calls": [{"id": "1"}]}, "messages.[1].tool_calls"),
        ({"role": "assistant", "content": "x", "function_call": {"name": "f"}}, "messages.[1].function_call"),
        ("x", "messages.[1]"),
    ],
)
def test_bad_message_is_named_by_its_place(message: Any, param: str) -> None:
    assert refused([{"role": "user", "content": "x"}, message]).param == param


def test_number_of_messages_is_bounded() -> None:
    assert refused([]).param == "messages"
    assert refused([{"role": "user", "content": "x"}] * 4097).param == "messages"


def test_logprobs_need_the_switch() -> None:
    messages = [{"role": "user", "content": "x"}]
    assert parse(messages, logprobs=True).sampling.logprobs == 0
    assert parse(messages, logprobs=True, top_logprobs=20).sampling.logprobs == 20
    assert parse(messages, logprobs=False, top_logprobs=0).sampling.logprobs is None
    assert refused(messages, top_logprobs=3).param == "top_logprobs"
    assert refused(messages, logprobs=True, top_logprobs=21).param == "top_logprobs"
    assert refused(messages, logprobs=3).param == "logprobs"


def test_output_is_unbounded_unless_asked_for() -> None:
    messages = [{"role": "user", "content": "x"}]
    assert parse(messages).sampling.max_tokens is None
    assert parse(messages, max_tokens=5).sampling.max_tokens == 5
    assert parse(messages, max_tokens=5, max_completion_tokens=6).sampling.max_tokens == 6
    assert refused(messages, max_completion_tokens=0).param == "max_completion_tokens"


def test_estimate_grows_with_bytes() -> None:
    short, long = (parse([{"role": "user", "content": text}]).estimated_prompt_tokens for text in ("é", "é" * 350))
    assert (short, long) == (5, 204)


@pytest.mark.parametrize(
    "content", ["the old text", [{"type": "text", "text": "the "}, {"type": "text", "text": "old text"}]]
)
def test_prediction_is_passed_on_as_text(content: Any) -> None:
    generation = parse([{"role": "user", "content": "x"}], prediction={"type": "content", "content": content})
    assert generation.prediction == "the old text"
    assert parse([{"role": "user", "content": "x"}], prediction=None).prediction is None


@pytest.mark.parametrize(
    ("prediction", "param"),
    [
        ({"type": "diff", "content": "x"}, "prediction.type"),
        ({"type": "content"}, "prediction.content"),
        ({"type": "content", "content": "a\0b"}, "prediction.content"),
        ({"type": "content", "content": [{"type": "image_url"}]}, "prediction.content"),
        ("x", "prediction"),
    ],
)
def test_bad_prediction_is_refused(prediction: Any, param: str) -> None:
    assert refused([{"role": "user", "content": "x"}], prediction=prediction).param == param
