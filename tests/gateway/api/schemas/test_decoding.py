"""What a body that is no JSON is told."""

from __future__ import annotations

import json
from typing import Literal

import pytest
from msgspec import Struct, field

from gateway.api.schemas.decoding import allowed_values
from gateway.api.schemas.names import BodyRules
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


@pytest.mark.parametrize(
    "body",
    [
        b'{"prompt": [' + b"[1]," * 200_000 + b"[1]]" + b" " * (1 << 20) + b"}",
        b'{"stop": [' + b'"a",' * (1 << 22) + b'"a"]}',
        b'{"prompt": "' + b'\\"' * (1 << 20) + b'", "messages": [' + b"{}," * 200_000 + b"{}]}",
    ],
)
def test_body_of_too_many_values_is_refused_before_it_is_decoded(body: bytes) -> None:
    with pytest.raises(ApiError, match="more than 100000 lists and objects, or 2097152 commas") as caught:
        parse_chat(body)
    assert (caught.value.status, caught.value.code) == (413, "request_too_large")


def test_texts_may_have_any_number_of_commas_and_brackets() -> None:
    text = '[{"a\\": 1}],' * 400_000
    assert parse_chat(json.dumps({"model": "m", "messages": [{"role": "user", "content": text}]}).encode())
