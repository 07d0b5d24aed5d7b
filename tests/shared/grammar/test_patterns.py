from __future__ import annotations

import json
from typing import Any

import pytest

from shared.grammar import Grammar, GrammarError, grammar_text
from shared.grammar.grammar_text import with_named_properties
from shared.grammar.patterns import exact_pattern, with_exact_patterns
from tests.shared.grammar.byte_matcher import accepts


@pytest.mark.parametrize(
    ("pattern", "written"),
    [
        ("^[a-z]+$", "^[a-z]+$"),
        (r"\[^a\]", r"\[^a\]"),
        ('[^"]', r'[^\x00"]'),
        (r"[^\]a][^b]", r"[^\x00\]a][^\x00b]"),
        ("[[&&~~]", r"[\[\&\&\~\~]"),
        ("[^]", r"[\s\S]"),
        (r"\P{L}\p{L}\PL", r"[^\x00\p{L}]\p{L}[^\x00\pL]"),
    ],
)
def test_pattern_is_written_in_the_other_syntax(pattern: str, written: str) -> None:
    assert exact_pattern(pattern) == written


@pytest.mark.parametrize("pattern", ["[]", "[a", r"[\x00-a]", r"[\u0000]", "[a--b]", r"[\P{L}]"])
def test_class_that_cannot_be_written_is_refused(pattern: str) -> None:
    with pytest.raises(GrammarError) as refused:
        with_exact_patterns({"properties": {"a": {"pattern": pattern}}})
    assert refused.value.path == ".properties.a"


@pytest.mark.parametrize(
    ("is_unique", "bounds", "is_said"),
    [(True, {}, True), (True, {"maxItems": 2}, True), (True, {"maxItems": 1}, False), (False, {}, False)],
)
def test_single_item_need_not_be_unique(is_unique: bool, bounds: dict[str, int], is_said: bool) -> None:
    written = with_exact_patterns({"type": "array", "uniqueItems": is_unique, **bounds})
    assert ("uniqueItems" in written) is is_said


def test_documents_within_a_schema_are_left_alone() -> None:
    document = {"pattern": "[^a]"}
    schema = {"const": document, "enum": [document], "default": document, "properties": {"pattern": {"const": 1}}}
    assert with_exact_patterns(schema) == schema


def test_names_are_patterns_where_json_schema_says_so_and_nowhere_else() -> None:
    schema = {"patternProperties": {'^[^"]$': {"pattern": "[^b]"}}, "properties": {"[^c]": {"pattern": "[^d]"}}}
    assert with_exact_patterns(schema) == {
        "patternProperties": {r'^[^\x00"]$': {"pattern": r"[^\x00b]"}},
        "properties": {"[^c]": {"pattern": r"[^\x00d]"}},
    }
    with pytest.raises(GrammarError) as refused:
        with_exact_patterns({"patternProperties": {"[]": {}}})
    assert refused.value.path == ".patternProperties"


@pytest.mark.parametrize(
    ("pattern", "text", "is_match"),
    [
        # The classes of ECMA-262 are ASCII.
        (r"^\d$", '"1"', True),
        (r"^\d$", '"\u0661"', False),
        (r"^\w$", '"\xe9"', False),
        ('^[^"]$', r'"\""', False),
        ('^[^"]$', r'"\\"', True),
        (r"^[^\\]$", r'"\\"', False),
        (r"^\P{P}$", r'"\""', False),
        (r"^\P{P}$", '"a"', True),
        (r"^[^\n]$", r'"\n"', False),
    ],
)
def test_text_is_matched_as_json_schema_means_it(pattern: str, text: str, is_match: bool) -> None:
    grammar = Grammar(kind="json_schema", source=json.dumps({"type": "string", "pattern": pattern}))
    assert accepts(grammar_text(grammar), text) is is_match


def test_format_that_is_a_note_is_left_out_where_it_is_a_keyword_alone() -> None:
    schema = {
        "properties": {"format": {"type": "string", "format": "cuid2"}, "at": {"format": "date"}},
        "const": {"format": "cuid2"},
        "items": [{"format": "int32"}],
    }
    assert with_exact_patterns(schema) == {
        "properties": {"format": {"type": "string"}, "at": {"format": "date"}},
        "const": {"format": "cuid2"},
        "items": [{}],
    }


def test_schema_of_the_client_stays_as_it_is() -> None:
    schema = {"type": "object", "propertyNames": {"enum": ["a"]}}
    written = with_named_properties(schema)
    assert schema == {"type": "object", "propertyNames": {"enum": ["a"]}}
    assert written == {"type": "object", "properties": {"a": True}, "additionalProperties": False}


def test_schema_without_it_is_returned_itself() -> None:
    schema = {"type": "object", "properties": {"propertyNames": {"const": 1}}}
    assert with_named_properties(schema) is schema


def test_records_of_records_are_written_as_long_as_they_stay_small() -> None:
    """Each record repeats the one within it: ten names five deep would be a hundred thousand."""
    names = {"enum": [f"name {index}" for index in range(10)]}
    schema: dict[str, Any] = {"type": "integer"}
    for _ in range(12):
        schema = {"type": "object", "propertyNames": names, "additionalProperties": schema}
    written = json.dumps(with_named_properties(schema))
    assert len(written) < 1 << 18
    assert "propertyNames" in written


def test_many_records_are_written_as_long_as_all_stay_small() -> None:
    record = {"type": "object", "propertyNames": {"enum": [f"name {index}" for index in range(100)]}}
    schema = {"type": "object", "properties": {f"p{index}": record for index in range(500)}}
    assert len(json.dumps(with_named_properties(schema))) < 1 << 20


def test_more_names_than_properties_are_allowed_are_not_written() -> None:
    schema = {"type": "object", "propertyNames": {"enum": [f"{index}" for index in range(1_001)]}}
    assert with_named_properties(schema) == schema
