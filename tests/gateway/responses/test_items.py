"""What is stored of a request is what its conversation reads, however much else it holds."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from gateway.responses.body import ItemBody
from gateway.responses.conversation import to_messages
from gateway.responses.items import kept_item
from gateway.responses.request import own_items, parse_body, to_generation
from shared.conversation import ChatMessage
from tests.gateway.parsed_bodies import response
from tests.gateway.refusals import refused

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
    generation = response([item], allow_unknown=True)
    assert len(msgspec.msgpack.encode(generation.draft.input)) < 1000
    assert to_messages(generation.draft.input) == generation.prompts[0].messages


def test_item_that_does_not_say_what_it_is_is_a_message() -> None:
    assert kept_item(ItemBody(role="user", content="hi", output="no")) == ItemBody(role="user", content="hi")


DIRECT = {"type": "direct"}
DONE = {"status": "completed", "created_by": "x"}
SHELL_OUTPUT = [{"stdout": "a", "stderr": "", "outcome": {"type": "exit", "exit_code": 0}}]

WITH_RESULT = [
    # It found nothing, which the model reads too.
    ({"type": "file_search_call", "id": "c", "queries": ["q"], "results": []}, ("file_search", {"queries": ["q"]}, [])),
    (
        {"type": "file_search_call", "id": "c", "queries": ["q"], "results": [{"text": "t", "score": 0.5}], **DONE},
        ("file_search", {"queries": ["q"]}, [{"text": "t", "score": 0.5}]),
    ),
    (
        {
            "type": "code_interpreter_call", "id": "c", "code": "1+1", "container_id": "k",
            "outputs": [{"type": "logs", "logs": "2"}], **DONE,
        },
        ("code_interpreter", {"code": "1+1"}, [{"type": "logs", "logs": "2"}]),
    ),
    (
        {
            "type": "mcp_call", "id": "c", "server_label": "s", "name": "f", "arguments": '{"a": 1}', "output": "r",
            "error": None, "approval_request_id": None, **DONE,
        },
        ("f", {"a": 1}, "r"),
    ),
    (
        {"type": "mcp_call", "id": "c", "server_label": "s", "name": "f", "arguments": "{}", "error": {"code": 5}},
        ("f", {}, {"code": 5}),
    ),
]  # fmt: skip
IN_TWO = [
    (
        {"type": "custom_tool_call", "call_id": "c", "name": "f", "input": 'a "b"', "caller": DIRECT, "async": None},
        {"type": "custom_tool_call_output", "call_id": "c", "output": [{"type": "input_text", "text": "r"}], **DONE},
        ("f", {"input": 'a "b"'}, "r"),
    ),
    (
        {"type": "local_shell_call", "id": "l", "call_id": "c", "action": {"type": "exec", "command": ["ls"]}, **DONE},
        {"type": "local_shell_call_output", "id": "c", "output": "r"},
        ("local_shell", {"type": "exec", "command": ["ls"]}, "r"),
    ),
    (
        {"type": "shell_call", "id": "s", "call_id": "c", "action": {"commands": ["ls"]}, "environment": None, **DONE},
        {"type": "shell_call_output", "call_id": "c", "output": SHELL_OUTPUT, "max_output_length": 5, "caller": DIRECT},
        ("shell", {"commands": ["ls"]}, SHELL_OUTPUT),
    ),
    (
        {"type": "apply_patch_call", "call_id": "c", "operation": {"type": "delete_file", "path": "a"}, **DONE},
        {"type": "apply_patch_call_output", "call_id": "c", "output": None, **DONE},
        ("apply_patch", {"type": "delete_file", "path": "a"}, ""),
    ),
]
LONG = "z" * 100_000
WITHOUT_RESULT: list[dict[str, Any]] = [
    {"type": "web_search_call", "id": "w", "action": {"type": "search", "query": "q"}, **DONE},
    {"type": "web_search_call", "id": "w"},
    {"type": "file_search_call", "id": "c", "queries": ["q"], "results": None, **DONE},
    {"type": "code_interpreter_call", "id": "c", "code": "1", "container_id": "k", "outputs": None, **DONE},
    {"type": "mcp_list_tools", "id": "m", "server_label": "s", "tools": [{"name": "f", "input_schema": {}}]},
    {"type": "mcp_approval_request", "id": "m", "server_label": "s", "name": "f", "arguments": "{}"},
    {"type": "mcp_approval_response", "approval_request_id": "m", "approve": True, "reason": "a"},
]


def messages_of(*items: dict[str, Any]) -> tuple[ChatMessage, ...]:
    """Return the messages, which are the same for what is kept of the items."""
    body = parse_body(json.dumps({"model": "m", "input": [{"role": "user", "content": "q"}, *items]}).encode())
    own = own_items(body)
    messages = to_generation(body, [], own, ()).prompts[0].messages
    kept = [kept_item(item) for item in own]
    assert to_generation(body, kept, [], ()).prompts[0].messages == messages
    assert messages is not None
    return messages


def check(messages: tuple[ChatMessage, ...], told: tuple[str, Any, Any]) -> None:
    _, assistant, tool = messages
    (call,) = assistant.tool_calls
    name, arguments, output = told
    assert (call.id, call.name, json.loads(call.arguments)) == ("c", name, arguments)
    assert (tool.role, tool.tool_call_id, tool.name) == ("tool", "c", name)
    assert (tool.content if isinstance(output, str) else json.loads(tool.content)) == output


@pytest.mark.parametrize(("item", "told"), WITH_RESULT)
def test_call_with_its_result_is_a_call_and_a_result(item: dict[str, Any], told: tuple[str, Any, Any]) -> None:
    check(messages_of(item), told)


@pytest.mark.parametrize(("call", "result", "told"), IN_TWO)
def test_call_and_result_in_two_items_belong_together(
    call: dict[str, Any], result: dict[str, Any], told: tuple[str, Any, Any]
) -> None:
    check(messages_of(call, result), told)


def test_parts_of_a_result_may_have_what_parts_have() -> None:
    call = {"type": "custom_tool_call", "call_id": "c", "name": "patch", "input": "x"}
    part = {"type": "input_text", "text": "done", "prompt_cache_breakpoint": {"mode": "explicit"}}
    result = {"type": "custom_tool_call_output", "call_id": "c", "output": [part]}
    assert messages_of(call, result)[-1].content == "done"


@pytest.mark.parametrize("item", WITHOUT_RESULT)
def test_call_that_ran_at_openai_and_has_no_result_is_left_out(item: dict[str, Any]) -> None:
    answer = {"role": "assistant", "content": "a"}
    assert [message.role for message in messages_of(item, answer)] == ["user", "assistant"]


@pytest.mark.parametrize(
    "item",
    [
        {"type": "web_search_call", "id": "w", "action": {"type": "search", "query": LONG}},
        {"type": "file_search_call", "id": "w", "queries": [LONG]},
        {"type": "code_interpreter_call", "id": "w", "code": LONG},
        {"type": "mcp_call", "id": "w", "name": "f", "server_label": "s", "arguments": LONG},
        {"type": "mcp_list_tools", "id": "w", "server_label": "s", "tools": [{"name": LONG}]},
    ],
)
def test_what_no_prompt_has_is_not_kept(item: dict[str, Any]) -> None:
    body = parse_body(json.dumps({"model": "m", "input": [item]}).encode())
    assert kept_item(own_items(body)[0]) == ItemBody(type=item["type"], id="w")


@pytest.mark.parametrize(
    "item",
    [
        {"type": "image_generation_call", "id": "i", "result": "AAAA", "status": "completed"},
        {"type": "computer_call_output", "call_id": "c", "output": {"type": "computer_screenshot"}},
        {"type": "tool_search_output", "id": "c", "tools": []},
    ],
)
def test_item_that_no_text_tells_is_refused_by_its_type(item: dict[str, Any]) -> None:
    error = refused(messages_of, item)
    assert error.param == "input.[1].type"
    assert f"'{item['type']}'" in error.message
