"""What OpenAI's and Anthropic's names, and the extension, say to workers of how long a prefix is of use."""

from __future__ import annotations

import json
from typing import Any

import pytest

from gateway.anthropic.parsing import parse_messages
from gateway.api.schemas.parsing import parse_chat, parse_completion
from gateway.errors import ApiError
from gateway.generation import Generation
from gateway.responses.request import own_items, parse_body, to_generation
from shared.cache_hints import CacheHints

EPHEMERAL = {"type": "ephemeral"}


def chat(**fields: Any) -> Generation:
    return parse_chat(json.dumps({"model": "m", "messages": [{"role": "user", "content": "x"}], **fields}).encode())


def completion(**fields: Any) -> Generation:
    return parse_completion(json.dumps({"model": "m", "prompt": "x", **fields}).encode())


def response(**fields: Any) -> Generation:
    body = parse_body(json.dumps({"model": "m", "input": "x", **fields}).encode())
    return to_generation(body, [], own_items(body), ())


def message(content: Any = "x", **fields: Any) -> Generation:
    turn = {"role": "user", "content": content}
    return parse_messages(json.dumps({"model": "m", "max_tokens": 5, "messages": [turn], **fields}).encode())


@pytest.mark.parametrize("ask", [chat, completion, response])
@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, None),
        ({"prompt_cache_retention": None, "prompt_cache_key": "", "agent_hints": {}}, None),
        ({"prompt_cache_retention": "in_memory"}, CacheHints(retain_s=300.0)),
        ({"prompt_cache_retention": "24h"}, CacheHints(retain_s=86_400.0)),
        ({"prompt_cache_key": "k"}, CacheHints(session_id="k")),
        ({"prompt_cache_key": "k", "agent_hints": {"drop": True}}, CacheHints(session_id="k", drop=True)),
        (
            {"prompt_cache_key": "k", "agent_hints": {"session_id": "s", "supersedes": True}},
            CacheHints(session_id="s", supersedes=True),
        ),
        ({"prompt_cache_retention": "in_memory", "agent_hints": {"retain_s": 400}}, CacheHints(retain_s=400.0)),
    ],
)
def test_the_names_of_openai_and_the_extension_become_hints(
    ask: Any, fields: dict[str, Any], expected: CacheHints | None
) -> None:
    assert ask(**fields).cache_hints == expected


@pytest.mark.parametrize(
    ("body", "seconds"),
    [
        ({"cache_control": EPHEMERAL}, 300.0),
        ({"cache_control": {**EPHEMERAL, "ttl": "1h"}}, 3600.0),
        # Of Claude Code, which also sends what is known to Anthropic alone.
        ({"cache_control": {**EPHEMERAL, "scope": "global", "ttl": None}}, 300.0),
        ({"system": [{"type": "text", "text": "a", "cache_control": {**EPHEMERAL, "ttl": "1h"}}]}, 3600.0),
        ({"tools": [{"name": "f", "input_schema": {}, "cache_control": EPHEMERAL}]}, 300.0),
        ({"content": [{"type": "text", "text": "a", "cache_control": EPHEMERAL}], "cache_control": None}, 300.0),
        ({"cache_control": EPHEMERAL, "agent_hints": {"retain_s": 900}}, 900.0),
    ],
)
def test_the_longest_time_to_live_of_a_message_s_breakpoints_holds(body: dict[str, Any], seconds: float) -> None:
    assert message(**body).cache_hints == CacheHints(retain_s=seconds)


def test_a_message_without_breakpoints_has_no_hints() -> None:
    assert message(system=[{"type": "text", "text": "a", "cache_control": None}]).cache_hints is None


@pytest.mark.parametrize(
    ("control", "param", "allowed"),
    [
        ({**EPHEMERAL, "ttl": "2h"}, "cache_control.ttl", "must be one of 5m, 1h"),
        ({**EPHEMERAL, "ttl": 5}, "cache_control.ttl", "expected str"),
        ({"type": "x"}, "cache_control.type", "must be one of ephemeral"),
        ({"ttl": "1h"}, "cache_control.type", "Missing"),
        (5, "cache_control", "expected object"),
        ([], "cache_control", "expected object"),
    ],
)
def test_a_breakpoint_that_says_something_else_is_refused_by_name(control: Any, param: str, allowed: str) -> None:
    block, tool = {"type": "text", "text": "a"}, {"name": "f", "input_schema": {}}
    places: list[tuple[str, dict[str, Any]]] = [
        ("", {"cache_control": control}),
        ("system.[0].", {"system": [{**block, "cache_control": control}]}),
        ("messages.[0].content.[0].", {"content": [{**block, "cache_control": control}]}),
        ("tools.[0].", {"tools": [{**tool, "cache_control": control}]}),
    ]
    for place, fields in places:
        with pytest.raises(ApiError) as caught:
            message(**fields)
        assert (caught.value.param, caught.value.status) == (place + param, 400)
        assert allowed in caught.value.message


@pytest.mark.parametrize("ask", [chat, response, message])
def test_a_retention_beyond_a_day_is_refused_by_name(ask: Any) -> None:
    with pytest.raises(ApiError) as caught:
        ask(agent_hints={"retain_s": 86_401})
    assert (caught.value.param, caught.value.status) == ("agent_hints.retain_s", 400)
    assert "86400" in caught.value.message
