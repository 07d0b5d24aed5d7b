"""Definitions, references and recursion."""

from __future__ import annotations

from typing import Any

from tests.shared.grammar.corpus.case import Case

_INTEGER = {"type": "integer"}


def _defined(reference: str, **definitions: Any) -> dict[str, Any]:
    return {"$ref": f"#/$defs/{reference}", "$defs": definitions}


_NODE = {
    "type": "object",
    "properties": {"value": _INTEGER, "next": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}},
    "required": ["value", "next"],
    "additionalProperties": False,
}
_TREE = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "children": {"type": "array", "items": {"$ref": "#"}}},
    "required": ["name"],
    "additionalProperties": False,
}
_JSON = _defined(
    "value",
    value={
        "anyOf": [
            {"type": ["null", "boolean", "number", "string"]},
            {"type": "array", "items": {"$ref": "#/$defs/value"}},
            {"type": "object", "additionalProperties": {"$ref": "#/$defs/value"}},
        ]
    },
)
_EXPRESSION = _defined(
    "expression",
    expression={
        "anyOf": [
            {"type": "number"},
            {
                "type": "object",
                "properties": {
                    "op": {"enum": ["+", "*"]},
                    "left": {"$ref": "#/$defs/expression"},
                    "right": {"$ref": "#/$defs/expression"},
                },
                "required": ["op", "left", "right"],
                "additionalProperties": False,
            },
        ]
    },
)

REFERENCES = [
    Case(_defined("a", a=_INTEGER), [1], ["x"]),
    Case(_defined("a", a={"$ref": "#/$defs/b"}, b={"$ref": "#/$defs/c"}, c={"type": "string"}), ["x"], [1]),
    Case({"$ref": "#/definitions/a", "definitions": {"a": {"type": "boolean"}}}, [True], [1]),
    Case(
        {"type": "array", "items": {"$ref": "#/$defs/p"}, "$defs": {"p": {"type": "number", "minimum": 0}}},
        [[0.5]],
        [[-1]],
    ),
    Case(
        {
            "type": "object",
            "properties": {"from": {"$ref": "#/$defs/point"}, "to": {"$ref": "#/$defs/point"}},
            "required": ["from", "to"],
            "$defs": {"point": {"type": "array", "items": {"type": "number"}, "minItems": 2, "maxItems": 2}},
        },
        [{"from": [0, 0], "to": [1, 2.5]}],
        [{"from": [0], "to": [1, 2]}, {"from": [0, 0]}],
    ),
    Case({"$ref": "#/$defs/a", "$defs": {"a": _INTEGER}, "minimum": 3}, [3, 4], [2, "x"]),
    Case(
        {"properties": {"a": {"$ref": "#/properties/b"}, "b": _INTEGER}, "type": "object"},
        [{"a": 1, "b": 2}],
        [{"a": "x"}],
    ),
    Case(
        {
            "$defs": {"a/b": _INTEGER, "c~d": {"type": "string"}},
            "anyOf": [{"$ref": "#/$defs/a~1b"}, {"$ref": "#/$defs/c~0d"}],
        },
        [1, "x"],
        [None],
    ),
    Case({"$defs": {"with space": _INTEGER}, "$ref": "#/$defs/with%20space"}, [1], ["x"]),
    Case({"$id": "https://example.org/root.json", "$ref": "#/$defs/a", "$defs": {"a": _INTEGER}}, [1], ["x"]),
    Case(
        {
            "$id": "https://example.org/root.json",
            "$defs": {"a": {"$id": "a.json", "type": "integer"}},
            "$ref": "a.json",
        },
        [1],
        ["x"],
    ),
    Case({"$defs": {"a": {"$anchor": "here", "type": "integer"}}, "$ref": "#here"}, [1], ["x"]),
    Case({"$defs": {"a": _INTEGER}, "anyOf": [{"$ref": "#/$defs/a"}, {"type": "null"}]}, [1, None], ["x"]),
    Case(
        {
            "$defs": {"a": {"type": "object", "properties": {"x": _INTEGER}}},
            "allOf": [{"$ref": "#/$defs/a"}, {"required": ["x"]}],
        },
        [{"x": 1}],
        [{}],
    ),
    Case({"$defs": {"unused": {"type": "string"}}, "type": "integer"}, [1], ["x"]),
    Case(
        _NODE,
        [{"value": 1, "next": None}, {"value": 1, "next": {"value": 2, "next": None}}],
        [{"value": 1}, {"value": 1, "next": {}}],
    ),
    Case(
        _TREE,
        [{"name": "a"}, {"name": "a", "children": [{"name": "b", "children": []}]}],
        [{"children": []}, {"name": "a", "children": [{}]}],
    ),
    Case(_JSON, [None, [1, {"a": [True, "x"]}], {"a": {"b": {}}}], []),
    Case(
        _EXPRESSION,
        [1, {"op": "+", "left": 1, "right": {"op": "*", "left": 2, "right": 3}}],
        [{"op": "+", "left": 1}, {"op": "-", "left": 1, "right": 2}],
    ),
    Case(
        _defined(
            "even",
            even={"type": "array", "prefixItems": [{"$ref": "#/$defs/odd"}], "items": False},
            odd={"type": "array", "prefixItems": [{"$ref": "#/$defs/even"}], "items": False},
        ),
        [[], [[]], [[[[]]]]],
        [[1], [[], []]],
    ),
    Case({"type": "array", "items": {"$ref": "#"}}, [[], [[], [[]]]], [[1], {}]),
    Case(
        _defined(
            "list",
            list={
                "type": "object",
                "properties": {"items": {"type": "array", "items": {"$ref": "#/$defs/item"}}},
                "required": ["items"],
            },
            item={"anyOf": [{"type": "string"}, {"$ref": "#/$defs/list"}]},
        ),
        [{"items": []}, {"items": ["a", {"items": ["b"]}]}],
        [{}, {"items": [1]}],
    ),
    Case({"$ref": "https://example.org/other.json"}, [], [], "https://example.org/other.json"),
    Case({"items": {"$ref": "other.json#/a"}}, [], [], "other.json"),
    Case({"$ref": "#/$defs/missing"}, [], [], "/$defs/missing"),
    Case({"$dynamicRef": "#node", "$defs": {"a": {"$dynamicAnchor": "node"}}}, [], [], "'$dynamicRef'"),
    Case({"$ref": "#"}, [], [], "finite"),
]
