"""Bodies that no one writes by hand: each becomes a generation that can be stored, or a 400."""

from __future__ import annotations

import json
import random
from typing import Any

import msgspec
import pytest

from gateway.errors import ApiError
from gateway.responses.body import ResponseBody
from gateway.responses.draft import ResponseDraft, response_fields
from gateway.responses.request import own_items, parse_body, to_generation

NAMES = ResponseBody.__struct_fields__
SCALARS: tuple[Any, ...] = (None, True, 0, -1, 1.5, 1e300, 256.0, "", "x", "a\0b", "\ud83d\ude00", 2**70, -(2**70))
_WORDS = (
    "auto none required function message reasoning function_call function_call_output item_reference json_schema "
    "json_object text user assistant system allowed_tools web_search input_text low"
)
_KEYS = (
    "type role content id call_id name arguments output summary encrypted_content text format schema strict parameters "
    "description mode tools namespace effort verbosity refusal other"
)


WORDS, KEYS = (list(map(str, names.split())) for names in (_WORDS, _KEYS))


def value(chance: random.Random, depth: int = 0) -> Any:
    kind = chance.random()
    if depth > 4 or kind < 0.15:
        return chance.choice(SCALARS)
    if kind < 0.35:
        return chance.choice(WORDS)
    if kind < 0.5:
        return [value(chance, depth + 1) for _ in range(chance.randint(0, 3))]
    return {chance.choice(KEYS): value(chance, depth + 1) for _ in range(chance.randint(0, 6))}


def check(body: dict[str, Any]) -> bool:
    """Return whether a body is accepted; whatever is refused otherwise than by a 400 counts as a failure."""
    try:
        request = parse_body(json.dumps(body).encode())
        draft = to_generation(request, [], own_items(request), ()).draft
    except ApiError as error:
        if error.status != 400:
            raise
        return False
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(draft), type=ResponseDraft) == draft
    response = json.loads(msgspec.json.encode(response_fields(draft, "queued")))
    assert (response["id"], response["status"]) == (draft.id, "queued")
    return True


@pytest.mark.parametrize("count", [1_000, pytest.param(100_000, marks=pytest.mark.slow)])
def test_body_made_by_chance_is_accepted_or_refused(count: int) -> None:
    chance = random.Random(5)
    num_accepted = 0
    for _ in range(count):
        body = {"model": "m", "input": chance.choice(("x", value(chance), [{"role": "user", "content": "x"}]))}
        body |= {chance.choice(NAMES): value(chance, 1) for _ in range(chance.randint(0, 3))}
        num_accepted += check({"model": "m"} | body)
    assert num_accepted > count / 20


def test_numbers_of_a_schema_are_repeated_as_they_were_written() -> None:
    schema = {"type": "object", "properties": {"a": {"maximum": 10**40, "minimum": 1.0}}}
    tool = {"type": "function", "name": "f", "parameters": schema}
    text = {"format": {"type": "json_schema", "name": "n", "schema": schema}}
    assert check({"model": "m", "input": "x", "tools": [tool], "text": text})
    request = parse_body(json.dumps({"model": "m", "input": "x", "tools": [tool], "text": text}).encode())
    draft = to_generation(request, [], own_items(request), ()).draft
    response = json.loads(msgspec.json.encode(response_fields(draft, "queued")))
    assert (response["tools"][0]["parameters"], response["text"]["format"]["schema"]) == (schema, schema)
