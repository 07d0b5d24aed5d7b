"""Tools that a body offers, the choice among them, their older form, and variables of the template."""

from __future__ import annotations

import json
from typing import Any

import pytest

from gateway.api.schemas.parsing import parse_chat
from gateway.api.schemas.tools import MAX_TOOLS_BYTES
from gateway.generation import Generation, ToolUse
from shared.bounds import MAX_TOOLS
from shared.conversation import ChatOptions
from shared.formats import Tool, ToolChoice
from tests.gateway.refusals import refused

ADD = {"name": "add", "description": "Adds.", "parameters": {"type": "object", "x": [1.0, "é"]}, "strict": True}
FUNCTIONS = [ADD, {"name": "now"}]
TOOLS = [{"type": "function", "function": function} for function in FUNCTIONS]
ADD_TOOL = Tool("add", '{"type":"object","x":[1.0,"é"]}', strict=True)
NOW_TOOL = Tool("now")
USER = [{"role": "user", "content": "x"}]
ANSWER = [*USER, {"role": "assistant", "content": "a"}]


def parse(messages: Any = USER, **fields: Any) -> Generation:
    return parse_chat(
        json.dumps({"model": "m", "messages": messages, **fields}, ensure_ascii=False, separators=(",", ":")).encode()
    )


def options(**fields: Any) -> ChatOptions:
    found = parse(**fields).prompts[0].chat
    assert found is not None
    return found


def shown(**fields: Any) -> Any:
    tools = options(**fields).tools
    assert tools is not None
    return json.loads(tools)


def choose(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


def allow(mode: str, *names: str) -> dict[str, Any]:
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": [choose(name) for name in names]}}


def test_tools_reach_the_template_without_what_is_not_for_the_model() -> None:
    described = {name: value for name, value in ADD.items() if name != "strict"}
    empty = {"name": "now", "parameters": {"type": "object", "properties": {}}}
    assert shown(tools=TOOLS) == [{"type": "function", "function": each} for each in (described, empty)]
    assert list(shown(tools=TOOLS)[0]["function"]) == ["name", "description", "parameters"]


@pytest.mark.parametrize(("written", "kept"), [({}, {}), ({"description": None}, {}), ({"description": ""},) * 2])
def test_description_that_is_left_out_is_not_shown(written: dict[str, Any], kept: dict[str, Any]) -> None:
    tool = {"type": "function", "function": {"name": "f", **written, "parameters": {"type": "object"}}}
    assert shown(tools=[tool]) == [tool | {"function": {"name": "f", **kept, "parameters": {"type": "object"}}}]


@pytest.mark.parametrize(
    ("choice", "use"),
    [
        (None, ToolUse((ADD_TOOL, NOW_TOOL), ToolChoice("auto"))),
        ("auto", ToolUse((ADD_TOOL, NOW_TOOL), ToolChoice("auto"))),
        ("required", ToolUse((ADD_TOOL, NOW_TOOL), ToolChoice("required"))),
        (choose("now"), ToolUse((NOW_TOOL,), ToolChoice("named", "now"), is_parallel=False)),
        (allow("auto", "add"), ToolUse((ADD_TOOL,), ToolChoice("auto"), is_exclusive=True)),
        (allow("required", "now", "now"), ToolUse((NOW_TOOL,), ToolChoice("required"), is_exclusive=True)),
    ],
)
def test_choice_decides_what_may_be_called_and_what_the_template_shows(choice: Any, use: ToolUse) -> None:
    fields = {"tools": TOOLS} if choice is None else {"tools": TOOLS, "tool_choice": choice}
    assert parse(**fields).tools == use
    assert [tool["function"]["name"] for tool in shown(**fields)] == [tool.name for tool in use.tools]


@pytest.mark.parametrize(
    "fields",
    [
        {"tools": TOOLS, "tool_choice": "none"},
        {"tools": []},
        {"tool_choice": "auto"},
        {"tool_choice": "none"},
        {"parallel_tool_calls": False},
        {"functions": FUNCTIONS, "function_call": "none"},
        {"functions": []},
        {"function_call": "auto"},
    ],
)
def test_without_tools_that_may_be_called_nothing_is_offered(fields: dict[str, Any]) -> None:
    generation = parse(**fields)
    assert (generation.tools, generation.prompts[0].chat) == (None, None)


def test_parallel_calls_can_be_turned_off() -> None:
    use = parse(tools=TOOLS, parallel_tool_calls=False).tools
    assert use is not None
    assert not use.is_parallel


@pytest.mark.parametrize(
    ("choice", "tools", "mode"),
    [
        (None, (ADD_TOOL, NOW_TOOL), ToolChoice("auto")),
        ("auto", (ADD_TOOL, NOW_TOOL), ToolChoice("auto")),
        ({"name": "now"}, (NOW_TOOL,), ToolChoice("named", "now")),
    ],
)
def test_older_form_offers_one_call(choice: Any, tools: tuple[Tool, ...], mode: ToolChoice) -> None:
    fields = {"functions": FUNCTIONS} if choice is None else {"functions": FUNCTIONS, "function_call": choice}
    assert parse(**fields).tools == ToolUse(tools, mode, is_parallel=False, is_function_call=True)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": "x"}, "tools"),
        ({"tools": [{"type": "custom", "function": ADD}]}, "tools.[0].type"),
        ({"tools": [{"type": "function"}]}, "tools.[0].function"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools.[0].function.name"),
        ({"tools": [{"type": "function", "function": {"name": "x" * 65}}]}, "tools.[0].function.name"),
        ({"tools": [{"type": "function", "function": {"name": "f\n"}}]}, "tools.[0].function.name"),
        (
            {"tools": [{"type": "function", "function": {"name": "f", "parameters": [1]}}]},
            "tools.[0].function.parameters",
        ),
        ({"tools": [{"type": "function", "function": {"name": "f", "params": {}}}]}, "tools.[0].function.params"),
        ({"tools": TOOLS * 2}, "tools"),
        ({"tools": [{"function": {"name": f"f{i}"}} for i in range(MAX_TOOLS + 1)]}, "tools"),
        ({"tools": [{"function": {"name": "f", "description": "x" * MAX_TOOLS_BYTES}}]}, "tools"),
        ({"functions": [{"name": "f", "description": "x" * MAX_TOOLS_BYTES}]}, "functions"),
        ({"tools": TOOLS, "tool_choice": "always"}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": choose("other")}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": {"type": "custom", "function": {"name": "add"}}}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": allow("always", "add")}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": allow("auto", "other")}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": allow("auto")}, "tool_choice.allowed_tools.tools"),
        ({"tools": TOOLS, "tool_choice": 5}, "tool_choice"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": TOOLS, "functions": FUNCTIONS}, "functions"),
        ({"functions": FUNCTIONS, "tool_choice": "auto"}, "functions"),
        ({"functions": FUNCTIONS, "function_call": "required"}, "function_call"),
        ({"functions": FUNCTIONS, "function_call": {"name": "other"}}, "function_call"),
        ({"functions": [ADD, ADD]}, "functions"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs.messages"),
        ({"chat_template_kwargs": {"a": "x" * 70_000}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {str(i): 1 for i in range(65)}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": [1]}, "chat_template_kwargs"),
        ({"chat_template": "x" * 70_000}, "chat_template"),
        ({"chat_template": "a\0"}, "chat_template"),
        ({"documents": [{"text": "a"}] * 1025}, "documents"),
        ({"documents": ["a"]}, "documents.[0]"),
        ({"reasoning_effort": "huge"}, "reasoning_effort"),
        ({"continue_final_message": True}, "continue_final_message"),
    ],
)
def test_what_cannot_be_is_refused_by_name(fields: dict[str, Any], param: str) -> None:
    assert refused(parse, **fields).param == param


def test_last_message_of_the_assistant_can_be_continued() -> None:
    expected = ChatOptions(add_generation_prompt=False, continue_final_message=True)
    assert options(messages=ANSWER, continue_final_message=True) == expected
    assert options(messages=ANSWER, continue_final_message=True, add_generation_prompt=False) == expected
    thought = [*USER, {"role": "assistant", "reasoning": "hm"}]
    assert options(messages=thought, continue_final_message=True) == expected
    both = refused(parse, ANSWER, continue_final_message=True, add_generation_prompt=True)
    assert both.param == "continue_final_message"
    called = [*USER, {"role": "assistant", "content": "a", "tool_calls": [choose("f")]}]
    assert refused(parse, called, continue_final_message=True).param == "continue_final_message"


@pytest.mark.parametrize(
    ("fields", "variables", "may_reason"),
    [
        ({"reasoning_effort": "none"}, {"enable_thinking": False, "thinking": False}, False),
        (
            {"reasoning_effort": "high"},
            {"enable_thinking": True, "thinking": True, "reasoning_effort": "high"},
            True,
        ),
        ({"chat_template_kwargs": {"enable_thinking": False, "a": [1]}}, {"enable_thinking": False, "a": [1]}, False),
        ({"chat_template_kwargs": {"thinking": False}}, {"thinking": False}, False),
        ({"verbosity": "low"}, {"verbosity": "low"}, True),
        ({"verbosity": "low", "chat_template_kwargs": {"verbosity": "x"}}, {"verbosity": "x"}, True),
        (
            {"reasoning_effort": "none", "chat_template_kwargs": {"enable_thinking": True, "thinking": True}},
            {"enable_thinking": True, "thinking": True},
            True,
        ),
        ({"documents": [{"title": "t", "text": "x"}]}, {"documents": [{"title": "t", "text": "x"}]}, True),
    ],
)
def test_variables_of_the_template(fields: dict[str, Any], variables: dict[str, Any], may_reason: bool) -> None:
    written = options(**fields).variables
    assert written is not None
    assert json.loads(written) == variables
    assert parse(**fields).may_reason is may_reason


def test_tools_and_history_count_in_the_estimate() -> None:
    plain = parse().estimated_prompt_tokens
    assert parse(tools=TOOLS).estimated_prompt_tokens > plain + 30
    call = {"function": {"name": "add", "arguments": "x" * 350}}
    with_call = parse([*USER, {"role": "assistant", "tool_calls": [call], "reasoning": "y" * 350}])
    assert with_call.estimated_prompt_tokens > plain + 200
