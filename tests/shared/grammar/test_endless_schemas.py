"""Which schemas have a document of finite length, by each keyword that can need another schema."""

from __future__ import annotations

from typing import Any

import pytest

from shared.grammar import GrammarError
from shared.grammar.check import refuse_endless

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
        # What is no schema here may allow a document.
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
