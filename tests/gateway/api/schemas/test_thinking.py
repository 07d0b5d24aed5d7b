"""Thinking in every form that clients write: one meaning, and a 400 where two forms contradict each other."""

from __future__ import annotations

import json
from typing import Any

import pytest

from gateway.generation import Generation
from tests.gateway.parsed_bodies import chat, completion, message, response
from tests.gateway.refusals import refused

ON, OFF = {"enable_thinking": True, "thinking": True}, {"enable_thinking": False, "thinking": False}


def variables(generation: Generation) -> Any:
    options = generation.prompts[0].chat
    return {} if options is None else json.loads(options.variables or "{}")


# Which bodies of responses have, too.
BOTH: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({}, {}),
    ({"enable_thinking": False}, OFF),
    ({"thinking": {"type": "enabled"}}, ON),
    ({"thinking": {"type": "disabled"}}, OFF),
    ({"thinking": {"type": "auto"}}, {}),
    ({"thinking": False}, OFF),
    ({"reasoning": {"enabled": True}}, ON),
    ({"reasoning": {"enabled": False}}, OFF),
    ({"reasoning": {"effort": "low"}}, ON | {"reasoning_effort": "low"}),
    ({"reasoning": {"enabled": True, "effort": "high"}}, ON | {"reasoning_effort": "high"}),
    ({"reasoning": {}}, {}),
    ({"enable_thinking": False, "reasoning": {"effort": "none"}}, OFF),
    ({"chat_template_kwargs": {"enable_thinking": False}}, {"enable_thinking": False}),
    ({"enable_thinking": True, "chat_template_kwargs": {"tone": "dry"}}, ON | {"tone": "dry"}),
]
CONTRADICTIONS: list[tuple[dict[str, Any], str]] = [
    ({"enable_thinking": True, "thinking": {"type": "disabled"}}, "thinking"),
    ({"enable_thinking": True, "reasoning": {"enabled": False}}, "reasoning.enabled"),
    ({"enable_thinking": False, "reasoning": {"effort": "high"}}, "reasoning.effort"),
    ({"reasoning": {"enabled": True, "effort": "none"}}, "reasoning.effort"),
    ({"enable_thinking": True, "chat_template_kwargs": {"thinking": False}}, "chat_template_kwargs.thinking"),
    ({"thinking": False, "chat_template_kwargs": {"enable_thinking": True}}, "chat_template_kwargs.enable_thinking"),
    ({"reasoning": {"effort": "huge"}}, "reasoning.effort"),
]


@pytest.mark.parametrize(
    ("ask", "fields", "expected"),
    [
        *((ask, *case) for ask in (chat, response) for case in BOTH),
        (chat, {"think": False}, OFF),
        (chat, {"think": "low"}, ON | {"reasoning_effort": "low"}),
        (chat, {"reasoning_effort": "none"}, OFF),
        (chat, {"enable_thinking": False, "reasoning_effort": "none"}, OFF),
        # As Dify sends it.
        (
            chat,
            {
                "enable_thinking": False,
                "thinking": {"type": "disabled"},
                "reasoning": {"enabled": False},
                "chat_template_kwargs": {"enable_thinking": False},
            },
            OFF,
        ),
        # What the client names for the template is stronger than an effort.
        (
            chat,
            {"reasoning_effort": "high", "chat_template_kwargs": {"enable_thinking": False}},
            {"enable_thinking": False, "thinking": True, "reasoning_effort": "high"},
        ),
    ],
)
def test_forms_of_thinking_become_the_templates_variables(
    ask: Any, fields: dict[str, Any], expected: dict[str, Any]
) -> None:
    generation = ask(**fields)
    assert variables(generation) == expected
    assert generation.may_reason == (False not in expected.values())


@pytest.mark.parametrize(
    ("ask", "fields", "param"),
    [
        *((ask, *case) for ask in (chat, response) for case in CONTRADICTIONS),
        (chat, {"thinking": {"type": "enabled"}, "think": False}, "think"),
        (chat, {"enable_thinking": False, "reasoning_effort": "high"}, "reasoning_effort"),
        (chat, {"reasoning_effort": "high", "reasoning": {"effort": "low"}}, "reasoning.effort"),
        (chat, {"include_reasoning": True, "reasoning": {"exclude": True}}, "reasoning.exclude"),
        (chat, {"thinking": {"type": "sometimes"}}, "thinking.type"),
        (chat, {"thinking": {"type": "enabled", "budget_tokens": 5}}, "thinking.budget_tokens"),
        (chat, {"reasoning": {"max_tokens": 5}}, "reasoning.max_tokens"),
    ],
)
def test_contradiction_and_what_is_not_served_are_refused_by_name(ask: Any, fields: dict[str, Any], param: str) -> None:
    assert refused(ask, **fields).param == param


def test_excluded_reasoning_is_left_out_of_the_answer() -> None:
    assert not chat(reasoning={"exclude": True}).includes_reasoning
    assert chat(reasoning={"exclude": False}).includes_reasoning


def test_contradiction_in_a_message_is_refused_by_name() -> None:
    fields: Any = {"thinking": {"type": "disabled"}, "chat_template_kwargs": {"enable_thinking": True}}
    assert refused(message, **fields).param == "chat_template_kwargs.enable_thinking"


def test_completion_has_no_template_that_could_think() -> None:
    # As Dify sends them in its mode `completion`.
    asked: Any = {
        "enable_thinking": False,
        "thinking": {"type": "disabled"},
        "chat_template_kwargs": {"thinking": False},
    }
    assert completion(seed=1, **asked) == completion(seed=1)
