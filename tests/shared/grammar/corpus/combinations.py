"""anyOf, oneOf, allOf, not and conditions."""

from __future__ import annotations

from typing import Any

from tests.shared.grammar.corpus.case import Case

_INTEGER = {"type": "integer"}
_STRING = {"type": "string"}
_NULL = {"type": "null"}


def _tagged(name: str, **properties: Any) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": {"kind": {"const": name}, **properties},
        "required": ["kind", *properties],
        "additionalProperties": False,
    }


_CIRCLE = _tagged("circle", radius={"type": "number", "exclusiveMinimum": 0})
_BOX = _tagged("box", width=_INTEGER, height=_INTEGER)

_ANY_OF = [
    Case({"anyOf": [_INTEGER, _STRING]}, [1, "a"], [None, [], 1.5]),
    Case({"anyOf": [_INTEGER, _NULL]}, [1, None], ["a", False]),
    Case({"anyOf": [_STRING, {"type": "array", "items": _STRING}]}, ["a", ["a", "b"], []], [1, [1]]),
    Case({"anyOf": [_INTEGER, {"type": "number", "minimum": 10}]}, [1, 10.5, -3], [1.5, "a"]),
    Case({"anyOf": [{"minimum": 5, "type": "integer"}, {"maximum": 1, "type": "integer"}]}, [0, 1, 5, 9], [2, 3, 4]),
    Case(
        {"anyOf": [_CIRCLE, _BOX]},
        [{"kind": "circle", "radius": 2.5}, {"kind": "box", "width": 1, "height": 2}],
        [{"kind": "circle", "width": 1}, {"kind": "star"}],
    ),
    Case({"anyOf": [{"enum": ["a"]}, {"enum": ["b"]}, {"enum": [1]}]}, ["a", "b", 1], ["c", 2]),
    Case({"anyOf": [_NULL, {"anyOf": [_INTEGER, {"type": "boolean"}]}]}, [None, 1, True], ["a"]),
    Case(
        {"type": "object", "properties": {"v": {"anyOf": [_STRING, _NULL]}}, "required": ["v"]},
        [{"v": None}, {"v": "a"}],
        [{"v": 1}, {}],
    ),
    Case({"type": "array", "items": {"anyOf": [_INTEGER, _STRING]}}, [[1, "a"], []], [[None]]),
    Case({"anyOf": [{"type": "string", "maxLength": 2}, {"type": "string", "pattern": "^x"}]}, ["ab", "xyz"], ["abc"]),
    Case({"type": "integer", "anyOf": [{"minimum": 10}, {"maximum": -10}]}, [10, -10, 99], [0, 9, "a"]),
    Case(
        {
            "anyOf": [{"required": ["a"]}, {"required": ["b"]}],
            "type": "object",
            "properties": {"a": _INTEGER, "b": _INTEGER},
        },
        [{"a": 1}, {"b": 1}, {"a": 1, "b": 2}],
        [{}, {"a": "x"}],
    ),
    Case({"anyOf": [_INTEGER]}, [1], ["a"]),
    Case({"anyOf": [True, _INTEGER]}, [1, "a", None], []),
    Case({"anyOf": [False, _INTEGER]}, [1], ["a"]),
]

_ONE_OF = [
    Case({"oneOf": [_INTEGER, _STRING]}, [1, "a"], [None, 1.5]),
    Case({"oneOf": [_STRING, _NULL]}, ["a", None], [1]),
    Case(
        {"oneOf": [_CIRCLE, _BOX]},
        [{"kind": "circle", "radius": 1}, {"kind": "box", "width": 1, "height": 2}],
        [{"kind": "box", "radius": 1}],
    ),
    Case({"oneOf": [{"const": "a"}, {"const": "b"}]}, ["a", "b"], ["c"]),
    Case({"oneOf": [{"enum": [1, 2]}, {"enum": [3]}]}, [1, 2, 3], [4], "'oneOf'"),
    Case({"oneOf": [{"type": "array", "items": _INTEGER}, {"type": "object"}]}, [[1], {}], ["a", ["a"]]),
    Case({"oneOf": [_INTEGER]}, [5], ["5"]),
    Case(
        {"oneOf": [_CIRCLE, _BOX], "discriminator": {"propertyName": "kind"}},
        [{"kind": "circle", "radius": 3}],
        [{"kind": "x"}],
    ),
    Case({"oneOf": [{"type": "boolean"}, _INTEGER, _NULL, _STRING]}, [True, 1, None, "a"], [[], 1.5]),
    Case(
        {"type": "array", "items": {"oneOf": [_CIRCLE, _BOX]}}, [[{"kind": "circle", "radius": 1}]], [[{"kind": "box"}]]
    ),
    Case({"oneOf": [_INTEGER, {"type": "number"}]}, [1.5], [1], "'oneOf'"),
    Case({"oneOf": [{"minLength": 2}, {"maxLength": 3}]}, ["a"], ["ab"], "'oneOf'"),
    Case({"oneOf": [{"required": ["a"]}, {"required": ["b"]}]}, [{"a": 1}], [{"a": 1, "b": 1}], "'oneOf'"),
]

_A = {"type": "object", "properties": {"a": _INTEGER}, "required": ["a"]}
_B = {"type": "object", "properties": {"b": _STRING}, "required": ["b"]}

_ALL_OF = [
    Case({"allOf": [_A, _B]}, [{"a": 1, "b": "x"}], [{"a": 1}, {"b": "x"}, {}]),
    Case({"allOf": [_INTEGER, {"minimum": 5}]}, [5, 6], [4, "a"]),
    Case({"allOf": [{"minimum": 1, "type": "integer"}, {"maximum": 3}]}, [1, 3], [0, 4]),
    Case({"allOf": [{"type": "string", "minLength": 2}, {"maxLength": 3}]}, ["ab", "abc"], ["a", "abcd"]),
    Case({"allOf": [{"type": "string", "pattern": "^a"}, {"pattern": "z$"}]}, ["az", "a-z"], ["a", "z"]),
    Case({"allOf": [_A], "properties": {"b": _STRING}}, [{"a": 1}, {"a": 1, "b": "x"}], [{"b": "x"}, {"a": 1, "b": 1}]),
    Case({"allOf": [{"type": ["string", "integer"]}, {"type": ["integer", "null"]}]}, [1], ["a", None]),
    Case({"allOf": [{"enum": ["a", "b"]}, {"enum": ["b", "c"]}]}, ["b"], ["a", "c"]),
    Case({"allOf": [{"anyOf": [_INTEGER, _STRING]}, {"anyOf": [_STRING, _NULL]}]}, ["a"], [1, None]),
    Case({"allOf": [True, _INTEGER]}, [1], ["a"]),
    Case({"allOf": [{"type": "array", "minItems": 1}, {"type": "array", "items": _INTEGER}]}, [[1]], [[], ["a"]]),
    Case({"allOf": [_A, {"properties": {"a": {"minimum": 10}}}]}, [{"a": 10}], [{"a": 9}, {}]),
    Case({"allOf": [{"allOf": [_INTEGER]}, {"multipleOf": 2}]}, [2], [1, "a"]),
]

_REFUSED = [
    Case({"not": _STRING}, [1], ["a"], "'not'"),
    Case({"type": "string", "not": {"enum": ["a"]}}, ["b"], ["a"], "'not'"),
    Case({"type": "integer", "not": {"const": 0}}, [1], [0], "'not'"),
    Case({"if": {"type": "integer"}, "then": {"minimum": 0}}, [1], [-1], "'if'"),
    Case(
        {**_A, "if": {"properties": {"a": {"const": 1}}}, "then": {"required": ["b"]}}, [{"a": 2}], [{"a": 1}], "'if'"
    ),
    Case({"allOf": [{"if": {"minimum": 5}, "else": {"minimum": 0}}]}, [1], [-1], "'if'"),
]

COMBINATIONS = [*_ANY_OF, *_ONE_OF, *_ALL_OF, *_REFUSED]
