"""What `multipleOf` may cost. llguidance would take seconds and hundreds of megabytes for the refused ones."""

from __future__ import annotations

import json
from typing import Any

import pytest

from shared.grammar import Grammar, GrammarError, check_grammar, grammar_text
from shared.grammar.multiples import MAX_STATES, grammar_states


def integer(divisor: float, **options: Any) -> dict[str, Any]:
    return {"type": "integer", "multipleOf": divisor, **options}


def grammars_of(schema: Any) -> list[Grammar]:
    source = json.dumps(schema)
    lark = f"// %json\nstart: a\na: %json {source}\n"
    return [Grammar(kind="json_schema", source=source), Grammar(kind="lark", source=lark)]


REFUSED = [
    integer(15_001),
    integer(99_730),
    integer(1_048_576),
    integer(1.5001),
    {"properties": {"a": integer(9_001), "b": integer(9_007)}},
    {"properties": {str(n): integer(997, minimum=n) for n in range(20)}},
    {"allOf": [integer(101), {"multipleOf": 103}, {"multipleOf": 107}]},
    {"$ref": "#/$defs/a", "multipleOf": 997, "$defs": {"a": {"multipleOf": 991}}},
    {"$ref": "#/$defs/a", "multipleOf": 9_973, "$defs": {"a": {"multipleOf": 9_967}}},
]


@pytest.mark.parametrize("schema", REFUSED)
def test_divisors_that_make_a_large_automaton_are_refused(schema: Any) -> None:
    for grammar in grammars_of(schema):
        with pytest.raises(GrammarError, match="'multipleOf' is too large"):
            grammar_text(grammar)


def test_refusal_says_where_the_largest_divisor_stands() -> None:
    grammar = Grammar(kind="json_schema", source=json.dumps({"properties": {"a": integer(2), "b": integer(20_023)}}))
    with pytest.raises(GrammarError) as refused:
        grammar_text(grammar)
    assert refused.value.path == ".properties.b"


def test_escaped_keyword_behind_json_is_found() -> None:
    grammar = Grammar(kind="lark", source='start: %json {"type": "integer", "multiple\\u004ff": 15001}')
    with pytest.raises(GrammarError, match="'multipleOf' is too large"):
        grammar_text(grammar)


@pytest.mark.parametrize(
    "schema",
    [
        integer(9_973),
        integer(1_000_000),
        integer(3_600),
        {"type": "number", "multipleOf": 0.01},
        {"properties": {str(n): {"type": "number", "multipleOf": 0.01, "minimum": n} for n in range(100)}},
        {"allOf": [{"$ref": "#/$defs/a"}, {"minimum": 5}], "$defs": {"a": integer(5)}},
        # The name of a property, not a keyword.
        {"properties": {"multipleOf": {"const": 15_001}}},
    ],
)
def test_usual_divisors_are_admitted(schema: Any) -> None:
    for grammar in grammars_of(schema):
        check_grammar(grammar)
        assert grammar_states(grammar_text(grammar)) <= MAX_STATES


def test_states_are_counted_in_every_form() -> None:
    assert [grammar_states(grammar_text(each)) for each in grammars_of(integer(9_973))] == [9_973, 9_973]
