"""What a body of Responses asks for: the generation, what the response repeats of it, and what is refused."""

from __future__ import annotations

import json
from typing import Any

import pytest

from gateway.responses.draft import ResponseGeneration
from gateway.responses.request import own_items, parse_body, to_generation
from shared.formats.tools import ToolChoice
from tests.gateway.refusals import refused

TOOLS = [{"type": "function", "name": name, "parameters": {"type": "object"}} for name in ("f", "g")]
# What OpenAI's own server says of a request that names nothing but its model and its input.
DEFAULTS = {
    "instructions": None, "max_output_tokens": None, "max_tool_calls": None, "metadata": {}, "model": "m",
    "parallel_tool_calls": True, "previous_response_id": None, "prompt_cache_key": None,
    "reasoning": {"effort": None, "summary": None}, "safety_identifier": None, "service_tier": "default",
    "temperature": None, "text": {"format": {"type": "text"}, "verbosity": "medium"}, "tool_choice": "auto",
    "tools": [], "top_logprobs": 0, "top_p": None, "truncation": "disabled", "user": None,
}  # fmt: skip


def asked(**fields: Any) -> ResponseGeneration:
    body = parse_body(json.dumps({"model": "m", "input": "x"} | fields).encode())
    return to_generation(body, [], own_items(body), ("resp_before",))


def test_request_of_nothing_but_a_text_has_the_defaults() -> None:
    generation = asked()
    draft = generation.draft
    assert json.loads(draft.parameters) == DEFAULTS
    assert (draft.is_stored, draft.is_background, draft.has_encrypted_reasoning) == (True, False, False)
    assert draft.ancestors == ("resp_before",)
    [item] = draft.input
    assert (item.type, item.status, item.role, item.content) == ("message", "completed", "user", "x")
    assert (item.id or "").startswith("msg_")
    assert (generation.sampling.max_tokens, generation.sampling.logprobs) == (None, None)
    assert (generation.stream, generation.priority, generation.timeout_s, generation.tools) == (False, 0, None, None)


def test_parameters_reach_the_model_and_are_repeated() -> None:
    fields: dict[str, Any] = {
        "max_output_tokens": 9, "temperature": 0.5, "top_p": 0.9, "top_logprobs": 3, "metadata": {"a": "b"},
        "user": "u", "parallel_tool_calls": False, "max_tool_calls": 2, "prompt_cache_key": "k",
        "safety_identifier": "s", "previous_response_id": "resp_before",
    }  # fmt: skip
    more = {"stream": True, "store": False, "priority": 2, "timeout": 5, "instructions": "Be brief."}
    shape = {"text": {"verbosity": "low"}, "reasoning": {"effort": "low"}}
    generation = asked(**fields, **more, **shape, include=["reasoning.encrypted_content"])
    sampling, draft = generation.sampling, generation.draft
    assert (sampling.max_tokens, sampling.temperature, sampling.top_p, sampling.logprobs) == (9, 0.5, 0.9, 3)
    assert (generation.stream, generation.priority, generation.timeout_s) == (True, 2, 5)
    repeated = {
        "instructions": "Be brief.",
        "text": {"format": {"type": "text"}, "verbosity": "low"},
        "reasoning": {"effort": "low", "summary": None},
    }
    assert json.loads(draft.parameters) == DEFAULTS | fields | repeated
    assert (draft.is_stored, draft.has_encrypted_reasoning) == (False, True)
    [prompt] = generation.prompts
    assert [(message.role, message.content) for message in prompt.messages or ()] == [
        ("system", "Be brief."), ("user", "x"),
    ]  # fmt: skip
    assert prompt.chat is not None
    variables = json.loads(prompt.chat.variables or "")
    assert (variables["reasoning_effort"], variables["verbosity"]) == ("low", "low")


def test_log_probabilities_may_be_asked_for_without_alternatives() -> None:
    assert asked(include=["message.output_text.logprobs"]).sampling.logprobs == 0


@pytest.mark.parametrize(("mode", "choice"), [({}, ToolChoice("auto")), ({"mode": "required"}, ToolChoice("required"))])
def test_only_allowed_tools_are_offered(mode: dict[str, str], choice: ToolChoice) -> None:
    allowed = {"type": "allowed_tools", "tools": [{"type": "function", "name": "g"}]} | mode
    use = asked(tools=TOOLS, tool_choice=allowed).tools
    assert use is not None
    assert ([tool.name for tool in use.tools], use.choice) == (["g"], choice)


@pytest.mark.parametrize(
    ("fields", "param", "code"),
    [
        ({"background": True, "top_logprobs": 1}, "top_logprobs", "unsupported_parameter"),
        ({"background": True, "include": ["message.output_text.logprobs"]}, "top_logprobs", "unsupported_parameter"),
        ({"background": True, "store": False}, "store", "invalid_value"),
        ({"include": ["everything"]}, "include", "invalid_value"),
        ({"input": None}, "input", "missing_required_parameter"),
        ({"input": []}, "input", "invalid_value"),
        ({"tool_choice": {"type": "allowed_tools", "tools": []}}, "tool_choice.tools", "invalid_value"),
        (
            {"tool_choice": {"type": "allowed_tools", "tools": [{"type": "mcp", "name": "f"}]}},
            "tool_choice",
            "invalid_value",
        ),
        ({"tool_choice": {"type": "web_search"}}, "tool_choice.type", "unsupported_parameter"),
        ({"tools": [{"type": "custom", "name": "f"}]}, "tools.[0].type", "unsupported_parameter"),
        ({"tools": [{"type": "function"}]}, "tools.[0].name", "missing_required_parameter"),
    ],
)
def test_what_is_not_served_is_refused_by_name_and_code(fields: dict[str, Any], param: str, code: str) -> None:
    error = refused(asked, **{"tools": TOOLS} | fields)
    assert (error.param, error.code) == (param, code)
