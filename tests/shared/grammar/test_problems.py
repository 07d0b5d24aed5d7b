"""What llguidance says of a grammar, in a client's words and with the place in its schema."""

from __future__ import annotations

from typing import Any

import pytest

from shared.grammar import GrammarError
from shared.grammar.problems import MAX_REASON_CHARACTERS, named_problem, refuse_old_keywords

SCHEMA: dict[str, Any] = {
    "properties": {
        "a": {"format": "semver"},
        "b": {"not": {}, "if": {}},
        "c": {"$ref": "https://example.com/x.json#/a"},
        "d": {"$ref": "#/$defs/none"},
        "e": {"oneOf": [{}]},
        "f": {"$ref": 5},
        "g": {"not": {}},
        "h": {"properties": {"pattern": {"pattern": "(?:a|b)"}}},
        "i": {"pattern": "a(?!b)"},
        "j": {"type": "number", "minimum": -1e18, "maximum": 2**63 - 513},
        "k": {"type": "number", "minimum": 0, "exclusiveMaximum": 2**63 - 512},
    }
}


@pytest.mark.parametrize(
    ("problem", "path", "reason"),
    [
        ('x: Unimplemented keys: ["not", "if"]', ".properties.b", "'not', 'if' are not supported."),
        ('Unimplemented keys: ["not"]', ".properties.b", "'not' is not supported."),
        ('Unimplemented keys: ["if", 5]', ".properties.b", "'if' is not supported."),
        ('Unimplemented keys: ["then"]', "", "'then' is not supported."),
        ("Unimplemented keys: [no JSON]", "", "'[no JSON]' is not supported."),
        ("Unknown format: semver", ".properties.a", "the format 'semver' is not supported."),
        ("Unknown format: other", "", "the format 'other' is not supported."),
        ('Unimplemented keys: ["not"]\n   2 | a: "]"', ".properties.b", "'not' is not supported."),
        ("Unknown format: semver\n   2 | a: b", ".properties.a", "the format 'semver' is not supported."),
        (
            "Resource 'https://example.com/x.json' is not present in a registry",
            ".properties.c",
            "'https://example.com/x.json' is not followed: '$ref' and '$schema' may not lead out of the schema.",
        ),
        ("Pointer '/$defs/none' does not exist", ".properties.d", "'$ref' points to '/$defs/none', which does not"),
        ("Pointer '#/$defs/none' does not exist", ".properties.d", "'$ref' points to '#/$defs/none', which does not"),
        ("oneOf constraints are not supported", ".properties.e", "'oneOf' is only supported where"),
        ("regex parse error:\n  (\n  ^\nerror: unclosed group\nmore", "", "is not supported: unclosed group."),
        ("lookarounds not supported here", ".properties.i", "it looks ahead, behind, or at the edge of a word."),
        ("regex parse error:\nerror: look-around is not supported", ".properties.i", "look-around is not supported."),
        ("Failed to generate regex for float range: min=", ".properties.k", "between -2^63 and 2^63"),
        ("Failed to generate regex for integer range: min=", ".properties.k", "between -2^63 and 2^63"),
        ("NoExtensionBias", "", "it matches no text"),
        ("invalid regex: x", "", "a regular expression is wrong, or not supported."),
        ("the schema too large", "", "it is too large or too deeply combined"),
        ("ran out of fuel", "", "it is too large or too deeply combined"),
        ("at 3(14): unexpected token.\nsecond line", "", "line 3, column 14: unexpected token."),
        ("3(14): unexpected token", "", "line 3, column 14: unexpected token."),
        ("  something else\nsecond line", "", "something else."),
        ("", "", "it cannot be compiled."),
    ],
)
def test_problem_is_told_with_its_place(problem: str, path: str, reason: str) -> None:
    error = named_problem(problem, SCHEMA)
    assert reason in error.reason
    assert error.path == path
    assert named_problem(problem).path == ""


@pytest.mark.parametrize(
    ("problem", "most"),
    [
        ("Unknown format: " + "x" * 100, "'" + "x" * 64 + "'"),
        ("Resource '" + "x" * 200 + "' is not present", "'" + "x" * 128 + "' is not followed"),
        ("Pointer '" + "x" * 200 + "' does not exist", "'" + "x" * 128 + "', which"),
        ('Unimplemented keys: ["' + "x" * 100 + '"]', "'" + "x" * 64 + "' is"),
        ("Unimplemented keys: [" + "x" * 100 + "]", "'[" + "x" * 63 + "' is"),
        ("regex parse error:\nerror: " + "x" * 300, "supported: " + "x" * 200 + "."),
        ("x" * 1000, "x" * MAX_REASON_CHARACTERS + "."),
    ],
)
def test_what_a_client_wrote_is_repeated_in_short(problem: str, most: str) -> None:
    error = named_problem(problem)
    assert most in error.reason
    assert len(error.reason) < 600


def test_first_eight_of_many_names_are_told() -> None:
    names = ", ".join(f'"k{number}"' for number in range(12))
    assert named_problem(f"Unimplemented keys: [{names}]").reason.count("'k") == 8


@pytest.mark.parametrize(("length", "is_found"), [(3_900, True), (9_000, False)])
def test_middle_of_a_long_problem_is_not_read(length: int, is_found: bool) -> None:
    half = "x" * (length // 2)
    error = named_problem(f"{half}Unknown format: semver{half}")
    assert error.reason.startswith("the format 'semver") is is_found
    # Both ends are.
    assert "'begin" in named_problem(f"Resource 'begin' is not present{half}{half}").reason
    assert "'end" in named_problem(f"{half}{half}Resource 'end' is not present").reason


@pytest.mark.parametrize("keyword", ["extends", "disallow", "divisibleBy"])
def test_keyword_of_the_oldest_draft_is_refused_where_it_stands(keyword: str) -> None:
    with pytest.raises(GrammarError) as refused:
        refuse_old_keywords({"properties": {"a": {"type": "integer"}, "b": {keyword: 3}}})
    assert refused.value.reason == f"'{keyword}' is not supported."
    assert refused.value.path == ".properties.b"
    refuse_old_keywords({"properties": {keyword: {"type": "integer"}}})
    refuse_old_keywords(None)
