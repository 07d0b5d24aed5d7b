from __future__ import annotations

import json
from typing import Any

import pytest

from shared.grammar import Grammar
from tests.gateway.parsed_bodies import chat, completion
from tests.gateway.refusals import refused

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
ANY_OBJECT = Grammar(kind="json_schema", source='{"type":"object"}')


def schema_grammar(strict: bool = False) -> Grammar:
    return Grammar(kind="json_schema", source=json.dumps(SCHEMA), strict=strict)


ASKED: list[tuple[dict[str, Any], str, Grammar]] = [
    ({"response_format": {"type": "json_object"}}, "response_format", ANY_OBJECT),
    (
        {"response_format": {"type": "json_object", "schema": SCHEMA}},
        "response_format.schema",
        schema_grammar(),
    ),
    # As `huggingface_hub` writes it, and as its documentation does.
    ({"response_format": {"type": "json_object", "value": SCHEMA}}, "response_format.value", schema_grammar()),
    ({"response_format": {"type": "json", "value": SCHEMA}}, "response_format.value", schema_grammar()),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}},
        "response_format.json_schema.schema",
        schema_grammar(),
    ),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA, "strict": True}}},
        "response_format.json_schema.schema",
        schema_grammar(strict=True),
    ),
    ({"structured_outputs": {"json": SCHEMA}}, "structured_outputs.json", schema_grammar()),
    ({"structured_outputs": {"json": json.dumps(SCHEMA)}}, "structured_outputs.json", schema_grammar()),
    ({"structured_outputs": {"json_object": True}}, "structured_outputs.json_object", ANY_OBJECT),
    ({"structured_outputs": {"regex": "a+"}}, "structured_outputs.regex", Grammar(kind="regex", source="a+")),
    (
        {"structured_outputs": {"choice": ["a.b", "c"]}},
        "structured_outputs.choice",
        Grammar(kind="regex", source=r"(?:a\.b|c)"),
    ),
    (
        {"structured_outputs": {"grammar": 'start: "a"'}},
        "structured_outputs.grammar",
        Grammar(kind="lark", source='start: "a"'),
    ),
    ({"guided_json": SCHEMA}, "guided_json", schema_grammar()),
    ({"guided_regex": "[0-9]"}, "guided_regex", Grammar(kind="regex", source="[0-9]")),
    ({"guided_choice": ["yes"]}, "guided_choice", Grammar(kind="regex", source="(?:yes)")),
    ({"guided_grammar": 'root ::= "a"'}, "guided_grammar", Grammar(kind="gbnf", source='root ::= "a"')),
    ({"json_schema": SCHEMA}, "json_schema", schema_grammar()),
    ({"grammar": 'root ::= "a"', "response_format": None}, "grammar", Grammar(kind="gbnf", source='root ::= "a"')),
]


@pytest.mark.parametrize(("fields", "field", "grammar"), ASKED, ids=[field for _, field, _ in ASKED])
def test_field_becomes_a_grammar_in_chat_and_completions(fields: dict[str, Any], field: str, grammar: Grammar) -> None:
    for generation in (chat(**fields), completion(**fields)):
        assert generation.sampling.grammar == grammar
        assert generation.structured_output is not None
        assert generation.structured_output.field == field
        assert generation.structured_output.grammar == grammar


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"response_format": {"type": "text"}},
        {"response_format": {"type": "text", "json_schema": None}},
        {"grammar": ""},
        {"guided_json": None, "json_schema": None},
        {"structured_outputs": {"json_object": False}},
        {"structured_outputs": {}},
    ],
)
def test_field_that_asks_for_nothing_constrains_nothing(fields: dict[str, Any]) -> None:
    assert chat(**fields).sampling.grammar is None
    assert chat(**fields).structured_output is None


@pytest.mark.parametrize(
    ("fields", "names"),
    [
        ({"response_format": {"type": "json_object"}, "guided_regex": "a"}, ("response_format", "guided_regex")),
        ({"guided_regex": "a", "guided_choice": ["a"]}, ("guided_regex", "guided_choice")),
        (
            {"structured_outputs": {"regex": "a", "json_object": True}},
            ("structured_outputs.regex", "structured_outputs.json_object"),
        ),
        ({"json_schema": SCHEMA, "grammar": 'root ::= "a"'}, ("json_schema", "grammar")),
    ],
)
def test_two_fields_that_say_what_the_answer_looks_like_are_both_named(
    fields: dict[str, Any], names: tuple[str, str]
) -> None:
    error = refused(chat, **fields)
    assert all(f"'{name}'" in error.message for name in names)
    assert error.param == names[1]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"response_format": {"type": "structural_tag"}}, "response_format.type"),
        ({"response_format": {"type": "structural_tag", "structures": [{"begin": "a"}]}}, "response_format.structures"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "a"}}}, "response_format.json_schema"),
        ({"response_format": {"type": "json_object", "json_schema": {"schema": {}}}}, "response_format.json_schema"),
        ({"response_format": {"type": "text", "value": {}}}, "response_format.value"),
        ({"response_format": {"type": "json"}}, "response_format.value"),
        ({"response_format": {"type": "json", "schema": {}}}, "response_format.schema"),
        ({"response_format": {"type": "json_object", "schema": {}, "value": {}}}, "response_format.value"),
        ({"response_format": {"type": "text", "schema": {}}}, "response_format.schema"),
        ({"response_format": {"type": "json_object", "strict": True}}, "response_format.strict"),
        ({"structured_outputs": {"structural_tag": "{}"}}, "structured_outputs.structural_tag"),
        ({"structured_outputs": {"whitespace_pattern": " *"}}, "structured_outputs.whitespace_pattern"),
        ({"guided_json": "[1]"}, "guided_json"),
        ({"guided_json": 5}, "guided_json"),
        ({"grammar": "a\0b"}, "grammar"),
    ],
)
def test_field_that_asks_wrongly_is_named(fields: dict[str, Any], param: str) -> None:
    assert (refused(chat, **fields).param or "").startswith(param)
