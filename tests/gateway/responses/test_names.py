"""Names in the items of a request: what an item does not have is refused, what clients send back is taken."""

from __future__ import annotations

import json
from typing import Any

import pytest

from gateway.api.schemas.names import BodyRules
from gateway.responses.draft import ResponseDraft, ResponseGeneration
from gateway.responses.output import ResponseOutput
from gateway.responses.request import parse_body
from tests.gateway.parsed_bodies import messages_of, response
from tests.gateway.refusals import refused

CALL = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
# As OpenAI's own server lists the items of a conversation, and OpenAI's library gives them back.
HOSTED: list[dict[str, Any]] = [
    {
        "type": "message",
        "id": "msg_1",
        "status": "completed",
        "role": "user",
        "content": [{"type": "input_text", "text": "q", "prompt_cache_breakpoint": {"mode": "explicit"}}],
    },
    {"type": "reasoning", "id": "rs_1", "summary": [{"type": "summary_text", "text": "t"}], "encrypted_content": None},
    {
        "type": "message",
        "id": "msg_2",
        "status": "completed",
        "role": "assistant",
        "phase": "commentary",
        "content": [
            {
                "type": "output_text",
                "text": "a",
                "annotations": [{"type": "url_citation", "url": "x", "title": "y", "start_index": 0, "end_index": 1}],
                "logprobs": [],
                "parsed": {"a": 1},
            }
        ],
    },
    CALL
    | {"id": "fc_1", "status": "completed", "caller": {"type": "direct"}, "created_by": "x", "parsed_arguments": None},
    {"type": "function_call_output", "id": "fco_1", "call_id": "c", "output": "r", "status": None, "caller": None},
]


def asked(*items: dict[str, Any], allow_unknown: bool = False) -> ResponseGeneration:
    return response(items, allow_unknown=allow_unknown)


def test_history_that_openai_has_kept_is_understood() -> None:
    user, assistant, tool = messages_of(asked(*HOSTED))
    assert (user.content, assistant.content, assistant.reasoning, tool.content) == ("q", "a", "t", "r")
    assert [call.id for call in assistant.tool_calls] == ["c"]


@pytest.mark.parametrize("has_summary", [False, True])
def test_whatever_this_server_writes_may_be_sent_back(has_summary: bool) -> None:
    fields: Any = {"id": "resp_" + 32 * "0", "created_at": 1, "parameters": b"{}", "input": []}
    output = ResponseOutput(ResponseDraft(**fields, has_encrypted_reasoning=True, has_summary=has_summary))
    output.reasoning("t")
    output.content("a", [{"token": "a", "logprob": -1.0, "bytes": [97], "top_logprobs": []}])
    output.call_started("f")
    output.call_arguments("{}")
    output.finish()
    [message] = messages_of(asked(*output.items))
    assert (message.content, message.reasoning, message.tool_calls[0].name) == ("a", "t", "f")


@pytest.mark.parametrize(
    ("item", "place"),
    [
        ({"role": "user", "content": "x", "nane": "y"}, "nane"),
        ({"role": "user", "content": "x", "name": "y"}, "name"),
        ({"role": "user", "content": "x", "arguments": "{}"}, "arguments"),
        (CALL | {"output": "x"}, "output"),
        ({"type": "function_call_output", "call_id": "c", "output": "r", "is_error": True}, "is_error"),
        ({"type": "reasoning", "summary": [], "reasoning_content": "x"}, "reasoning_content"),
        ({"type": "item_reference", "id": "a", "content": "x"}, "content"),
        ({"role": "user", "content": [{"type": "input_text", "text": "x", "detail": "low"}]}, "content.[0].detail"),
        ({"role": "user", "content": [{"type": "input_text", "text": "x", "refusal": "y"}]}, "content.[0].refusal"),
    ],
)
def test_name_that_an_item_does_not_have_is_refused_with_its_place(item: dict[str, Any], place: str) -> None:
    error = refused(asked, {"role": "user", "content": "x"}, item)
    assert (error.param, error.code) == (f"input.[1].{place}", "unknown_parameter")


def test_operator_may_have_such_names_left_out() -> None:
    item = {"role": "user", "content": [{"type": "input_text", "text": "x", "refusal": "y"}], "nane": 1, "name": "y"}
    assert [message.content for message in messages_of(asked(item, allow_unknown=True))] == ["x"]


@pytest.mark.parametrize(
    ("item", "place"),
    [
        ({"type": "program", "call_id": "c", "name": "f", "code": "x"}, "type"),
        ({"type": "computer_call", "id": "cu_1", "status": "completed", "action": {"type": "click"}}, "type"),
        ({"role": "user", "content": [{"type": "input_audio", "data": "x", "format": "mp3"}]}, "content.[0].type"),
    ],
)
def test_item_that_is_not_served_is_refused_by_its_type_whatever_it_holds(item: dict[str, Any], place: str) -> None:
    error = refused(asked, item)
    assert (error.param, error.code) == (f"input.[0].{place}", "unsupported_parameter")


FUNCTION: dict[str, Any] = {
    "type": "function",
    "name": "f",
    "description": "Adds.",
    "parameters": {"type": "object"},
    "strict": True,
}


def parse(*tools: dict[str, Any], allow_unknown: bool = False) -> None:
    parse_body(json.dumps({"model": "m", "input": "x", "tools": tools}).encode(), BodyRules(allow_unknown))


def test_names_that_functions_have_are_read() -> None:
    more = {
        "defer_loading": True,
        "output_schema": {"a": 1},
        "allowed_callers": ["direct", "programmatic"],
        "async": False,
    }
    parse(FUNCTION, FUNCTION | more, FUNCTION | {"allowed_callers": None, "no_such_name": None})
    parse({"type": "namespace", "name": "n", "description": "d", "tools": [FUNCTION | more]})
    parse({"type": "namespace", "name": "n", "tools": None})


@pytest.mark.parametrize(
    ("fields", "name", "code"),
    [
        ({"paramters": {}}, "paramters", "unknown_parameter"),
        ({"function": {"name": "f"}}, "function", "unknown_parameter"),
        ({"allowed_callers": ["programmatic"]}, "allowed_callers", "unsupported_parameter"),
        ({"async": True}, "async", "unsupported_parameter"),
        ({"allowed_callers": 3}, "allowed_callers", "unsupported_parameter"),
    ],
)
def test_name_that_nothing_reads_is_refused_by_its_place(fields: dict[str, Any], name: str, code: str) -> None:
    namespace = {"type": "namespace", "name": "n", "tools": [FUNCTION, FUNCTION | fields]}
    for tools, place in (((FUNCTION, FUNCTION | fields), "tools.[1]"), ((namespace,), "tools.[0].tools.[1]")):
        error = refused(parse, *tools)
        assert (error.param, error.code) == (f"{place}.{name}", code)
        parse(*tools, allow_unknown=True)


def test_other_tools_are_told_by_their_type() -> None:
    # What they have is not looked at here; what becomes of the request says that they are not served.
    parse({"type": "web_search", "search_context_size": "low"})


def test_half_of_a_surrogate_pair_is_no_obstacle() -> None:
    tool = json.dumps(FUNCTION).replace("Adds.", "\\ud83d")
    parse_body(f'{{"model":"m","input":"x","tools":[{tool}]}}'.encode())


def test_stream_that_cannot_be_resumed_is_refused_and_pointed_to_background() -> None:
    body = {"model": "m", "input": "a", "stream": True}
    others: dict[str, Any] = {"include_usage": True, "include_obfuscation": False, "continuous_usage_stats": True}
    for passing in (others, {"resumable": False}, {}, None):
        parse_body(json.dumps(body | {"stream_options": passing}).encode())
    error = refused(parse_body, json.dumps(body | {"stream_options": others | {"resumable": True}}).encode())
    assert error.param == "stream_options.resumable"
    assert "background" in error.message
