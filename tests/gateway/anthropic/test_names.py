"""Histories with what Anthropic's server ran itself, in all the fields that Anthropic's library has for it."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from gateway.anthropic.parsing import parse_messages
from gateway.errors import ApiError
from gateway.generation import Generation
from shared.conversation import ChatMessage, ToolCall
from tests.gateway.parsed_bodies import messages_of

DIRECT = {"type": "direct"}
CALL = {
    "type": "server_tool_use", "id": "s", "name": "f", "input": {"q": 1}, "caller": DIRECT,
    "cache_control": {"type": "ephemeral"},
}  # fmt: skip
CALLED = ToolCall(id="s", name="f", arguments='{"q": 1}')
PAGE = {"type": "web_search_result", "title": "A", "url": "u", "encrypted_content": "x", "page_age": None}
FETCHED = {
    "type": "web_fetch_result", "url": "u", "retrieved_at": None,
    "content": {"type": "document", "title": "A", "citations": {"enabled": True}, "source": None},
}  # fmt: skip

RESULTS: list[tuple[str, Any, str]] = [
    ("web_search_tool_result", [PAGE, PAGE], '[{"title":"A","url":"u"},{"title":"A","url":"u"}]'),
    ("web_search_tool_result", [], "(The result has no text.)"),
    ("web_search_tool_result", {"type": "web_search_tool_result_error", "error_code": "busy"}, "Error: busy"),
    (
        "web_fetch_tool_result",
        FETCHED
        | {"content": {"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": "t"}}},
        '{"url":"u","content":{"source":{"media_type":"text/plain","data":"t"}}}',
    ),
    (
        "web_fetch_tool_result",
        FETCHED | {"content": {"source": {"type": "base64", "media_type": "application/pdf", "data": "AAAA"}}},
        '{"url":"u","content":{"source":{"media_type":"application/pdf"}}}',
    ),
    (
        "code_execution_tool_result",
        {"type": "code_execution_result", "stdout": "2", "stderr": "", "return_code": 0, "content": []},
        '{"stdout":"2","stderr":"","return_code":0}',
    ),
    (
        "bash_code_execution_tool_result",
        {"stdout": "", "return_code": 1, "content": [{"type": "bash_code_execution_output", "file_id": "f"}]},
        '{"stdout":"","return_code":1}',
    ),
    (
        "text_editor_code_execution_tool_result",
        {"type": "text_editor_code_execution_view_result", "content": "a", "file_type": "text", "num_lines": None},
        '{"content":"a","file_type":"text"}',
    ),
    (
        "tool_search_tool_result",
        {"type": "x", "tool_references": [{"type": "tool_reference", "tool_name": "g"}]},
        '{"tool_references":[{"tool_name":"g"}]}',
    ),
    ("advisor_tool_result", {"type": "advisor_redacted_result", "encrypted_content": "x"}, "(The result has no text.)"),
    ("mcp_tool_result", "r", "r"),
    ("mcp_tool_result", [{"type": "text", "text": "a", "citations": None}, {"type": "text", "text": "b"}], "a\n\nb"),
]


def parsed(*turns: list[dict[str, Any]], roles: str = "ua") -> Generation:
    names = {"u": "user", "a": "assistant"}
    messages = [{"role": names[role], "content": blocks} for role, blocks in zip(roles, turns, strict=True)]
    return parse_messages(json.dumps({"model": "m", "max_tokens": 9, "messages": messages}).encode())


def text(value: str) -> dict[str, Any]:
    return {"type": "text", "text": value}


ASKED = [text("q")]


@pytest.mark.parametrize(("kind", "content", "told"), RESULTS)
def test_call_and_its_result_are_those_of_any_tool(kind: str, content: Any, told: str) -> None:
    result = {"type": kind, "tool_use_id": "s", "content": content, "caller": DIRECT}
    assert messages_of(parsed(ASKED, [text("a"), CALL, result, text("b")]))[1:] == (
        ChatMessage(role="assistant", content="a", tool_calls=(CALLED,)),
        ChatMessage(role="tool", content=told, tool_call_id="s"),
        ChatMessage(role="assistant", content="b"),
    )


def test_call_over_mcp_that_failed_is_told_as_failed() -> None:
    call = {"type": "mcp_tool_use", "id": "s", "name": "f", "input": {"q": 1}, "server_name": "x"}
    result = {"type": "mcp_tool_result", "tool_use_id": "s", "content": "r", "is_error": True}
    _, assistant, tool = messages_of(parsed(ASKED, [call, result]))
    assert assistant == ChatMessage(role="assistant", content="", tool_calls=(CALLED,))
    assert tool == ChatMessage(role="tool", content="Error: r", tool_call_id="s")


def test_answer_to_a_turn_that_ends_with_a_result_is_a_turn_of_its_own() -> None:
    result = {"type": "mcp_tool_result", "tool_use_id": "s", "content": "r"}
    ended = parsed(ASKED, [CALL, result]).prompts[0].chat
    assert ended is not None
    assert (ended.add_generation_prompt, ended.continue_final_message) == (True, False)
    begun = parsed(ASKED, [CALL, result, text("b")]).prompts[0].chat
    assert begun is not None
    assert (begun.add_generation_prompt, begun.continue_final_message) == (False, True)


def test_call_that_nothing_answers_is_left_out() -> None:
    assert messages_of(parsed(ASKED, [text("a"), CALL])) == (
        ChatMessage(role="user", content="q"),
        ChatMessage(role="assistant", content="a"),
    )
    assert messages_of(parsed(ASKED, [CALL])) == (ChatMessage(role="user", content="q"),)


def test_result_behind_those_of_the_client_s_tools_answers_its_call() -> None:
    """Code at Anthropic's server has called a tool of the client."""
    own = {"type": "tool_use", "id": "t", "name": "g", "input": {}}
    came = {"type": "tool_result", "tool_use_id": "t", "content": "1"}
    result = {"type": "code_execution_tool_result", "tool_use_id": "s", "content": {"stdout": "2"}}
    messages = messages_of(parsed(ASKED, [CALL, own], [came], [result, text("b")], roles="uaua"))
    assert [message.role for message in messages] == ["user", "assistant", "tool", "tool", "assistant"]
    assert messages[1].tool_calls == (CALLED, ToolCall(id="t", name="g", arguments="{}"))
    assert [message.tool_call_id for message in messages[2:4]] == ["t", "s"]


@pytest.mark.parametrize(
    ("block", "reason"),
    [
        ({"type": "compaction", "content": "x", "encrypted_content": "y"}, "send them, or their summary as text"),
        ({"type": "container_upload", "file_id": "f"}, "send its text in a document"),
        ({"type": "mcp_tool_listing", "mcp_server_name": "x", "tools": []}, "Supported are text"),
    ],
)
def test_what_cannot_be_read_is_refused_by_its_type_with_the_reason(block: dict[str, Any], reason: str) -> None:
    with pytest.raises(ApiError) as refused:
        parsed(ASKED, [block])
    assert (refused.value.param, refused.value.code) == ("messages.[1].content.[0]", "unsupported_parameter")
    assert f"the type '{block['type']}'" in refused.value.message
    assert reason in refused.value.message


def test_only_the_assistant_s_turns_have_them() -> None:
    with pytest.raises(ApiError, match="in a turn of the assistant alone"):
        parsed([CALL], roles="u")


def test_result_of_any_depth_ends_somewhere() -> None:
    content: Any = "deep"
    for _ in range(40):
        content = {"a": content}
    result = {"type": "advisor_tool_result", "tool_use_id": "s", "content": content}
    assert messages_of(parsed(ASKED, [CALL, result]))[2].content == "(The result has no text.)"


@pytest.mark.parametrize("wrap", [lambda value: [value], lambda value: {"a": value}])
def test_part_of_a_result_that_lies_too_deep_is_left_out(wrap: Callable[[Any], Any]) -> None:
    content: Any = "deep"
    for _ in range(15):
        content = wrap(content)
    for depth, told in ((15, json.dumps(content, separators=(",", ":"))), (16, "(The result has no text.)")):
        result = {"type": "web_search_tool_result", "tool_use_id": "s", "content": content, "caller": DIRECT}
        assert messages_of(parsed(ASKED, [CALL, result, text("b")]))[2].content == told, depth
        content = wrap(content)


def test_result_of_lists_in_lists_without_end_is_read_as_far_as_it_is_shown() -> None:
    content: Any = json.loads("[" * 900 + "]" * 900)
    result = {"type": "web_search_tool_result", "tool_use_id": "s", "content": content, "caller": DIRECT}
    assert messages_of(parsed(ASKED, [CALL, result, text("b")]))[2].content == "(The result has no text.)"
