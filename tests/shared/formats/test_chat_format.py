"""Reader and grammar of a description agree, and say what its family of models writes."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.formats import ContentText, Tool, ToolChoice, detect_format, format_named, format_names
from shared.grammar import Grammar
from tests.shared.formats.reading import read, understood
from tests.shared.formats.tools import tools
from tests.shared.formats.vocabulary import check_grammar
from tests.shared.formats.writers import ONE_CALL_ONLY, WRITERS, WRITTEN

# Written for these tests in the manner of each family's templates: how they write a call, and how they open a turn.
_TEMPLATES = {
    "plain": "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}",
    "thinking": "{{ m.content.split('</think>')[-1] }}{% if add_generation_prompt %}<|Assistant|><think>\n{% endif %}",
    "hermes": '{{ "<tool_call>\\n" }}{"name": "{{ call.name }}", "arguments": {{ call.arguments }}}\n</tool_call>',
    "hermes-thinking": "{{ '<think>\\n' + m.reasoning_content + '\\n</think>' }}{{ '<tool_call>\\n{\"name\": \"' }}",
    "qwen-coder": "{{ '<tool_call>\\n<function=' + call.name + '>\\n' }}{{ '<parameter=' + key + '>\\n' }}",
    "qwen-coder-thinking": "</think>{{ '<tool_call>\\n<function=' + call.name }}{{ '<parameter=' + key + '>' }}",
    "glm": "<think></think>{{ '<tool_call>' + call.name }}<arg_key>{{ k }}</arg_key><arg_value>{{ v }}</arg_value>",
    "deepseek-v3": "{{ '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>' + tool.type + '<｜tool▁sep｜>' }}",
    "deepseek-r1": "{{ content.split('</think>')[-1] }}{{ '<｜tool▁calls▁begin｜>' }}{{ '<｜Assistant｜><think>\\n' }}",
    "deepseek-v3.1": "{% if not thinking %}</think>{% else %}<think>{% endif %}{{ '<｜tool▁calls▁begin｜>' }}",
    "deepseek-v3.2": "{% set dsml = '｜DSML｜' %}<{{ dsml }}function_calls><think></think>{% if thinking %}",
    "kimi": "<|tool_calls_section_begin|>{% for c in calls %}<|tool_call_begin|>{{ c.id }}",
    "kimi-thinking": "<think>{{ r }}</think><|tool_calls_section_begin|><|tool_call_begin|>{{ c.id }}",
    "minimax": "{% set begin = '<minimax:tool_call>' %}<invoke name=\"{{ name }}\"></think>",
    "lfm": "{{ '<|tool_call_start|>[' + calls | join(', ') + ']<|tool_call_end|>' }}",
    "mistral-list": '[TOOL_CALLS][{"name": "{{ call.name }}", "arguments": {{ call.arguments }}}]',
    "mistral": "{{ '[TOOL_CALLS]' + call.name + '[ARGS]' + arguments }}",
    "mistral-thinking": "{{ '[THINK]' + block.thinking + '[/THINK]' }}{{ '[TOOL_CALLS]' + call.name + '[ARGS]' }}",
    "gemma": "{{ '<|tool_call>call:' + function.name + '{' }}{{ '<|channel>thought\\n<channel|>' }}",
    "function-gemma": "{{ '<start_function_call>call:' + name + '{' + '<escape>' }}",
    "llama-json": '<|start_header_id|>assistant{{ \'{"name": "\' + call.name + \'", "parameters": \' }}',
    "llama-pythonic": "<|header_start|>system Write [func_name1(params_name1=params_value1), func_name2()]",
    "harmony": "<|start|>assistant<|channel|>analysis<|message|>{{ m.thinking }}<|end|>",
}


def test_every_format_has_a_template_here() -> None:
    assert _TEMPLATES.keys() == set(format_names())


@pytest.mark.parametrize("name", _TEMPLATES)
def test_format_is_known_by_its_template(name: str) -> None:
    assert detect_format(_TEMPLATES[name]) == name


@pytest.mark.parametrize(
    ("name", "prompt", "starts"),
    [
        ("hermes-thinking", "<|im_start|>assistant\n<think>\n", True),
        ("hermes-thinking", "<|im_start|>assistant\n<think>\n\n</think>\n\n", False),
        ("hermes-thinking", "<|im_start|>assistant\n", False),
        ("hermes-thinking", "<|im_start|>user\nWhat is <think>?<|im_end|>\n<|im_start|>assistant\n", False),
        ("hermes", "<|im_start|>assistant\n<think>\n", False),
        ("deepseek-v3.1", "<｜Assistant｜></think>", False),
        ("deepseek-v3.1", "<｜Assistant｜><think>", True),
        ("gemma", "<|turn>model\n<|channel>thought\n<channel|>", False),
        ("gemma", "<|turn>model\n<|channel>thought\n", True),
        ("harmony", "<|start|>assistant", False),
        ("harmony", "<|start|>assistant<|channel|>analysis<|message|>", True),
        ("mistral-thinking", "[/INST][THINK]", True),
        ("plain", "<think>", False),
    ],
)
def test_prompt_that_opens_the_reasoning_is_known_by_its_end(name: str, prompt: str, starts: bool) -> None:
    assert format_named(name).starts_in_reasoning(prompt) is starts


def test_continued_answer_may_be_inside_of_reasoning() -> None:
    spoken = format_named("hermes-thinking")
    assert spoken.starts_in_reasoning("…<think>\nI am", "<think>\nI am")
    assert not spoken.starts_in_reasoning("…<think>a</think>\nI", "<think>a</think>\nI")
    assert not spoken.starts_in_reasoning("…I am", "I am")


@pytest.mark.parametrize("name", [name for name in _TEMPLATES if name.endswith("-thinking")])
def test_family_that_thinks_has_the_tokens_of_its_calls_and_of_its_thoughts(name: str) -> None:
    found, plain = format_named(name), format_named(name.removesuffix("-thinking"))
    assert found.has_reasoning
    assert plain.tokens
    assert {*plain.tokens} < {*found.tokens}


@pytest.mark.parametrize("name", ["", "plain", "a family of tomorrow"])
def test_name_without_a_description_reads_all_text_as_content(name: str) -> None:
    reader = format_named(name).reader([Tool("f")])
    assert reader.feed('<tool_call>{"name": "f"}') == [ContentText('<tool_call>{"name": "f"}')]
    assert reader.finish() == []


@pytest.mark.parametrize("name", format_names())
def test_format_is_found_by_its_own_name(name: str) -> None:
    assert format_named(name).name == name


def test_model_without_a_template_speaks_the_plain_format() -> None:
    assert detect_format(None) == "plain"
    assert detect_format("{{ messages }}") == "plain"


def test_plain_format_constrains_the_content_alone() -> None:
    content = Grammar(kind="json_schema", source="{}")
    assert format_named("plain").grammar([], ToolChoice(), content=content) == content
    assert format_named("plain").grammar([], ToolChoice()) is None


# What no family quotes: their own markers are tested in transcripts.
_TEXTS = st.text(st.characters(exclude_categories=["Cs", "Cc"], exclude_characters="<[{|｜"), max_size=12)
_WEATHER = st.fixed_dictionaries({"city": _TEXTS}, optional={"days": st.integers(-9, 10**12), "metric": st.booleans()})
_SEARCH = st.fixed_dictionaries(
    {"query": _TEXTS, "kind": st.sampled_from(["news", "books"]), "tags": st.lists(_TEXTS, max_size=3)},
    optional={
        "near": st.fixed_dictionaries({"x": st.floats(-1e6, 1e6)}),
        "limit": st.none() | st.integers(0, 99),
    },
)
_CALLS = st.one_of(
    st.tuples(st.just("get_weather"), _WEATHER),
    st.tuples(st.just("search"), _SEARCH),
    st.tuples(st.just("get"), st.just({})),
)


def _in_order(call: tuple[str, dict[str, Any]]) -> tuple[str, dict[str, Any]]:
    """Return a call whose arguments stand in the schema's order, as llguidance demands."""
    order = ("city", "days", "metric", "query", "kind", "tags", "near", "limit")
    return call[0], {key: call[1][key] for key in order if key in call[1]}


def _with_reasoning(name: str, text: str) -> str:
    tags = format_named(name).reasoning
    if tags is None:
        return text
    return f"{tags.opens[0]}I think.\n{tags.closes[0]}{tags.behind}{text}"


_EVERYTHING = [
    ("search", {"query": 'a "b"\\ é🌍', "kind": "books", "tags": ["", "c d"], "near": {"x": -1.5}, "limit": None}),
    ("get", {}),
    ("get_weather", {"city": "", "days": -3, "metric": True}),
]


def _check_written_calls(name: str, calls: list[Any], *, strict: bool) -> None:
    spoken = format_named(name)
    calls = calls[:1] if name in ONE_CALL_ONLY else calls
    text = WRITERS[name](calls)
    offered = tools(strict=strict)
    for mode in ("required", "auto") if strict else ("required",):
        check_grammar(spoken, spoken.grammar(offered, ToolChoice(mode)), allows=(text, _with_reasoning(name, text)))
    found = understood(read(spoken, [_with_reasoning(name, text)], offered))
    assert [(each, json.loads(arguments)) for each, arguments in found.calls] == calls
    assert found.content == ""
    assert found.reasoning == ("I think." if spoken.has_reasoning else "")


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("name", WRITTEN)
def test_written_calls_are_allowed_and_read_as_they_were_written(name: str, strict: bool) -> None:
    _check_written_calls(name, _EVERYTHING, strict=strict)


@pytest.mark.slow
@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("name", WRITTEN)
@settings(max_examples=40, derandomize=True, database=None)
@given(calls=st.lists(_CALLS.map(_in_order), min_size=1, max_size=3))
def test_any_written_calls_are_allowed_and_read_as_they_were_written(name: str, strict: bool, calls: list[Any]) -> None:
    _check_written_calls(name, calls, strict=strict)


@pytest.mark.parametrize("name", WRITTEN)
def test_strict_call_with_a_wrong_argument_is_not_allowed(name: str) -> None:
    spoken = format_named(name)
    calls = [("search", {"query": "a", "kind": "films", "tags": []}), ("get_weather", {"days": 1}), ("fly", {})]
    wrong = tuple(WRITERS[name]([call]) for call in calls)
    for mode in ("auto", "required"):
        check_grammar(spoken, spoken.grammar(tools(strict=True), ToolChoice(mode)), refuses=wrong)


@pytest.mark.parametrize("name", WRITTEN)
def test_named_tool_is_the_only_one_allowed(name: str) -> None:
    spoken, write = format_named(name), WRITERS[name]
    check_grammar(
        spoken,
        spoken.grammar(tools(), ToolChoice("named", "get")),
        allows=(write([("get", {})]),),
        refuses=(write([("get_weather", {"city": "Rome"})]), "Hello"),
    )


@pytest.mark.parametrize("name", [each for each in WRITTEN if not ONE_CALL_ONLY & set(each.values)])
def test_second_call_needs_parallel_calls(name: str) -> None:
    spoken = format_named(name)
    twice = (WRITERS[name]([("get", {}), ("get", {})]),)
    for mode in ("auto", "required"):
        check_grammar(spoken, spoken.grammar(tools(strict=True), ToolChoice(mode), parallel=True), allows=twice)
        check_grammar(spoken, spoken.grammar(tools(strict=True), ToolChoice(mode), parallel=False), refuses=twice)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        *((name, "json_schema") for name in format_names()),
        *itertools.product(("plain", "hermes-thinking", "harmony"), ("regex", "lark", "gbnf")),
    ],
)
def test_content_keeps_to_its_grammar_behind_reasoning(name: str, kind: Any) -> None:
    sources = {
        "json_schema": '{"type": "object", "properties": {"start": {"type": "integer"}}, "required": ["start"]}',
        "regex": r'\{"start": ?[0-9/]+\}',
        "lark": 'start: "{" start-key ": " /[0-9]+/ "}"\nstart-key: "\\"start\\"" // the start',
        "gbnf": 'root ::= "{\\"start\\": " [0-9]+ "}"',
    }
    spoken = format_named(name)
    grammar = spoken.grammar([], ToolChoice(), content=Grammar(kind=kind, source=sources[kind]))
    assert grammar is not None
    good, bad = (f"{spoken.content_open}{each}" for each in ('{"start": 1}', '{"start": "x"}'))
    check_grammar(spoken, grammar, allows=(good, _with_reasoning(name, good)))
    check_grammar(spoken, grammar, refuses=(bad, _with_reasoning(name, bad)))
    if spoken.reasoning:
        inside = f"I think.{spoken.reasoning.closes[0]}{spoken.reasoning.behind}"
        check_grammar(spoken, grammar.begun_in_reasoning(), allows=(inside + good,), refuses=(good,))


@pytest.mark.parametrize("name", WRITTEN)
def test_answer_with_a_content_grammar_may_call_instead(name: str) -> None:
    spoken, write = format_named(name), WRITERS[name]
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "additionalProperties": False}
    content = Grammar(kind="json_schema", source=json.dumps(schema))
    check_grammar(
        spoken,
        spoken.grammar(tools(), ToolChoice(), content=content),
        allows=(f'{spoken.content_open}{{"a": 1}}', write([("get", {})])),
        refuses=(write([("nothing", {})]), f"{spoken.content_open}Hello"),
    )


@pytest.mark.parametrize("name", WRITTEN)
def test_free_text_is_allowed_beside_strict_tools(name: str) -> None:
    spoken = format_named(name)
    free = f"{spoken.content_open}Hello < [world]\n"
    check_grammar(spoken, spoken.grammar(tools(strict=True), ToolChoice()), allows=(free,))


@pytest.mark.parametrize("name", format_names())
def test_nothing_to_constrain_has_no_grammar(name: str) -> None:
    spoken = format_named(name)
    assert spoken.grammar(tools(), ToolChoice()) is None
    assert spoken.grammar(tools(strict=True), ToolChoice("none")) is None
    assert spoken.grammar([], ToolChoice()) is None


# A family with an opening of the content has calls that are messages of their own.
@pytest.mark.parametrize(
    "name", [name for name in WRITERS if format_named(name).has_reasoning and not format_named(name).content_open]
)
def test_call_ends_reasoning_that_the_prompt_has_opened(name: str) -> None:
    spoken = format_named(name)
    text = "I will call." + WRITERS[name]([("get", {})])
    grammar = spoken.grammar(tools(), ToolChoice("required"))
    check_grammar(spoken, grammar.begun_in_reasoning(), allows=(text,))
    found = understood(read(spoken, [text], tools(), starts_in_reasoning=True))
    assert (found.content, found.reasoning, len(found.calls)) == ("", "I will call.", 1)
