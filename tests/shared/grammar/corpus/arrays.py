"""Arrays and tuples."""

from __future__ import annotations

from typing import Any

from tests.shared.grammar.corpus.case import Case

_INTEGER = {"type": "integer"}
_STRING = {"type": "string"}
_FEW = {"enum": [1, 2, 3]}

_ITEMS = [
    Case({"type": "array", "items": items}, [[], good, good * 3], [bad, [*good, *bad], {}])
    for items, good, bad in [
        (_INTEGER, [1], ["a"]),
        (_STRING, ["a"], [1]),
        ({"type": "boolean"}, [True, False], [0]),
        ({"type": "null"}, [None], [0]),
        ({"type": "number", "minimum": 0}, [0.5], [-1]),
        ({"enum": ["a", "b"]}, ["b", "a"], ["c"]),
        ({"type": "array", "items": _INTEGER}, [[1], []], [1]),
        ({"type": "object", "properties": {"a": _INTEGER}, "required": ["a"]}, [{"a": 1}], [{}]),
        ({"type": ["integer", "null"]}, [1, None], ["1"]),
        ({"anyOf": [_INTEGER, {"const": "none"}]}, [1, "none"], ["some"]),
        ({"type": "string", "format": "date"}, ["2024-01-01"], ["2024"]),
        ({"type": "string", "minLength": 1}, ["a"], [""]),
    ]
]


def _sized(least: int | None, most: int | None) -> Case:
    schema: dict[str, Any] = {"type": "array", "items": _INTEGER}
    sizes = {least or 0, (least or 0) + 1, most if most is not None else (least or 0) + 5}
    bad = []
    if least is not None:
        schema["minItems"] = least
        if least > 0:
            bad.append([1] * (least - 1))
    if most is not None:
        schema["maxItems"] = most
        bad.append([1] * (most + 1))
    good = [[1] * size for size in sorted(sizes) if most is None or size <= most]
    return Case(schema, good, [*bad, ["a"] * (least or 1), None])


_TUPLES = [
    Case(
        {"type": "array", "prefixItems": [_INTEGER, _STRING], "items": False, "minItems": 2},
        [[1, "a"]],
        [[], [1], ["a", 1], [1, "a", 2]],
    ),
    Case(
        {"type": "array", "prefixItems": [_INTEGER, _STRING], "items": False}, [[], [1], [1, "a"]], [["a"], [1, "a", 1]]
    ),
    Case({"type": "array", "prefixItems": [_INTEGER]}, [[], [1], [1, "x", None]], [["x"], 1]),
    Case({"type": "array", "prefixItems": [_STRING], "items": _INTEGER}, [[], ["a"], ["a", 1, 2]], [[1], ["a", "b"]]),
    Case(
        {"type": "array", "prefixItems": [_INTEGER] * 3, "items": False, "minItems": 3, "maxItems": 3},
        [[1, 2, 3]],
        [[1, 2], [1, 2, 3, 4]],
    ),
    Case(
        {"type": "array", "prefixItems": [{"const": "point"}, {"type": "number"}, {"type": "number"}], "minItems": 3},
        [["point", 1, 2.5], ["point", 0, 0, "more"]],
        [["line", 1, 2], ["point", 1]],
    ),
    Case(
        {
            "$schema": "http://json-schema.org/draft-07/schema#",
            "type": "array",
            "items": [_INTEGER, _STRING],
            "additionalItems": False,
        },
        [[1, "a"], []],
        [["a"], [1, "a", 1]],
    ),
    Case(
        {
            "$schema": "http://json-schema.org/draft-07/schema#",
            "type": "array",
            "items": [_INTEGER],
            "additionalItems": _STRING,
        },
        [[1], [1, "a", "b"]],
        [[1, 2], ["a"]],
    ),
    Case(
        {"type": "array", "prefixItems": [{"type": "array", "items": _INTEGER}, {}], "items": False}, [[[1], {}]], [[1]]
    ),
    Case({"type": "array", "prefixItems": [{"enum": ["get", "put"]}], "items": True}, [["get"], ["put", 1]], [["del"]]),
]

_OTHERS = [
    Case({"type": "array"}, [[], [1, "a", None, {}, []]], [{}, "[]"]),
    Case({"type": "array", "items": True}, [[], [1]], [1]),
    Case({"type": "array", "items": False}, [[]], [[1]]),
    Case({"type": "array", "maxItems": 0}, [[]], [[1], [[]]]),
    Case({"items": _INTEGER}, [[1], "text", 5, {"a": "b"}], [["a"]]),
    Case({"type": ["array", "null"], "items": _STRING}, [None, [], ["a"]], [[1], "a"]),
    Case(
        {"type": "array", "items": {"type": "array", "items": {"type": "number"}, "minItems": 2, "maxItems": 2}},
        [[], [[1, 2]], [[0.5, 1], [2, 3]]],
        [[[1]], [[1, 2, 3]], [1, 2]],
    ),
    Case({"type": "array", "items": {"type": "array", "items": {"type": "array"}}}, [[[[]]], [[]], []], [[[1]], [1]]),
    Case({"type": "array", "items": _INTEGER, "uniqueItems": True}, [[1, 2]], [[1, 1]], "'uniqueItems'"),
    Case({"items": _FEW, "uniqueItems": True}, [[1, 2], 5], [[1, 1]], "'uniqueItems'"),
    Case({"type": "array", "items": _FEW, "uniqueItems": True, "minItems": 4}, [], [[1, 2, 3, 1]], "'uniqueItems'"),
    Case({"type": "array", "contains": _INTEGER}, [["a", 1]], [["a"], []], "'contains'"),
    Case({"type": "array", "contains": _INTEGER, "minContains": 2}, [[1, 2]], [[1]], "'contains'"),
    Case(
        {"type": "array", "prefixItems": [_INTEGER], "unevaluatedItems": False}, [[1]], [[1, 2]], "'unevaluatedItems'"
    ),
]

_UNIQUE = [
    Case({"type": "array", "items": _INTEGER, "uniqueItems": False}, [[], [1, 1]], [["a"]]),
    Case({"type": "array", "items": _INTEGER, "uniqueItems": True, "maxItems": 1}, [[], [1]], [["a"], [1, 2]]),
    Case({"type": "array", "items": _FEW, "uniqueItems": True}, [[], [2], [3, 1, 2]], [[1, 1], [1, 2, 1], [4]]),
    Case(
        {"type": "array", "items": _FEW, "uniqueItems": True, "minItems": 1, "maxItems": 2},
        [[2], [3, 1]],
        [[], [1, 1], [1, 2, 3]],
    ),
    Case({"type": "array", "items": {"type": "boolean"}, "uniqueItems": True}, [[True, False]], [[True, True]]),
    Case({"type": "array", "items": {"const": "a"}, "uniqueItems": True}, [[], ["a"]], [["a", "a"], ["b"]]),
    # What Pydantic writes for a set of an enumeration.
    Case(
        {
            "type": "object",
            "properties": {"a": {"type": "array", "items": {"$ref": "#/$defs/E"}, "title": "A", "uniqueItems": True}},
            "required": ["a"],
            "$defs": {"E": {"enum": ["x", "y"], "title": "E", "type": "string"}},
        },
        [{"a": []}, {"a": ["y", "x"]}],
        [{"a": ["x", "x"]}, {"a": ["z"]}],
    ),
]

ARRAYS = [
    *_ITEMS,
    *(
        _sized(*sizes)
        for sizes in [(1, None), (0, 3), (2, 4), (3, 3), (None, 1), (None, 5), (5, None), (1, 1), (10, 20)]
    ),
    *_TUPLES,
    *_OTHERS,
    *_UNIQUE,
]
