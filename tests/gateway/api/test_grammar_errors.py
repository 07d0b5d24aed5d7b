"""A strict tool whose schema cannot be held to is refused by its name and place, by every API that has tools."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import pytest

from gateway.api.output_reading import refused_schema, with_reading
from gateway.api.structured_output import StructuredOutputAdmission
from gateway.errors import ApiError
from gateway.generation import Generation, ToolUse
from shared.formats import Tool, ToolChoice
from shared.grammar import Grammar, check_grammar
from shared.grammar.checker import CheckerBusyError, GrammarChecker
from tests.gateway import parsed_bodies

FINE = {"type": "object", "properties": {"a": {"type": "string"}}}
# Refused by what compiles grammars, and by what writes them.
NOT = {"type": "object", "properties": {"a": {"not": {"type": "string"}}}}
PATTERN = {"type": "object", "properties": {"a": {"type": "string", "pattern": "[a--b]"}}}


class Checker:
    """Checks in this process, the first few; then it is busy."""

    def __init__(self, num_answered: int = 100) -> None:
        self._num_answered = num_answered

    async def check(self, tenant: str, grammar: Grammar, within_s: float = 0.0) -> None:
        self._num_answered -= 1
        if self._num_answered < 0:
            raise CheckerBusyError(is_own=True, retry_after_s=1.0)
        check_grammar(grammar)


def function(name: str, schema: Any) -> dict[str, Any]:
    return {"name": name, "parameters": schema, "strict": True}


def chat(schema: Any, **fields: Any) -> Generation:
    tools = [{"type": "function", "function": function(f"f{i}", each)} for i, each in enumerate((FINE, FINE, schema))]
    return parsed_bodies.chat(tools=tools, **fields)


def functions(schema: Any) -> Generation:
    # The older form has no strict functions of its own; `strict` is read in it too.
    return parsed_bodies.chat(functions=[function("f0", FINE), function("f2", schema)])


def response(schema: Any) -> Generation:
    return _response(_typed("f2", schema))


def namespaced(schema: Any) -> Generation:
    return _response({"type": "namespace", "name": "n", "tools": [_typed("f2", schema)]})


def _response(tool: dict[str, Any]) -> Generation:
    return parsed_bodies.response(tools=[_typed("f0", FINE), tool])


def _typed(name: str, schema: Any) -> dict[str, Any]:
    return {"type": "function", **function(name, schema)}


def message(schema: Any) -> Generation:
    tools = [{"name": f"f{i}", "input_schema": each, "strict": True} for i, each in enumerate((FINE, FINE, schema))]
    return parsed_bodies.message(tools=tools)


async def refusal(generation: Generation, chat_format: str = "hermes", num_answered: int = 100) -> ApiError:
    admission = StructuredOutputAdmission(cast("GrammarChecker", Checker(num_answered)))
    with pytest.raises(ApiError) as refused:
        await admission.checked(with_reading(generation, chat_format), "t")
    assert refused.value.status == 400
    return refused.value


@pytest.mark.parametrize(
    ("asked", "place"),
    [
        (chat, "tools.[2].function.parameters"),
        (functions, "functions.[1].parameters"),
        (response, "tools.[1].parameters"),
        (namespaced, "tools.[1].tools.[0].parameters"),
        (message, "tools.[2].input_schema"),
    ],
)
@pytest.mark.parametrize(
    ("schema", "path"), [(NOT, ".properties.a"), (PATTERN, ".properties.a.pattern"), ({"x": "y" * 140_000}, "")]
)
async def test_strict_tool_at_fault_is_named_with_the_place_of_its_schema(
    asked: Callable[[Any], Generation], place: str, schema: Any, path: str
) -> None:
    error = await refusal(asked(schema))
    assert error.param is not None
    assert error.param.startswith(place)
    assert path.startswith(error.param.removeprefix(place))
    assert error.message.startswith(f"{error.param}: the schema of 'f2': ")


async def test_tool_is_named_beside_structured_output_too() -> None:
    error = await refusal(chat(NOT, response_format={"type": "json_object"}))
    assert error.param == "tools.[2].function.parameters.properties.a"


async def test_tool_whose_calls_are_one_schema_with_the_output_is_named() -> None:
    error = await refusal(chat(PATTERN, response_format={"type": "json_object"}), "llama-json")
    assert error.param == "tools.[2].function.parameters.properties.a"
    assert "the schema of 'f2': a pattern with '--'" in error.message


async def test_reader_of_strings_without_quotes_names_the_tool() -> None:
    conditions = {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["b"]}
    error = await refusal(chat(conditions), "llama-pythonic")
    assert error.param == "tools.[2].function.parameters"
    assert "requires 'b'" in error.message


async def test_without_a_verdict_on_each_in_time_all_tools_are_named() -> None:
    error = await refusal(chat(NOT), num_answered=2)
    assert error.param == "tools"
    assert "not supported" in error.message


def test_tools_whose_places_are_not_known_are_named_together() -> None:
    error = refused_schema(ToolUse((Tool("f"),), ToolChoice("auto")), "f", "no.", ".a")
    assert (error.param, error.message) == ("tools", "tools: the schema of 'f': no.")
