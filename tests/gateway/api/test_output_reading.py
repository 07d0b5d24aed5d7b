"""Which answers are read, and how they are constrained, by the format of the model's chat template."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import time
from collections.abc import Sequence
from functools import partial

import pytest

from gateway.api import output_reading
from gateway.api.output_reading import MAX_SCHEMA_CHARACTERS, is_costly, with_reading
from gateway.errors import ApiError
from gateway.generation import Prompt, ToolUse
from shared.bounds import MAX_GRAMMAR_CHARACTERS
from shared.conversation import ChatMessage, ChatOptions
from shared.formats import ContentText, OutputReader, ReasoningText, Tool, ToolChoice
from shared.grammar import Grammar
from shared.sampling import Sampling
from tests.gateway.api.scripted_reader import ScriptedReader
from tests.gateway.parsed_bodies import generation as any_generation
from tests.gateway.refusals import refused

CONVERSATION = Prompt(1, messages=(ChatMessage(role="user", content="x"),))
TOOLS = (Tool("f"),)
CONTENT = Grammar(kind="regex", source="a+")
generation = partial(any_generation, prompt=CONVERSATION)


class Format:
    """A format of which a test says what it can do."""

    def __init__(self, has_reasoning: bool, keeps_special_tokens: bool = False, grammar: str | None = None) -> None:
        self.has_reasoning = has_reasoning
        self.keeps_special_tokens = keeps_special_tokens
        self.asked: list[object] = []
        self._grammar = grammar

    def reader(
        self, tools: Sequence[Tool] = (), *, starts_in_reasoning: bool = False, is_exclusive: bool = False
    ) -> OutputReader:
        return ScriptedReader(starts_in_reasoning)

    def grammar(
        self, tools: Sequence[Tool], choice: ToolChoice, *, parallel: bool, content: Grammar | None, reasoning: bool
    ) -> Grammar | None:
        self.asked = [tools, choice.mode, parallel, content, reasoning]
        return content if self._grammar is None else Grammar(kind="lark", source=self._grammar)


@pytest.fixture
def formats(monkeypatch: pytest.MonkeyPatch) -> dict[str, Format]:
    known = {
        "plain": Format(False),
        "thinking": Format(True),
        "special": Format(False, True, "start: /x/"),
        "huge": Format(False, False, "x" * (MAX_GRAMMAR_CHARACTERS + 1)),
    }
    monkeypatch.setattr(output_reading, "format_named", lambda name: known[name])
    monkeypatch.setattr(output_reading, "detect_format", lambda template: template)
    return known


def test_answer_that_can_only_be_content_is_not_read(formats: dict[str, Format]) -> None:
    asked = generation()
    assert with_reading(asked, "plain") is asked
    assert with_reading(asked, "special") is asked
    completion = any_generation()
    assert with_reading(completion, "thinking") is completion


def test_model_that_reasons_is_read_without_tools_too(formats: dict[str, Format]) -> None:
    reading = with_reading(generation(includes_reasoning=False), "thinking").reading
    assert reading is not None
    assert not reading.includes_reasoning
    assert reading.new_reader(True).feed("T:a") == [ReasoningText("a")]
    assert reading.new_reader(False).feed("T:a") == [ContentText("a")]


def test_tools_are_read_and_the_grammar_is_the_formats(formats: dict[str, Format]) -> None:
    use = ToolUse(TOOLS, ToolChoice("named", "f"), is_parallel=False, is_function_call=True)
    read = with_reading(generation(tools=use, sampling=Sampling(grammar=CONTENT)), "special")
    exact = tuple(dataclasses.replace(tool, strict=True) for tool in TOOLS)
    assert formats["special"].asked == [exact, "named", False, CONTENT, False]
    assert read.sampling == Sampling(grammar=Grammar(kind="lark", source="start: /x/"), skip_special_tokens=False)
    assert read.reading is not None
    assert (read.reading.max_calls, read.reading.is_function_call) == (1, True)


@pytest.mark.parametrize("may_reason", [True, False])
def test_grammar_has_room_for_reasoning_unless_it_is_off(formats: dict[str, Format], may_reason: bool) -> None:
    with_reading(generation(may_reason=may_reason, sampling=Sampling(grammar=CONTENT)), "thinking")
    assert formats["thinking"].asked == [(), "none", True, CONTENT, may_reason]


def test_template_of_the_request_speaks_for_itself(formats: dict[str, Format]) -> None:
    own = Prompt(1, messages=CONVERSATION.messages, chat=ChatOptions(template="thinking"))
    assert with_reading(generation(prompt=own), "plain").reading is not None


@pytest.mark.parametrize(
    ("choice", "chat_format", "param", "code"),
    [
        (ToolChoice("required"), "plain", "tool_choice", "unsupported_parameter"),
        (ToolChoice("named", "f"), "plain", "tool_choice", "unsupported_parameter"),
        (ToolChoice("required"), "huge", "tools", "invalid_value"),
    ],
)
def test_what_the_format_cannot_do_is_refused(
    formats: dict[str, Format], choice: ToolChoice, chat_format: str, param: str, code: str
) -> None:
    error = refused(with_reading, generation(tools=ToolUse(TOOLS, choice)), chat_format)
    assert (error.param, error.code) == (param, code)


def test_schema_that_is_too_large_is_refused() -> None:
    use = ToolUse((Tool("f", '"' + "x" * MAX_SCHEMA_CHARACTERS + '"', strict=True),), ToolChoice("required"))
    asked = generation(tools=use)
    assert is_costly(asked)
    assert refused(with_reading, asked, "hermes").param == "tools"


@pytest.mark.parametrize("name", ["hermes", "qwen-coder", "llama-pythonic", "harmony"])
@pytest.mark.parametrize("kind", ["references", "properties", "tools", "nested"])
def test_hostile_tools_become_a_grammar_or_a_refusal_soon(name: str, kind: str) -> None:
    schemas: list[object] = [{"type": "object"}] * 256
    if kind == "references":
        properties: dict[str, object] = {f"p{i}": {"$ref": "#/$defs/x"} for i in range(600)}
        schemas = [{"type": "object", "properties": properties, "$defs": {"x": {"type": "string"}}}] * 5
    if kind == "properties":
        properties = {f"p{i}": {"type": "string", "description": "x" * 50} for i in range(400)}
        schemas = [{"type": "object", "properties": properties, "required": list(properties)}] * 2
    if kind == "nested":
        schemas = [json.loads('{"type":"object","properties":{"a":' * 300 + "{}" + "}}" * 300)]
    tools = tuple(Tool(f"f{i}", json.dumps(schema), strict=True) for i, schema in enumerate(schemas))
    asked = generation(tools=ToolUse(tools, ToolChoice("auto")))
    started = time.thread_time()
    with contextlib.suppress(ApiError):
        with_reading(asked, name)
    assert time.thread_time() - started < 5


def test_tool_that_the_format_cannot_hold_loosens_itself_alone() -> None:
    schemas = {name: {"type": "object", "properties": {f"of_{name}": {"type": "integer"}}} for name in "fgh"}
    schemas["g"] |= {"oneOf": [{}]}
    tools = tuple(Tool(name, json.dumps(schema)) for name, schema in schemas.items())
    grammar = with_reading(generation(tools=ToolUse(tools, ToolChoice("required"))), "qwen-coder").sampling.grammar
    assert grammar is not None
    assert [f"of_{name}" in grammar.source for name in schemas] == [True, False, True]


def test_calls_that_are_constrained_keep_to_the_schemas_of_tools_that_are_not_strict() -> None:
    tools = (Tool("f", '{"type":"object","properties":{"a":{"type":"integer"}},"required":["a"]}'),)
    forced = with_reading(generation(tools=ToolUse(tools, ToolChoice("required"))), "hermes")
    assert forced.sampling.grammar is not None
    assert '\\"a\\"' in forced.sampling.grammar.source or '"a"' in forced.sampling.grammar.source
    assert forced.looser_grammar is not None
    assert '"a"' not in forced.looser_grammar.source
    # A call that the model need not make is its own affair.
    assert with_reading(generation(tools=ToolUse(tools, ToolChoice("auto"))), "hermes").sampling.grammar is None
