"""Arbitrary input: either something that can be put on the wire, or a 400 with the four keys."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.api.schemas.bodies import ChatBody, CompletionBody
from gateway.api.schemas.parsing import parse_chat, parse_completion, parse_detokenize, parse_tokenize
from gateway.errors import ApiError
from gateway.generation import Generation
from shared.messages import Request, decode_request, encode

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
