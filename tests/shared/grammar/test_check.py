from __future__ import annotations

import json
import sys
import time
from typing import Any

import pytest
from llguidance import LLMatcher

from shared.grammar import Grammar, GrammarError, LlguidanceMissingError, check_grammar, grammar_text, parser_limits
from shared.grammar.bounds import (
    MAX_ALTERNATIVES,
    MAX_CHARACTERS,
    MAX_DEPTH,
    MAX_REFERENCE_DEPTH,
    MAX_REFERENCES,
    MAX_RULES,
    check_lark,
)
from shared.grammar.check import refuse_endless
from tests.shared.grammar.byte_matcher import byte_tokenizer


def schema_grammar(schema: Any, is_strict: bool = True) -> Grammar:
    return Grammar(kind="json_schema", source=json.dumps(schema), strict=is_strict)


@pytest.mark.parametrize(
    "grammar",
    [
        schema_grammar({"type": "object", "properties": {"a": {"type": "integer"}}}),
        schema_grammar(True),
        schema_grammar({"maximum": 10**30, "type": "integer"}),
        Grammar(kind="regex", source=r"a/b\/c\d{3}"),
        Grammar(kind="regex", source="a\nb"),
        Grammar(kind="lark", source='start: "a" | b\nb: %json {"type": "integer"}'),
        Grammar(kind="lark", source='start: "a" // %json {"a"\n'),
        Grammar(kind="gbnf", source='root ::= "(" root? ")"'),
    ],
)
def test_grammar_that_can_be_compiled_is_accepted(grammar: Grammar) -> None:
    check_grammar(grammar)


@pytest.mark.parametrize(
    ("grammar", "reason"),
    [
        (schema_grammar({"not": {"type": "string"}}), "'not' is not supported"),
        (schema_grammar({"x-guidance": {"lenient": True}, "not": {}}), "'not' is not supported"),
        (schema_grammar({"oneOf": [{"type": "integer"}, {"type": "number"}]}), "oneOf"),
        (schema_grammar([]), "an object or a boolean"),
        (Grammar(kind="json_schema", source="{"), "not valid JSON"),
        (Grammar(kind="regex", source="["), "regular expression"),
        (Grammar(kind="gbnf", source="root ::= other"), "'other' is not defined"),
        (Grammar(kind="lark", source="start: b"), "b"),
        (Grammar(kind="lark", source='start: b\nb: "a"', in_reasoning="c b"), "c"),
        (
            Grammar(kind="lark", source='start: %json {"x-guidance": {"lenient": true}, "not": {}}'),
            "'not' is not supported",
        ),
        # llguidance would read over the one and never end the other.
        (Grammar(kind="lark", source='start: a\na: "x" %json {"divisibleBy": 2}'), "'divisibleBy' is not supported"),
        (
            Grammar(kind="lark", source='start: %json {"type": "array", "minItems": 1, "items": {"$ref": "#"}}'),
            "finite length",
        ),
    ],
)
def test_grammar_that_would_be_ignored_in_part_is_refused_with_the_reason(grammar: Grammar, reason: str) -> None:
    with pytest.raises(GrammarError) as refused:
        check_grammar(grammar)
    assert reason in refused.value.reason


@pytest.mark.parametrize(
    ("schema", "path", "reason"),
    [
        ({"properties": {"a": {"not": {}}}}, ".properties.a", "'not' is not supported."),
        ({"properties": {"not": {"type": "array", "uniqueItems": True}}}, ".properties.not", "'uniqueItems' is"),
        ({"anyOf": [{}, {"type": "string", "format": "iri"}]}, ".anyOf.[1]", "the format 'iri'"),
        ({"items": {"$ref": "https://example.com/x.json"}}, ".items", "'https://example.com/x.json' is not followed"),
        ({"items": {"$ref": "#/$defs/none"}}, ".items", "which does not exist"),
        ({"$defs": {"a": {"oneOf": [{}, {}]}}, "$ref": "#/$defs/a"}, ".$defs.a", "'oneOf' is only supported where"),
        (
            # What Zod writes for a number of 32 bits.
            {
                "properties": {
                    "a": {"type": "number", "minimum": -3.4028234663852886e38, "maximum": 3.4028234663852886e38}
                }
            },
            ".properties.a",
            "the bounds of a number must lie between -2^63 and 2^63",
        ),
        ({"items": {"type": "integer", "minimum": -(2**63)}}, ".items", "the bounds of a number"),
        ({"type": "integer", "divisibleBy": 3}, "", "'divisibleBy' is not supported"),
        ({"pattern": "(?=a)b", "type": "string"}, "", "look-around"),
        ({"pattern": r"\bword", "type": "string"}, "", "edge of a word"),
    ],
)
def test_refusal_of_a_schema_names_the_keyword_and_its_place(schema: Any, path: str, reason: str) -> None:
    with pytest.raises(GrammarError) as refused:
        check_grammar(schema_grammar(schema))
    assert refused.value.path == path
    assert reason in refused.value.reason


CYCLE = {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}}
NODE = {"type": "object", "properties": {"next": {"$ref": "#"}, "value": {"type": "integer"}}}


@pytest.mark.parametrize(
    "schema",
    [
        CYCLE,
        {"$ref": "#"},
        {**NODE, "required": ["next"]},
        {"type": "array", "items": {"$ref": "#"}, "minItems": 1},
        {"anyOf": [{"$ref": "#"}, {"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]}]},
    ],
)
def test_schema_of_endless_documents_only_is_refused(schema: Any) -> None:
    with pytest.raises(GrammarError, match="finite length"):
        check_grammar(schema_grammar(schema))


@pytest.mark.parametrize(
    "schema",
    [
        {**NODE, "required": ["value"]},
        {"type": "array", "items": {"$ref": "#"}},
        {"type": "object", "properties": {"next": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}}, "required": ["next"]},
        {"$ref": "#/components/a", "components": {"a": {"type": "integer"}}},
    ],
)
def test_recursive_schema_with_finite_documents_is_accepted(schema: Any) -> None:
    check_grammar(schema_grammar(schema))


def test_overlapping_one_of_without_strict_is_read_as_any_of() -> None:
    check_grammar(schema_grammar({"oneOf": [{"type": "integer"}, {"type": "number"}]}, is_strict=False))


def nested(depth: int) -> Any:
    schema: Any = {"type": "integer"}
    for _ in range(depth):
        schema = {"type": "array", "items": schema}
    return schema


def chain(length: int) -> Any:
    definitions = {f"d{i}": {"$ref": f"#/$defs/d{i + 1}"} for i in range(length)}
    return {"$ref": "#/$defs/d0", "$defs": {**definitions, f"d{length}": {"type": "integer"}}}


@pytest.mark.parametrize(
    ("grammar", "reason"),
    [
        (schema_grammar({"description": "x" * MAX_CHARACTERS}), f"at most {MAX_CHARACTERS}"),
        (schema_grammar(nested(MAX_DEPTH)), f"more than {MAX_DEPTH} levels"),
        (Grammar(kind="json_schema", source='{"items":' * 20_000 + "{}" + "}" * 20_000), "not valid JSON"),
        (schema_grammar({"enum": list(range(MAX_ALTERNATIVES + 1))}), f"at most {MAX_ALTERNATIVES}"),
        (schema_grammar({"properties": {f"p{i}": True for i in range(1_001)}}), "at most 1000"),
        (schema_grammar({"pattern": "a" * 5_000}), "at most 4096"),
        (schema_grammar(chain(MAX_REFERENCES)), f"at most {MAX_REFERENCES}"),
        (Grammar(kind="lark", source="start: %json " + json.dumps(chain(MAX_REFERENCES))), f"at most {MAX_REFERENCES}"),
        (schema_grammar(chain(MAX_REFERENCE_DEPTH + 1)), f"longer than {MAX_REFERENCE_DEPTH}"),
        (
            Grammar(kind="lark", source="start: %json " + json.dumps(chain(MAX_REFERENCE_DEPTH + 1))),
            f"longer than {MAX_REFERENCE_DEPTH}",
        ),
        (Grammar(kind="regex", source="a|" * MAX_ALTERNATIVES + "b|c"), f"at most {MAX_ALTERNATIVES}"),
        (Grammar(kind="lark", source="start: " + "".join(f"r{i}\nr{i}: " for i in range(MAX_RULES)) + '"a"'), "rules"),
        (Grammar(kind="lark", source="start: " + '"a" | ' * (MAX_ALTERNATIVES + 1) + '"b"'), "alternatives"),
    ],
)
def test_grammar_over_a_bound_is_refused_before_it_is_compiled(grammar: Grammar, reason: str) -> None:
    with pytest.raises(GrammarError) as refused:
        grammar_text(grammar)
    assert reason in refused.value.reason


@pytest.mark.parametrize(
    "grammar",
    [
        schema_grammar(chain(MAX_REFERENCE_DEPTH - 1)),
        schema_grammar(nested(MAX_DEPTH - 1)),
        schema_grammar({"enum": list(range(MAX_ALTERNATIVES))}),
        Grammar(kind="lark", source="start: " + "".join(f"r{i}\nr{i}: " for i in range(MAX_RULES - 2)) + '"a"'),
        Grammar(kind="lark", source="start: R0\n" + "".join(f"R{i}: R{i + 1}\n" for i in range(1_990)) + 'R1990: "a"'),
    ],
)
def test_deepest_grammar_within_the_bounds_is_compiled(grammar: Grammar) -> None:
    check_grammar(grammar)


@pytest.mark.parametrize(
    "line", ["a::[a]" + "[a]" * 80_000, "a" * 250_000, "a [" * 80_000, "a::" * 80_000, " " * 250_000]
)
def test_long_line_is_read_in_linear_time(line: str) -> None:
    begin = time.process_time()
    check_lark(line)
    assert time.process_time() - begin < 1.0


def test_long_problem_is_read_soon() -> None:
    begin = time.process_time()
    with pytest.raises(GrammarError, match="regular expression"):
        check_grammar(Grammar(kind="regex", source="regex parse error:x" * 13_000 + "("))
    assert time.process_time() - begin < 1.0


def test_failure_of_a_matcher_is_told_without_the_grammar_whose_words_could_be_taken_for_its_reason() -> None:
    text = grammar_text(Grammar(kind="lark", source='start: "too many lookarounds"'))
    matcher = LLMatcher(byte_tokenizer(), text, log_level=0, limits=parser_limits())
    assert not matcher.consume_token(ord("z"))
    assert "fails parse" in matcher.get_error()
    assert "lookarounds" not in matcher.get_error()


def test_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(LlguidanceMissingError, match="pip install llguidance"):
        check_grammar(schema_grammar({}))


ENDLESS: dict[str, Any] = {"$ref": "#/$defs/endless"}
DEFS: dict[str, Any] = {"$defs": {"endless": ENDLESS, "finite": {"type": "integer"}}}
FINITE: dict[str, Any] = {"$ref": "#/$defs/finite"}


@pytest.mark.parametrize(
    "schema",
    [
        ENDLESS,
        {"$ref": "#"},
        {"anyOf": [ENDLESS, ENDLESS]},
        {"oneOf": [ENDLESS]},
        {"allOf": [FINITE, ENDLESS]},
        {"allOf": [True, ENDLESS, FINITE]},
        {"anyOf": [FINITE], "oneOf": [ENDLESS]},
        {"type": "object", "properties": {"a": FINITE, "b": ENDLESS}, "required": ["a", "b"]},
        {"type": "object", "properties": {"b": ENDLESS}, "required": [5, "b"]},
        {"type": "array", "items": ENDLESS, "minItems": 1},
        {"type": "array", "items": ENDLESS, "minItems": 0.5},
        {"type": "array", "items": ENDLESS, "minItems": 2, "prefixItems": []},
        # Through several that need each other.
        {"$ref": "#/$defs/a", "$defs": {"a": {"allOf": [{"$ref": "#/$defs/b"}]}, "b": {"anyOf": [{"$ref": "#"}]}}},
    ],
)
def test_schema_that_always_needs_an_endless_one_is_refused(schema: dict[str, Any]) -> None:
    with pytest.raises(GrammarError, match="finite length"):
        refuse_endless(DEFS | schema)


@pytest.mark.parametrize(
    "schema",
    [
        FINITE,
        {},
        {"anyOf": [ENDLESS, FINITE]},
        {"oneOf": [ENDLESS, FINITE]},
        # Values that are no schemas may allow a document.
        {"anyOf": [ENDLESS, True]},
        {"anyOf": {"a": ENDLESS}},
        {"allOf": [FINITE, True]},
        {"type": "object", "properties": {"a": ENDLESS}},
        {"type": "object", "properties": {"a": ENDLESS}, "required": []},
        {"type": "object", "properties": {"a": ENDLESS, "b": FINITE}, "required": ["b"]},
        {"type": "object", "properties": {"a": ENDLESS}, "required": ["other"]},
        {"type": "object", "properties": [ENDLESS], "required": ["a"]},
        {"type": "object", "properties": {"a": ENDLESS}, "required": "a"},
        {"properties": {"a": ENDLESS}, "required": ["a"]},
        {"type": "array", "items": ENDLESS},
        {"type": "array", "items": ENDLESS, "minItems": 0},
        {"type": "array", "items": ENDLESS, "minItems": "1"},
        {"type": "array", "items": ENDLESS, "minItems": 1, "prefixItems": [FINITE]},
        {"type": "array", "items": [ENDLESS], "minItems": 1},
        {"items": ENDLESS, "minItems": 1},
        {"$ref": "#/$defs/none"},
        {"$ref": "https://example.com"},
        {"$ref": 5},
        # A way out three schemas away.
        {
            "$ref": "#/$defs/a",
            "$defs": {
                "a": {"allOf": [{"$ref": "#/$defs/b"}]},
                "b": {"anyOf": [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/c"}]},
                "c": {"type": "string"},
            },
        },
    ],
)
def test_schema_with_a_way_out_is_accepted(schema: dict[str, Any]) -> None:
    refuse_endless(DEFS | schema)


@pytest.mark.parametrize("schema", [True, False, None])
def test_what_is_no_object_needs_nothing(schema: Any) -> None:
    refuse_endless(schema)
