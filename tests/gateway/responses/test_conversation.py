"""How items of a conversation become messages."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from gateway.errors import ApiError
from gateway.responses.body import ItemBody
from gateway.responses.conversation import to_messages


def items(*fields: dict[str, Any]) -> list[ItemBody]:
    return msgspec.convert(list(fields), list[ItemBody])


def message(role: str, text: str) -> dict[str, Any]:
    return {"role": role, "content": text}


def thought(text: str) -> dict[str, Any]:
    return {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": text}]}


def call(number: int) -> dict[str, Any]:
    return {"type": "function_call", "call_id": f"c{number}", "name": f"f{number}", "arguments": "{}"}


def shown(*fields: dict[str, Any]) -> list[tuple[str, str, str | None, list[str]]]:
    messages = to_messages(items(*fields))
    return [(each.role, each.content, each.reasoning, [call.id for call in each.tool_calls]) for each in messages]


def test_what_an_assistant_did_in_one_turn_is_one_message() -> None:
    assert shown(message("user", "q"), thought("t"), message("assistant", "a"), call(1), call(2)) == [
        ("user", "q", None, []),
        ("assistant", "a", "t", ["c1", "c2"]),
    ]


@pytest.mark.parametrize("arguments", [{}, {"arguments": ""}])
def test_call_without_arguments_has_an_empty_object(arguments: dict[str, Any]) -> None:
    (turn,) = to_messages(items({"type": "function_call", "call_id": "c", "name": "f", **arguments}))
    assert [each.arguments for each in turn.tool_calls] == ["{}"]


def test_another_order_begins_another_message() -> None:
    assert shown(
        message("assistant", "a"), message("assistant", "b"), call(1), message("assistant", "c"), thought("t")
    ) == [
        ("assistant", "a", None, []),
        ("assistant", "b", None, ["c1"]),
        ("assistant", "c", None, []),
        ("assistant", "", "t", []),
    ]


def test_results_end_a_turn_and_are_named_by_their_calls() -> None:
    result = {"type": "function_call_output", "call_id": "c1", "output": "r"}
    _, tool, other = to_messages(items(call(1), result, {**result, "call_id": "c9"}))
    assert (tool.role, tool.content, tool.tool_call_id, tool.name) == ("tool", "r", "c1", "f1")
    assert (other.tool_call_id, other.name) == ("c9", None)


def test_text_may_hold_any_character() -> None:
    assert shown(message("user", "a\0b")) == [("user", "a\0b", None, [])]


def test_output_that_no_call_asked_for_is_told_by_the_user() -> None:
    unasked = {"type": "function_call_output", "name": "goal_objective", "namespace": "agent", "output": "win"}
    assert shown(call(1), unasked) == [("assistant", "", None, ["c1"]), ("user", "win", None, [])]
    with pytest.raises(ApiError) as caught:
        shown({"type": "function_call_output", "output": "whose?"})
    assert caught.value.param == "input.[0].call_id"


def test_reasoning_without_content_is_its_summary() -> None:
    summed = {"type": "reasoning", "summary": [{"type": "summary_text", "text": "s"}]}
    both = thought("t") | {"summary": summed["summary"]}
    assert [each[2] for each in shown(summed, message("user", "q"), both)] == ["s", None, "t"]


@pytest.mark.parametrize(
    ("item", "param"),
    [
        ({"role": "tool", "content": "x"}, "role"),
        ({"role": "user"}, "content"),
        ({"role": "user", "content": [{"type": "input_text"}]}, "content.[0].text"),
        ({"type": "function_call", "name": "f"}, "call_id"),
        ({"type": "function_call_output", "call_id": "c"}, "output"),
        ({"type": "computer_call"}, "type"),
    ],
)
def test_item_that_cannot_be_read_is_named_by_its_place(item: dict[str, Any], param: str) -> None:
    with pytest.raises(ApiError) as refusal:
        to_messages(items(message("user", "earlier"), message("user", "ok"), item), num_earlier=1)
    assert refusal.value.param == f"input.[1].{param}"
