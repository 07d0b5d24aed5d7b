"""Tools that Anthropic has defined: the client's reach the model with a schema, and the server's are refused."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import pytest

from gateway.anthropic.parsing import parse_messages
from gateway.anthropic.tools import CLIENT_TOOLS
from gateway.generation import Generation
from shared.grammar import Grammar, check_grammar
from tests.gateway.refusals import refused

# Calls as Anthropic's documentation shows them, and one that each tool does not have.
CALLS: dict[str, tuple[list[dict[str, Any]], dict[str, Any]]] = {
    "bash_20250124": ([{"command": "ls"}, {"restart": True}], {"path": "a"}),
    "text_editor_20250124": (
        [
            {"command": "view", "path": "a.py", "view_range": [11, -1]},
            {"command": "insert", "path": "a.py", "insert_line": 0, "new_str": "x"},
            {"command": "undo_edit", "path": "a.py"},
        ],
        {"command": "insert", "path": "a.py", "insert_line": 0, "insert_text": "x"},
    ),
    "text_editor_20250728": (
        [
            {"command": "create", "path": "a.py", "file_text": "x"},
            {"command": "str_replace", "path": "a.py", "old_str": "x", "new_str": "y"},
            {"command": "insert", "path": "a.py", "insert_line": 3, "insert_text": "x"},
        ],
        {"command": "undo_edit", "path": "a.py"},
    ),
    "memory_20250818": (
        [
            {"command": "view", "path": "/memories"},
            {"command": "rename", "old_path": "/memories/a", "new_path": "/memories/b"},
            {"command": "delete", "path": "/memories/a"},
        ],
        {"command": "undo_edit", "path": "/memories/a"},
    ),
}


def parsed(*tools: dict[str, Any]) -> Generation:
    body = {"model": "m", "max_tokens": 9, "messages": [{"role": "user", "content": "hi"}], "tools": tools}
    return parse_messages(json.dumps(body).encode())


def function_of(generation: Generation) -> dict[str, Any]:
    options = generation.prompts[0].chat
    assert options is not None
    [tool] = json.loads(options.tools or "")
    function: dict[str, Any] = tool["function"]
    return function


@pytest.mark.parametrize("kind", CLIENT_TOOLS)
def test_client_s_tool_reaches_the_model_with_its_arguments(kind: str) -> None:
    name = CLIENT_TOOLS[kind].name
    generation = parsed({"type": kind, "name": name, "strict": True, "cache_control": {"type": "ephemeral"}})
    function = function_of(generation)
    assert function["name"] == name
    assert len(function["description"]) > 40
    assert all(argument["description"] for argument in function["parameters"]["properties"].values())
    # A strict tool's grammar is made of it.
    check_grammar(Grammar(kind="json_schema", source=json.dumps(function["parameters"])))
    assert generation.tools is not None
    assert [tool.name for tool in generation.tools.tools] == [name]


@pytest.mark.parametrize("kind", CALLS)
def test_documented_calls_are_those_that_the_schema_allows(kind: str) -> None:
    schema = function_of(parsed({"type": kind, "name": CLIENT_TOOLS[kind].name}))["parameters"]
    validator = jsonschema.Draft202012Validator(schema)
    allowed, other = CALLS[kind]
    for call in allowed:
        validator.validate(call)
    assert not validator.is_valid(other)


def test_limit_of_what_is_viewed_is_told_to_the_model() -> None:
    editor = {"type": "text_editor_20250728", "name": "str_replace_based_edit_tool"}
    assert "character 500." in function_of(parsed(editor | {"max_characters": 500}))["description"]
    old = {"type": "text_editor_20250429", "name": "str_replace_based_edit_tool", "max_characters": 500}
    assert (refused(parsed, old).param, refused(parsed, old).code) == ("tools.[0].max_characters", "unknown_parameter")
    own = {"name": "f", "input_schema": {"type": "object"}, "max_characters": 500}
    assert refused(parsed, own).param == "tools.[0].max_characters"


@pytest.mark.parametrize(
    ("tool", "reason"),
    [
        ({"type": "web_search_20260318", "name": "web_search", "max_uses": 5}, "The server would have to run it"),
        ({"type": "web_fetch_20250910", "name": "web_fetch"}, "The server would have to run it"),
        (
            {
                "type": "web_fetch_20260318",
                "name": "w",
                "url_sources": [],
                "use_cache": True,
                "response_inclusion": "a",
            },
            "The server would have to run it",
        ),
        ({"type": "code_execution_20250825", "name": "code_execution"}, "The server would have to run it"),
        ({"type": "mcp_toolset", "mcp_server_name": "a"}, "The server would have to run it"),
        ({"type": "computer_20250124", "name": "computer", "display_width_px": 9, "display_height_px": 9}, "no images"),
        ({"type": "computer_20251124", "name": "computer", "enable_zoom": True}, "no images"),
        ({"type": "bash_20990101", "name": "bash"}, "Known are bash_20241022"),
    ],
)
def test_tool_that_is_not_served_is_refused_with_the_true_reason(tool: dict[str, Any], reason: str) -> None:
    error = refused(parsed, tool)
    assert (error.param, error.code) == ("tools.[0].type", "unsupported_parameter")
    assert reason in error.message


@pytest.mark.parametrize(
    ("change", "param"),
    [({"name": "shell"}, "name"), ({"description": "x"}, "description"), ({"input_schema": {}}, "input_schema")],
)
def test_what_a_defined_tool_fixes_cannot_be_given(change: dict[str, Any], param: str) -> None:
    error = refused(parsed, {"type": "bash_20250124", "name": "bash"} | change)
    assert (error.param, error.code) == (f"tools.[0].{param}", "invalid_value")


def test_tool_of_the_client_s_own_needs_a_name() -> None:
    error = refused(parsed, {"input_schema": {"type": "object"}})
    assert (error.param, error.code) == ("tools.[0].name", "missing_required_parameter")


@pytest.mark.parametrize("kind", [kind for kind in CLIENT_TOOLS if kind.startswith(("text_editor", "memory"))])
def test_call_needs_a_command_and_that_of_an_editor_a_path(kind: str) -> None:
    schema = function_of(parsed({"type": kind, "name": CLIENT_TOOLS[kind].name}))["parameters"]
    validator = jsonschema.Draft202012Validator(schema)
    assert validator.is_valid({"command": "view", "path": "a"})
    assert not validator.is_valid({"path": "a"})
    assert validator.is_valid({"command": "undo_edit", "path": "a"}) is ("undo_edit" in CLIENT_TOOLS[kind].description)
    assert validator.is_valid({"command": "view"}) is kind.startswith("memory")
