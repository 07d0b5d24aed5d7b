"""Grammars that are refused or checked, and strict tools whose schemas cannot be held to, by every API with tools."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest

from gateway.admission.auth import Principal
from gateway.api.answer import Answer, Asked, ResponseHead
from gateway.api.output_reading import StructuredOutputAdmission, refused_schema, with_reading
from gateway.errors import ApiError
from gateway.generation import Generation, StructuredOutput, ToolUse
from shared.formats import Tool, ToolChoice
from shared.grammar import GRAMMAR_PARAM, Grammar, GrammarError, LlguidanceMissingError, check_grammar
from shared.grammar.checker import CheckerBusyError, GrammarChecker
from shared.limited_link import LimitedProcessError
from shared.sampling import Sampling
from tests.gateway import parsed_bodies
from tests.gateway.parsed_bodies import generation as any_generation

FINE = {"type": "object", "properties": {"a": {"type": "string"}}}
# Refused by what compiles grammars, and by what writes them.
NOT = {"type": "object", "properties": {"a": {"not": {"type": "string"}}}}
PATTERN = {"type": "object", "properties": {"a": {"type": "string", "pattern": "[a--b]"}}}


class Checker:
    """Checks in this process, the first few; then, or at once, it raises what it is given."""

    def __init__(self, error: Exception | None = None, num_answered: int = 0) -> None:
        self.asked: list[Grammar] = []
        self._error, self._num_answered = error, num_answered

    async def check(self, tenant: str, grammar: Grammar, within_s: float = 0.0) -> None:
        self.asked.append(grammar)
        if self._error is not None and len(self.asked) > self._num_answered:
            raise self._error
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


async def tool_refusal(asked: Generation, chat_format: str = "hermes", checker: Checker | None = None) -> ApiError:
    with pytest.raises(ApiError) as refused:
        await checked(checker or Checker(), with_reading(asked, chat_format))
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
    error = await tool_refusal(asked(schema))
    assert error.param is not None
    assert error.param.startswith(place)
    assert path.startswith(error.param.removeprefix(place))
    assert error.message.startswith(f"{error.param}: the schema of 'f2': ")


async def test_tool_is_named_beside_structured_output_too() -> None:
    error = await tool_refusal(chat(NOT, response_format={"type": "json_object"}))
    assert error.param == "tools.[2].function.parameters.properties.a"


async def test_tool_whose_calls_are_one_schema_with_the_output_is_named() -> None:
    error = await tool_refusal(chat(PATTERN, response_format={"type": "json_object"}), "llama-json")
    assert error.param == "tools.[2].function.parameters.properties.a"
    assert "the schema of 'f2': a pattern with '--'" in error.message


async def test_reader_of_strings_without_quotes_names_the_tool() -> None:
    conditions = {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["b"]}
    error = await tool_refusal(chat(conditions), "llama-pythonic")
    assert error.param == "tools.[2].function.parameters"
    assert "requires 'b'" in error.message


async def test_without_a_verdict_on_each_in_time_all_tools_are_named() -> None:
    error = await tool_refusal(chat(NOT), checker=Checker(CheckerBusyError(is_own=True, retry_after_s=1.0), 2))
    assert error.param == "tools"
    assert "not supported" in error.message


def test_tools_whose_places_are_not_known_are_named_together() -> None:
    error = refused_schema(ToolUse((Tool("f"),), ToolChoice("auto")), "f", "no.", ".a")
    assert (error.param, error.message) == ("tools", "tools: the schema of 'f': no.")


FIELD = "response_format.json_schema.schema"


def generation(source: str) -> Generation:
    grammar = Grammar(kind="json_schema", source=source)
    return any_generation(sampling=Sampling(grammar=grammar), structured_output=StructuredOutput(FIELD, grammar))


async def checked(checker: Checker, asked: Generation) -> Generation:
    return await StructuredOutputAdmission(cast("GrammarChecker", checker)).checked(asked, "t")


async def refusal(checker: Checker, asked: Generation) -> ApiError:
    with pytest.raises(ApiError) as refused:
        await checked(checker, asked)
    return refused.value


async def test_unsupported_keyword_is_named_with_its_place() -> None:
    error = await refusal(Checker(), generation('{"properties": {"a": {"not": {}}}}'))
    assert error.status == 400
    assert error.param == f"{FIELD}.properties.a"
    assert error.message == f"{FIELD}.properties.a: 'not' is not supported."


async def test_generation_without_grammar_is_not_checked() -> None:
    checker = Checker()
    await checked(checker, any_generation())
    assert checker.asked == []


async def test_grammar_made_with_tools_is_checked_too() -> None:
    checker = Checker()
    whole = Grammar(kind="lark", source="start: missing")
    asked = msgspec.structs.replace(generation("{}"), sampling=Sampling(grammar=whole))
    error = await refusal(checker, asked)
    assert error.param == "tools"
    assert [grammar.source for grammar in checker.asked] == ["{}", whole.source]


async def test_looser_grammar_takes_the_place_of_one_that_cannot_be_compiled() -> None:
    exact, looser = Grammar(kind="lark", source="start: missing"), Grammar(kind="lark", source='start: "a"')
    asked = any_generation(sampling=Sampling(grammar=exact), looser_grammar=looser)
    assert (await checked(Checker(), asked)).sampling.grammar == looser
    fine = msgspec.structs.replace(asked, sampling=Sampling(grammar=looser), looser_grammar=exact)
    assert await checked(Checker(), fine) is fine


@pytest.mark.parametrize(
    ("raised", "status"),
    [
        (CheckerBusyError(is_own=True, retry_after_s=3.0), 429),
        (CheckerBusyError(is_own=False, retry_after_s=1.0), 503),
        (LimitedProcessError(), 503),
    ],
)
async def test_grammar_that_could_not_be_checked_yet_is_not_loosened(raised: Exception, status: int) -> None:
    exact, looser = Grammar(kind="lark", source='start: "a" "b"'), Grammar(kind="lark", source='start: "a"')
    asked = any_generation(sampling=Sampling(grammar=exact), looser_grammar=looser)

    class Busy(Checker):
        async def check(self, tenant: str, grammar: Grammar, within_s: float = 0.0) -> None:
            if grammar == exact:
                raise raised

    assert (await refusal(Busy(), asked)).status == status


def offering(*tools: dict[str, Any], **more: Any) -> Generation:
    """Return a generation that has to call one of these functions, unless it is asked otherwise."""
    functions = [{"type": "function", "function": tool} for tool in tools]
    return with_reading(parsed_bodies.chat(**{"tools": functions, "tool_choice": "required", **more}), "hermes")


def takes(name: str, kind: str, **more: Any) -> dict[str, Any]:
    schema = {"type": "object", "properties": {f"of_{name}": {"type": kind}}, "required": [f"of_{name}"]}
    return {"name": name, "parameters": schema, **more}


async def test_tool_that_cannot_be_compiled_does_not_loosen_the_others() -> None:
    # No type of JSON Schema, which programs write all the same.
    grammar = (await checked(Checker(), offering(takes("f", "integer"), takes("final_answer", "any")))).sampling.grammar
    assert grammar is not None
    check_grammar(grammar)
    assert ("of_f" in grammar.source, "of_final_answer" in grammar.source) == (True, False)
    alone = offering(takes("final_answer", "any"))
    assert (await checked(Checker(), alone)).sampling.grammar == alone.looser_grammar


async def test_form_of_the_text_holds_beside_a_tool_that_cannot_be_compiled() -> None:
    schema = {"type": "object", "properties": {"of_text": {"type": "string"}}, "required": ["of_text"]}
    form = {"type": "json_schema", "json_schema": {"name": "s", "schema": schema, "strict": True}}
    tools = takes("f", "integer"), takes("final_answer", "any")
    asked = offering(*tools, response_format=form, tool_choice="auto")
    grammar = (await checked(Checker(), asked)).sampling.grammar
    assert grammar is not None
    names = ("of_f", "of_final_answer", "of_text")
    assert [name in grammar.source for name in names] == [True, False, True]


async def test_strict_tool_that_cannot_be_compiled_is_named_beside_others() -> None:
    error = await refusal(Checker(), offering(takes("f", "integer"), takes("g", "any", strict=True)))
    assert "'g'" in error.message
    assert (error.param or "").startswith("tools.[1].function.parameters")


@pytest.mark.parametrize("schema", [{"$ref": "#"}, {"type": "object", "properties": {"a": {"divisibleBy": 2}}}])
async def test_strict_tool_whose_schema_llguidance_would_read_over_is_named(schema: dict[str, Any]) -> None:
    error = await refusal(Checker(), offering({"name": "g", "parameters": schema, "strict": True}))
    assert error.message.startswith("tools.[0].function.parameters")
    assert "'g'" in error.message


@pytest.mark.parametrize(
    ("raised", "status", "headers"),
    [
        (GrammarError("no."), 400, {}),
        (LlguidanceMissingError(), 501, {}),
        (CheckerBusyError(is_own=True, retry_after_s=3.0), 429, {"retry-after": "3"}),
        (CheckerBusyError(is_own=False, retry_after_s=1.0), 503, {"retry-after": "1"}),
        (LimitedProcessError(), 503, {"retry-after": "1"}),
    ],
)
async def test_checker_that_cannot_say_yes_is_an_honest_error(
    raised: Exception, status: int, headers: dict[str, str]
) -> None:
    error = await refusal(Checker(raised), generation("{}"))
    assert error.status == status
    answered: dict[str, Any] = {name.decode(): value.decode() for name, value in error.response_headers()}
    assert headers.items() <= answered.items()


class ToldAnswer(Answer):
    """Keeps the error instead of telling it."""

    def _complete(self) -> None:
        raise AssertionError("it fails")

    def _report(self, error: ApiError) -> None:
        self.told = error


def told(asked: Generation) -> ToldAnswer:
    exchange = cast("Any", SimpleNamespace(disconnected=False))
    return ToldAnswer(Asked(exchange, asked, ResponseHead("r", 0.0), Principal("key", "t")))


@pytest.mark.parametrize("has_output", [True, False])
async def test_workers_error_about_the_grammar_names_the_field_of_the_client(has_output: bool) -> None:
    asked = generation("{}")
    if not has_output:
        asked = msgspec.structs.replace(asked, structured_output=None)
    answer = told(asked)
    refused = GrammarError("it matches no text.", ".items", GRAMMAR_PARAM)
    answer.fail(ApiError(400, str(refused), param=refused.param, code=refused.code))
    field = FIELD if has_output else "tools"
    assert answer.told.message == f"{field}.items: it matches no text."
    assert (answer.told.status, answer.told.param, answer.told.code) == (400, field, "invalid_grammar")


async def test_error_that_no_field_is_at_fault_for_keeps_its_words_and_when_to_come_back() -> None:
    answer = told(generation("{}"))
    answer.fail(ApiError(503, "Not checked yet.", param=GRAMMAR_PARAM, code="grammar_not_checked", retry_after_s=2.0))
    assert (answer.told.message, answer.told.param) == ("Not checked yet.", FIELD)
    assert (b"retry-after", b"2") in answer.told.response_headers()


async def test_workers_error_about_another_field_is_told_as_it_is() -> None:
    answer = told(generation("{}"))
    answer.fail(ApiError(400, "The prompt is too long.", param="prompt"))
    assert (answer.told.message, answer.told.param) == ("The prompt is too long.", "prompt")
