"""Images of earlier turns become a note where the operator allows it; those of the last turn stay, and are refused."""

from __future__ import annotations

import json
from typing import Any

import pytest

from gateway.anthropic.parsing import parse_messages
from gateway.api.schemas import parse_chat
from gateway.api.schemas.decoding import NOTE, without_old_images
from gateway.api.schemas.known_names import BodyRules
from gateway.errors import ApiError

ALLOWED = BodyRules(replaces_old_images=True)
IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
SEEN = {"role": "user", "content": [{"type": "text", "text": "See: "}, IMAGE]}
ANSWER, NEXT = {"role": "assistant", "content": "A cat."}, {"role": "user", "content": "Thanks."}


def chat(*messages: Any) -> bytes:
    return json.dumps({"model": "m", "messages": messages}).encode()


def test_image_of_an_earlier_turn_becomes_a_note() -> None:
    generation = parse_chat(chat(SEEN, ANSWER, NEXT), ALLOWED)
    assert [each.content for each in generation.prompts[0].messages or ()] == [f"See: {NOTE}", "A cat.", "Thanks."]


@pytest.mark.parametrize(("rules", "messages"), [(BodyRules(), (SEEN, ANSWER, NEXT)), (ALLOWED, (ANSWER, SEEN))])
def test_image_is_refused_in_the_last_turn_and_without_the_setting(rules: BodyRules, messages: tuple[Any, ...]) -> None:
    with pytest.raises(ApiError, match="Send text"):
        parse_chat(chat(*messages), rules)


def test_image_in_the_result_of_a_tool_becomes_a_note_for_anthropics_clients() -> None:
    block = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"}}
    use = {"type": "tool_use", "id": "t1", "name": "look", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "t1", "content": [block]}
    turns = [
        {"role": "user", "content": "Look."},
        {"role": "assistant", "content": [use]},
        {"role": "user", "content": [result]},
        {"role": "assistant", "content": "A cat."},
        {"role": "user", "content": "Thanks."},
    ]
    body = json.dumps({"model": "m", "max_tokens": 1, "messages": turns}).encode()
    generation = parse_messages(body, ALLOWED)
    assert NOTE in [each.content for each in generation.prompts[0].messages or ()]


def test_image_of_an_earlier_item_of_a_response_becomes_a_note() -> None:
    items = [{"role": "user", "content": [{"type": "input_image", "image_url": "u"}]}, ANSWER, NEXT]
    changed = json.loads(without_old_images(json.dumps({"model": "m", "input": items}).encode()))
    assert changed["input"][0]["content"] == [{"type": "input_text", "text": NOTE}]
    assert changed["input"][1:] == items[1:]


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b'"image"',
        b'["image"]',
        b'{"messages":"image", "x": "image"}',
        b'{"x": "image", "messages": [5]}',
        b'{"image": ' + b"[" * 100_000,
    ],
)
def test_body_that_is_something_else_stays_as_it_is(body: bytes) -> None:
    assert without_old_images(body) == body
