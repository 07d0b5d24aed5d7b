"""Every schema within a schema, once, with its place; and what references point to."""

from __future__ import annotations

from typing import Any

import pytest

from shared.grammar.schema_walk import resolve, schemas_within

MAPS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
LISTS = ("anyOf", "oneOf", "allOf", "prefixItems", "items")
SINGLE = [
    "items",
    "additionalProperties",
    "additionalItems",
    "contains",
    "propertyNames",
    "unevaluatedItems",
    "unevaluatedProperties",
    "not",
    "if",
    "then",
    "else",
]


@pytest.mark.parametrize(
    ("schema", "paths"),
    [
        *(({name: {"a": {"type": "x"}, "b": True}}, [f".{name}.a"]) for name in MAPS),
        *(({name: [True, {"type": "x"}, {}]}, [f".{name}.[1]", f".{name}.[2]"]) for name in LISTS),
        *(({name: {"type": "x"}}, [f".{name}"]) for name in SINGLE),
    ],
)
def test_schemas_below_each_keyword_are_found_with_their_place(schema: dict[str, Any], paths: list[str]) -> None:
    assert [path for _, path in schemas_within(schema)] == ["", *paths]


def test_outer_schemas_come_first_and_each_is_itself() -> None:
    inner = {"type": "integer"}
    schema = {"properties": {"a": {"items": inner}}, "not": {"anyOf": [{"type": "x"}]}}
    found = list(schemas_within(schema))
    assert [path for _, path in found] == ["", ".properties.a", ".not", ".properties.a.items", ".not.anyOf.[0]"]
    assert found[0][0] is schema
    assert found[3][0] is inner


@pytest.mark.parametrize(
    "schema",
    [
        {"const": {"a": {}}, "enum": [{}], "default": {}, "x": {"properties": {}}},
        {"properties": [{}], "anyOf": {"a": {}}, "not": [{}], "contains": True},
        {"properties": {"a": True, "b": [{}]}, "anyOf": [True, [{}]]},
    ],
)
def test_what_is_no_schema_is_left_out(schema: dict[str, Any]) -> None:
    assert [path for _, path in schemas_within(schema)] == [""]


@pytest.mark.parametrize("schema", [True, None, 5, []])
def test_what_is_no_object_holds_no_schema(schema: Any) -> None:
    assert list(schemas_within(schema)) == []


ROOT: dict[str, Any] = {
    "$defs": {"a/b": {"title": "slash"}, "c~d": {"title": "tilde"}, "~1": {"title": "both"}, "": {"title": "empty"}},
    "anyOf": [{"title": "first"}, {"title": "second"}],
    "0": {"title": "name"},
}


@pytest.mark.parametrize(
    ("reference", "title"),
    [
        ("#/$defs/a~1b", "slash"),
        ("#/$defs/c~0d", "tilde"),
        ("#/$defs/~01", "both"),
        ("#/$defs/", "empty"),
        ("#/anyOf/0", "first"),
        ("#/anyOf/1", "second"),
        ("#/0", "name"),
        ("#/anyOf/2", None),
        ("#/anyOf/-1", None),
        ("#/anyOf/x", None),
        ("#/$defs/none", None),
        ("#/0/title/x", None),
        ("$defs/a~1b", None),
        ("#$defs", None),
        ("https://example.com#/0", None),
    ],
)
def test_reference_leads_to_what_it_names_or_to_nothing(reference: str, title: str | None) -> None:
    found = resolve(ROOT, reference)
    assert found == (None if title is None else {"title": title})


def test_root_is_what_its_sign_points_to() -> None:
    assert resolve(ROOT, "#") is ROOT
    assert resolve({"a": 5}, "#/a") == 5
