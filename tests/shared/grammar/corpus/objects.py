"""Objects: required, further and patterned properties."""

from __future__ import annotations

from typing import Any

from tests.shared.grammar.corpus.case import Case

_INTEGER = {"type": "integer"}
_STRING = {"type": "string"}
_DRAFT_7 = "http://json-schema.org/draft-07/schema#"
_A_AND_B = {"a": _INTEGER, "b": _STRING}


def _object(properties: dict[str, Any], *required: str, **more: Any) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "object", "properties": properties, **more}
    return {**schema, "required": list(required)} if required else schema


_PROPERTIES = [
    Case(_object(_A_AND_B), [{}, {"a": 1}, {"b": "x"}, {"a": 1, "b": "x", "c": None}], [{"a": "x"}, {"b": 1}, []]),
    Case(_object(_A_AND_B, "a"), [{"a": 1}, {"a": 1, "b": "x"}], [{}, {"b": "x"}, {"a": None}]),
    Case(_object(_A_AND_B, "a", "b"), [{"a": 1, "b": ""}], [{"a": 1}, {"b": "x"}, {}]),
    Case(_object(_A_AND_B, "b"), [{"b": "x"}, {"a": 1, "b": "x"}], [{"a": 1}, {}]),
    Case(
        _object(_A_AND_B, additionalProperties=False), [{}, {"a": 1}, {"a": 1, "b": "x"}], [{"c": 1}, {"a": 1, "c": 1}]
    ),
    Case(_object(_A_AND_B, "a", additionalProperties=False), [{"a": 1}], [{}, {"a": 1, "c": 2}]),
    Case(_object(_A_AND_B, "a", "b", additionalProperties=False), [{"a": -1, "b": "é"}], [{"a": 1}, {"a": 1, "b": 1}]),
    Case(_object({"a": _INTEGER}, additionalProperties=_STRING), [{"a": 1, "z": "x"}, {"z": "x"}], [{"z": 1}]),
    Case(_object({"a": _INTEGER}, additionalProperties=True), [{"a": 1, "z": []}], [{"a": []}]),
    Case(
        _object({"const": {"pattern": "[^a]"}, "pattern": {"const": {"pattern": "[^a]"}}}),
        [{"pattern": {"pattern": "[^a]"}}],
        [{"const": 1, "pattern": 1}],
    ),
    Case(_object({}, "x"), [{"x": 1}, {"x": {}}], [{}, {"y": 1}]),
    Case(_object({"a": True}, "a"), [{"a": None}, {"a": [1]}], [{}]),
    Case(_object({"a": False}), [{}, {"b": 1}], [{"a": 1}]),
    Case(_object({"a": {"const": 1}, "b": {"const": 2}}, "a"), [{"a": 1}, {"a": 1, "b": 2}], [{"a": 2}, {"b": 2}]),
    Case(
        _object({"key with space": _INTEGER, "é": _INTEGER, 'q"': _INTEGER}),
        [{"key with space": 1, "é": 2, 'q"': 3}],
        [{"é": "x"}],
    ),
    Case(_object({f"p{index}": _INTEGER for index in range(30)}), [{"p3": 1, "p29": 2}, {}], [{"p3": "x"}]),
    Case(
        _object({f"p{index}": _INTEGER for index in range(12)}, *(f"p{index}" for index in range(12))),
        [{f"p{index}": index for index in range(12)}],
        [{f"p{index}": index for index in range(11)}],
    ),
    Case(
        _object({"a": _object({"b": _object({"c": _INTEGER}, "c")}, "b")}, "a"),
        [{"a": {"b": {"c": 1}}}],
        [{"a": {"b": {}}}],
    ),
    Case(_object({"a": {"type": ["string", "null"]}}, "a"), [{"a": None}, {"a": "x"}], [{"a": 1}, {}]),
    Case(
        _object({"list": {"type": "array", "items": _object({"id": _INTEGER}, "id")}}, "list"),
        [{"list": [{"id": 1}]}],
        [{"list": [{}]}],
    ),
    Case({"type": ["object", "null"], "properties": {"a": _INTEGER}}, [None, {}, {"a": 1}], [{"a": "x"}, 1]),
    Case({"properties": {"a": _INTEGER}}, [{"a": 1}, 5, "x", []], [{"a": "x"}]),
    Case({"required": ["a"], "type": "object"}, [{"a": 1}], [{}, {"b": 1}]),
    Case({"type": "object", "additionalProperties": False}, [{}], [{"a": 1}]),
    Case({"type": "object", "additionalProperties": _INTEGER}, [{}, {"x": 1, "y": 2}], [{"x": "1"}]),
    Case(
        {"type": "object", "additionalProperties": {"type": "array", "items": _STRING}},
        [{"x": ["a"]}],
        [{"x": [1]}, {"x": "a"}],
    ),
    Case({"type": "object", "additionalProperties": _object({"n": _INTEGER}, "n")}, [{"x": {"n": 1}}], [{"x": {}}]),
    Case(
        {"type": "object", "additionalProperties": {"type": "number", "minimum": 0, "maximum": 1}},
        [{"yes": 0.25, "no": 0.75}],
        [{"yes": 2}],
    ),
]

_PATTERNED = [
    Case({"type": "object", "patternProperties": {"^a": _INTEGER}}, [{"a1": 1}, {"b": "x"}], [{"a1": "x"}]),
    Case(
        {"type": "object", "patternProperties": {"^[a-z]+$": _INTEGER}, "additionalProperties": False},
        [{}, {"ab": 1, "c": 2}],
        [{"A": 1}, {"ab": "x"}, {"a1": 1}],
    ),
    Case(
        {"type": "object", "patternProperties": {"^s_": _STRING, "^n_": _INTEGER}, "additionalProperties": False},
        [{"s_a": "x", "n_b": 1}],
        [{"s_a": 1}, {"n_b": "x"}, {"z": 1}],
    ),
    Case(
        _object({"id": _INTEGER}, "id", patternProperties={"^x-": True}, additionalProperties=False),
        [{"id": 1}, {"id": 1, "x-any": [1]}],
        [{"id": 1, "y": 2}, {"x-any": 1}],
    ),
    Case({"type": "object", "patternProperties": {"^\\d+$": _STRING}}, [{"12": "a"}, {"a": 1}], [{"12": 1}]),
    Case(
        {"type": "object", "patternProperties": {"^[0-9]{4}$": {"type": "number"}}, "additionalProperties": False},
        [{"2023": 1.5, "2024": 2}],
        [{"23": 1}, {"2023": "1"}],
    ),
    Case(
        {"type": "object", "patternProperties": {"_at$": {"type": "string", "format": "date"}}},
        [{"made_at": "2024-01-01"}],
        [{"made_at": "now"}],
    ),
    Case({"type": "object", "patternProperties": {"^a": False}}, [{}, {"b": 1}], [{"a": 1}]),
]

_COUNTED = [
    Case(
        {"type": "object", "additionalProperties": _INTEGER, "minProperties": 1},
        [{"a": 1}, {"a": 1, "b": 2}],
        [{}, {"a": "x"}],
    ),
    Case(
        {"type": "object", "additionalProperties": _INTEGER, "maxProperties": 2},
        [{}, {"a": 1, "b": 2}],
        [{"a": 1, "b": 2, "c": 3}],
    ),
    Case(
        {"type": "object", "minProperties": 2, "maxProperties": 3},
        [{"a": 1, "b": 2}],
        [{"a": 1}, {"a": 1, "b": 2, "c": 3, "d": 4}],
    ),
    Case({"type": "object", "maxProperties": 0}, [{}], [{"a": 1}]),
]

_REFUSED = [
    Case(
        {"type": "object", "propertyNames": {"maxLength": 1, "pattern": "a"}},
        [{"a": 1}],
        [{"aa": 1}],
        "'propertyNames'",
    ),
    Case(_object(_A_AND_B, propertyNames={"minLength": 1}), [{"a": 1}], [{"": 1}], "'propertyNames'"),
    Case({"type": "object", "propertyNames": {"not": {"const": "b"}}}, [{"a": 1}], [{"b": 1}], "'propertyNames'"),
    Case(_object(_A_AND_B, propertyNames={"pattern": "^a"}), [{"a": 1}], [{"b": ""}], "'propertyNames'"),
    Case(_object(_A_AND_B, propertyNames={"enum": ["a"]}), [{"a": 1}], [{"b": ""}], "'propertyNames'"),
    Case(
        {"type": "object", "patternProperties": {"^a": _INTEGER}, "propertyNames": {"enum": ["a", "b"]}},
        [{"a": 1}, {"b": ""}],
        [{"a": ""}, {"c": 1}],
        "'propertyNames'",
    ),
    Case(_object(_A_AND_B, dependentRequired={"a": ["b"]}), [{"b": ""}], [{"a": 1}], "'dependentRequired'"),
    Case(_object(_A_AND_B, dependentSchemas={"a": {"required": ["b"]}}), [{}], [{"a": 1}], "'dependentSchemas'"),
    Case({**_object(_A_AND_B, dependencies={"a": ["b"]}), "$schema": _DRAFT_7}, [{}], [{"a": 1}], "'dependencies'"),
    Case(_object(_A_AND_B, unevaluatedProperties=False), [{}], [{"z": 1}], "'unevaluatedProperties'"),
    Case(_object(_A_AND_B, minProperties=1), [{"a": 1}], [{}], "min/maxProperties"),
]

_NAMES = {"type": "string", "enum": ["a", "b"], "title": "Names"}
_NAMED = [
    # What Zod writes for a record.
    Case(
        {"type": "object", "propertyNames": {"type": "string"}, "additionalProperties": _INTEGER},
        [{}, {"x": 1, "y": 2}],
        [{"x": "y"}],
    ),
    Case({"type": "object", "propertyNames": True}, [{}, {"x": 1}], [[]]),
    Case({"type": "object", "propertyNames": {"maxLength": 1}}, [{}, {"a": 1}, {"日": 1}, {"": 1}], [{"bb": 1}]),
    Case(
        {"type": "object", "propertyNames": {"type": "string", "minLength": 1}, "additionalProperties": _INTEGER},
        [{}, {"a": 1}, {"a b\n": 1}, {"日": 1}],
        [{"": 1}, {"a": ""}],
    ),
    Case(
        {"type": "object", "propertyNames": {"minLength": 2, "maxLength": 3}},
        [{"aa": 1}, {"日本語": 1}, {'"\\': 1}],
        [{"a": 1}, {"aaaa": 1}, {"日本語日": 1}],
    ),
    Case({"type": "object", "propertyNames": {"minLength": 0}}, [{"": 1}], [[]]),
    Case(
        {"type": "object", "propertyNames": _NAMES, "additionalProperties": _INTEGER, "required": ["a", "b"]},
        [{"a": 1, "b": 2}],
        [{}, {"a": 1}, {"a": 1, "b": ""}, {"a": 1, "b": 2, "c": 3}],
    ),
    # What Pydantic writes where the keys are an enumeration.
    Case(
        {
            "type": "object",
            "propertyNames": {"$ref": "#/$defs/N"},
            "additionalProperties": {"$ref": "#/$defs/V"},
            "$defs": {"N": _NAMES, "V": _INTEGER},
        },
        [{}, {"a": 1}, {"b": 1}, {"a": 1, "b": 2}],
        [{"c": 1}, {"a": ""}],
    ),
    Case({"type": "object", "propertyNames": {"enum": ["a"]}}, [{}, {"a": []}], [{"b": 1}]),
    Case({"type": "object", "propertyNames": {"const": "a"}}, [{}, {"a": []}], [{"b": 1}]),
    Case(_object({"a": _STRING}, propertyNames=_NAMES), [{"a": "", "b": 1}], [{"a": 1}, {"c": 1}]),
    Case({"type": "object", "propertyNames": {"pattern": "^a"}}, [{}, {"a": 1}, {"ab": ""}], [{"b": 1}]),
    Case(
        {"type": "object", "propertyNames": {"pattern": "a[^&]"}, "additionalProperties": _INTEGER},
        [{}, {"bab": 1}],
        [{"a": 1}, {"ab": ""}, {"a&": 1}],
    ),
    Case(
        {
            "type": "object",
            "propertyNames": _NAMES,
            "additionalProperties": {"type": "object", "propertyNames": _NAMES, "additionalProperties": _INTEGER},
        },
        [{"a": {"b": 1}}],
        [{"a": {"c": 1}}, {"c": {"a": 1}}],
    ),
    Case(
        {"properties": {"propertyNames": {"const": 1}}, "required": ["propertyNames"]},
        [{"propertyNames": 1}],
        [{"propertyNames": 2}],
    ),
]

OBJECTS = [*_PROPERTIES, *_PATTERNED, *_NAMED, *_COUNTED, *_REFUSED]
