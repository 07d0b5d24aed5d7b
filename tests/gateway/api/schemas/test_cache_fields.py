"""What OpenAI's and Anthropic's names, and the extension, say to workers of how long a prefix is of use."""

from __future__ import annotations

from typing import Any

import pytest

from gateway.generation import Generation
from shared.cache_hints import CacheHints
from tests.gateway.parsed_bodies import chat, completion, message, response
from tests.gateway.refusals import refused

EPHEMERAL = {"type": "ephemeral"}


def showing(content: Any = "x", **fields: Any) -> Generation:
    return message([{"role": "user", "content": content}], **fields)


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
    assert showing(**body).cache_hints == CacheHints(retain_s=seconds)


def test_a_message_without_breakpoints_has_no_hints() -> None:
    assert showing(system=[{"type": "text", "text": "a", "cache_control": None}]).cache_hints is None


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
        error = refused(showing, **fields)
        assert error.param == place + param
        assert allowed in error.message


@pytest.mark.parametrize("ask", [chat, response, message])
def test_a_retention_beyond_a_day_is_refused_by_name(ask: Any) -> None:
    error = refused(ask, agent_hints={"retain_s": 86_401})
    assert error.param == "agent_hints.retain_s"
    assert "86400" in error.message
