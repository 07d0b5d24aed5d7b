"""What is stored of a request is what its conversation reads, however much else it holds."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from gateway.api.schemas.known_names import BodyRules
from gateway.responses.body import ItemBody
from gateway.responses.conversation import to_messages
from gateway.responses.items import kept_item
from gateway.responses.request import own_items, parse_body, to_generation

LARGE = "x" * 100_000
TEXT = [{"type": "output_text", "text": "hi", "refusal": LARGE}]
SUMMARY = [{"type": "summary_text", "text": "so"}]
# No item has all of these.
UNUSED = {"role": LARGE[:200], "name": "f", "call_id": "c", "arguments": LARGE, "output": LARGE, "refusal": LARGE}


@pytest.mark.parametrize(
    "item",
    [
        UNUSED | {"role": "user", "content": "hi", "encrypted_content": LARGE, "summary": SUMMARY},
        UNUSED | {"role": "assistant", "content": TEXT},
        {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}", "content": LARGE, "output": LARGE},
        {"type": "function_call_output", "call_id": "c", "output": "rain", "content": LARGE, "arguments": LARGE},
        UNUSED | {"type": "reasoning", "content": TEXT, "encrypted_content": LARGE, "summary": SUMMARY * 4000},
        {"type": "reasoning", "encrypted_content": LARGE, "summary": SUMMARY},
        {"type": "message", "role": "assistant", "content": [{"type": "refusal", "refusal": "no", "text": LARGE}]},
    ],
)
def test_kept_item_is_small_and_means_the_same(item: dict[str, Any]) -> None:
    request = parse_body(json.dumps({"model": "m", "input": [item]}).encode(), BodyRules(allow_unknown=True))
    generation = to_generation(request, [], own_items(request), ())
    assert len(msgspec.msgpack.encode(generation.draft.input)) < 1000
    assert to_messages(generation.draft.input) == generation.prompts[0].messages


def test_item_that_does_not_say_what_it_is_is_a_message() -> None:
    assert kept_item(ItemBody(role="user", content="hi", output="no")) == ItemBody(role="user", content="hi")
