"""What a body that is no JSON is told."""

from __future__ import annotations

import json
from typing import Any, Literal

import pytest
from msgspec import Struct, field

from gateway.anthropic.parsing import parse_messages
from gateway.api.schemas.decoding import NOTE, allowed_values, without_old_images
from gateway.api.schemas.known_names import BodyRules
from gateway.api.schemas.parsing import parse_chat
from gateway.errors import ApiError


@pytest.mark.parametrize(
    ("body", "told"),
    [
        (b"", "The body is empty"),
        (b" \n", "The body is empty"),
        (b"\xef\xbb\xbf{}", "byte order mark"),
        (b"{'model': 'm'}", "Write double quotes"),
        (b"'{model: m}'", "Write double quotes"),
        (b'{"stream": True}', "in the value of 'stream'"),
        (b'{"stream": True}', "Write true, false or null"),
        (b'{"stop": None}', "Write true, false or null"),
        (b"model=m&prompt=x", "Send a JSON object, no form"),
        (b'--boundary\r\nContent-Disposition: form-data; name="model"', "Send a JSON object, no form"),
        (b'{"model": "m",}', "trailing comma in object (byte 14)."),
    ],
)
def test_body_that_is_no_json_is_told_what_to_write(body: bytes, told: str) -> None:
    with pytest.raises(ApiError) as caught:
        parse_chat(body)
    assert (caught.value.status, caught.value.code) == (400, "invalid_json")
    assert told in caught.value.message


class Inner(Struct, rename={"kind": "type"}):
    kind: Literal["a", "b"] | None = None
    other: list[Literal["c"]] = field(default_factory=list)


class Outer(Struct):
    inner: Inner | str
    inners: list[Inner]


@pytest.mark.parametrize(
    ("place", "allowed"),
    [
        ("inner.type", ["a", "b"]),
        ("inners.[12].type", ["a", "b"]),
        ("inners.[0].other.[3]", ["c"]),
        ("inners.[0]", []),
        ("nothing", []),
    ],
)
def test_values_of_a_place_are_those_of_its_type(place: str, allowed: list[str]) -> None:
    assert allowed_values(Outer, place) == allowed


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


@pytest.mark.parametrize(
    ("of_path", "only", "model"),
    [("of-path", "only", "of-path"), ("of-path", None, "of-path"), (None, "only", "only")],
)
@pytest.mark.parametrize("named", [{}, {"model": None}])
def test_body_that_names_no_model_is_for_that_of_its_path_or_else_the_only_one(
    of_path: str | None, only: str | None, model: str, named: dict[str, None]
) -> None:
    rules = BodyRules(only_model=lambda: only, model=of_path)
    messages = [{"role": "user", "content": "hello"}]
    assert parse_chat(json.dumps({"messages": messages, **named}).encode(), rules).model == model
    # The path's takes the place of the one that a body names, too.
    body = json.dumps({"messages": messages, "model": "named"}).encode()
    assert parse_chat(body, rules).model == (of_path or "named")
