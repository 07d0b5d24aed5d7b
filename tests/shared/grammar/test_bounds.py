"""The largest allowed size, and the smallest refused one, whose error names the place."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from shared.grammar import GrammarError
from shared.grammar.bounds import (
    MAX_ALTERNATIVES,
    MAX_CHARACTERS,
    MAX_DEPTH,
    MAX_PATTERN_CHARACTERS,
    MAX_PROPERTIES,
    MAX_REFERENCES,
    MAX_RULES,
    MAX_VALUES,
    check_lark,
    check_regex,
    check_schema,
    check_size,
)
from shared.grammar.multiples import MAX_STATES


def lists(depth: int) -> Any:
    """Return lists within lists, `depth` levels of them."""
    value: Any = []
    for _ in range(depth - 1):
        value = [value]
    return value


def objects(depth: int) -> Any:
    value: Any = {}
    for _ in range(depth - 1):
        value = {"items": value}
    return value


def references(count: int) -> Any:
    return {"anyOf": [{"$ref": "#"} for _ in range(count)]}


def named(count: int) -> dict[str, Any]:
    return {f"p{number}": True for number in range(count)}


SCHEMAS: list[tuple[Callable[[int], Any], int, str, str]] = [
    (lists, MAX_DEPTH, "", f"more than {MAX_DEPTH} levels"),
    (objects, MAX_DEPTH, "", f"more than {MAX_DEPTH} levels"),
    # The object itself, its list and one of its values are three.
    (lambda count: {"x": [0] * (count - 2)}, MAX_VALUES, "", f"more than {MAX_VALUES} values"),
    (references, MAX_REFERENCES, "", f"{MAX_REFERENCES + 1} times '$ref'; at most {MAX_REFERENCES}"),
    (
        lambda count: {"items": {"properties": named(count)}},
        MAX_PROPERTIES,
        ".items.properties",
        f"{MAX_PROPERTIES + 1} properties",
    ),
    (
        lambda count: [{"patternProperties": named(count)}],
        MAX_PROPERTIES,
        ".[0].patternProperties",
        f"{MAX_PROPERTIES + 1} properties",
    ),
    *(
        (
            lambda count, name=name: {"items": {name: ["x"] * count}},
            MAX_ALTERNATIVES,
            f".items.{name}",
            f"{MAX_ALTERNATIVES + 1} alternatives; at most {MAX_ALTERNATIVES}",
        )
        for name in ("enum", "anyOf", "oneOf", "allOf", "prefixItems", "items", "type")
    ),
    (
        lambda count: {"items": {"pattern": "a" * count}},
        MAX_PATTERN_CHARACTERS,
        ".items.pattern",
        f"{MAX_PATTERN_CHARACTERS + 1} characters; at most {MAX_PATTERN_CHARACTERS}",
    ),
    (lambda count: {"multipleOf": count}, MAX_STATES - 1, "", "'multipleOf' is too large"),
]


@pytest.mark.parametrize(("make", "most", "path", "reason"), SCHEMAS)
def test_schema_may_be_as_large_as_its_bound_and_no_larger(
    make: Callable[[int], Any], most: int, path: str, reason: str
) -> None:
    check_schema(make(most))
    with pytest.raises(GrammarError) as refused:
        # A divisor that is a power of ten counts less; the next two do not.
        check_schema(make(most + (2 if "multipleOf" in reason else 1)))
    assert reason in refused.value.reason
    assert refused.value.path == path


@pytest.mark.parametrize(
    "schema",
    [
        {"properties": ["not an object"] * 1001},
        {"enum": "x" * 5000, "pattern": ["x"] * 5000},
        {"$ref": 5, "x": {"$ref": {}}},
        {"other": ["x"] * 5000},
        True,
        5,
    ],
)
def test_what_is_no_keyword_of_its_kind_is_only_counted(schema: Any) -> None:
    check_schema(schema)


@pytest.mark.parametrize(
    ("check", "source", "most", "reason"),
    [
        (lambda source: check_size(source, "The text"), "x", MAX_CHARACTERS, "The text has 262145 characters"),
        (check_lark, "x", MAX_CHARACTERS, "The grammar has 262145 characters"),
        (check_lark, 'a: "b"\n', MAX_RULES, f"has {MAX_RULES + 1} rules"),
        (check_lark, '"$ref"', MAX_REFERENCES, f"has {MAX_REFERENCES + 1} times '$ref'"),
        (check_lark, "|", MAX_ALTERNATIVES, f"has {MAX_ALTERNATIVES + 1} alternatives"),
        (check_regex, "x", MAX_CHARACTERS, "The regular expression has 262145 characters"),
        (check_regex, "|", MAX_ALTERNATIVES, f"has {MAX_ALTERNATIVES + 1} alternatives"),
    ],
)
def test_grammar_may_be_as_large_as_its_bound_and_no_larger(
    check: Callable[[str], None], source: str, most: int, reason: str
) -> None:
    check(source * most)
    with pytest.raises(GrammarError) as refused:
        check(source * (most + 1))
    assert reason in refused.value.reason


def test_divisors_of_a_grammars_schemas_count_together() -> None:
    schema = '%json {"multipleOf": 4999}'
    check_lark(f"start: {schema} {schema}")
    with pytest.raises(GrammarError, match=f"at most {MAX_STATES}"):
        check_lark(f"start: {schema} {schema} {schema}")


@pytest.mark.parametrize("line", ["a:", "  a:", "\t?a:", "!a.1:", "_a{b}:"])
def test_line_that_begins_a_rule_is_counted(line: str) -> None:
    source = f'{line} "b"\n' * (MAX_RULES + 1)
    with pytest.raises(GrammarError, match="rules"):
        check_lark(source)


@pytest.mark.parametrize("line", ["| a", '"a:"', "/a:/", "(a b: c", "1:"])
def test_line_that_begins_no_rule_is_not_counted(line: str) -> None:
    check_lark(f"{line}\n" * (MAX_RULES + 1))
