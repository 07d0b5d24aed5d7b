"""What a body that is no JSON is told."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, Literal
from unittest.mock import patch

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import Struct, field

from gateway.api.schemas import decoding
from gateway.api.schemas.bodies import ChatBody, CompletionBody
from gateway.api.schemas.decoding import allowed_values
from gateway.api.schemas.names import BodyRules
from gateway.api.schemas.parsing import parse_chat, parse_completion, parse_detokenize, parse_tokenize
from gateway.errors import ApiError
from gateway.generation import Generation
from shared.messages import Request, decode_request, encode


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


Values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.sampled_from(["text", "user"]),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=6), inner, max_size=4),
    max_leaves=8,
)
Names = st.sampled_from(sorted({*ChatBody.__struct_fields__, *CompletionBody.__struct_fields__}))
Small = st.integers(-1, 3) | st.floats(-1, 3) | st.booleans() | st.text(min_size=1, max_size=3)
Messages = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["user", "assistant", "nobody"]), "content": st.text(max_size=5) | Values},
        optional={"name": Values, "tool_calls": Values},
    ),
    max_size=3,
)
Bodies = st.fixed_dictionaries(
    {"model": st.just("m") | Values, "messages": Messages | Values, "prompt": st.text() | st.lists(st.integers(0, 9))},
).flatmap(lambda base: st.dictionaries(Names, Values | Small, max_size=4).map(lambda extra: {**base, **extra}))


def outcome(parse: Callable[[bytes], Any], body: bytes) -> Any:
    try:
        return parse(body)
    except ApiError as error:
        refusal = error
    assert refusal.status == 400
    assert set(msgspec.json.decode(refusal.body())["error"]) == {"message", "type", "param", "code"}
    return None


def assert_fits_the_wire(generation: Generation) -> None:
    for prompt in generation.prompts:
        request = Request(
            id="r",
            model=generation.model,
            messages=prompt.messages,
            text=prompt.text,
            token_ids=prompt.token_ids,
            sampling=generation.sampling,
            priority=generation.priority,
        )
        assert decode_request(encode(request)) == request


@pytest.mark.parametrize("parse", [parse_chat, parse_completion])
@given(body=Bodies)
@settings(max_examples=150)
def test_body_of_known_fields_is_a_generation_or_a_400(parse: Callable[[bytes], Generation], body: Any) -> None:
    generation = outcome(parse, json.dumps(body).encode())
    if generation is not None:
        assert_fits_the_wire(generation)


@pytest.mark.parametrize("parse", [parse_chat, parse_completion, parse_tokenize, parse_detokenize])
@given(body=st.binary(max_size=64) | Values.map(lambda value: json.dumps(value).encode()))
@settings(max_examples=60)
def test_any_bytes_are_understood_or_a_400(parse: Callable[[bytes], Any], body: bytes) -> None:
    outcome(parse, body)


@given(
    st.lists(st.sampled_from(["\\\\", r"\ud83d", r"\ude00", r"\uD83D", r"\n", "a", "b" * 12, "c" * 20])).map("".join)
)
def test_halves_of_surrogates_are_found_in_pieces_of_a_body_as_in_the_whole(text: str) -> None:
    found = []
    for size in (1 << 20, 16):
        with patch.object(decoding, "_PIECE_BYTES", size):
            found.append(decoding.without_lone_surrogates(text.encode()))
    assert found[0] == found[1]


def test_large_body_with_an_unknown_name_is_searched_in_pieces() -> None:
    """A search through all of it held the interpreter's lock, and streams of others waited for 0.4 s."""
    body = b'{"model": "m", "unknown": 1, "prompt": "%s"}' % (b"; " * (8 << 20))
    assert decoding.without_lone_surrogates(body) is body
    half = rb"\ud83d"
    assert max(map(len, decoding._pieces(body[:-2] + half + body[-2:]))) <= decoding._PIECE_BYTES + 2 * len(half)
