"""Types, constants and enumerations."""

from __future__ import annotations

from typing import Any

from tests.shared.grammar.corpus.case import Case

_SAMPLES: dict[str, list[Any]] = {
    "null": [None],
    "boolean": [True, False],
    "integer": [0, -7, 123456789],
    "number": [0, -2.5, 1e3, 0.125],
    "string": ["", "text", "é😀", 'a "quoted" \\ text\n'],
    "array": [[], [1, "a", None]],
    "object": [{}, {"a": 1, "b": [True]}],
}


def _of_types(*types: str) -> Case:
    valid = [value for name in types for value in _SAMPLES[name]]
    others = [name for name in _SAMPLES if name not in types and not (name == "integer" and "number" in types)]
    invalid = [_SAMPLES[name][-1] for name in others]
    return Case({"type": types[0] if len(types) == 1 else list(types)}, valid, invalid)


_TYPES = [
    *(_of_types(name) for name in _SAMPLES),
    _of_types("string", "null"),
    _of_types("integer", "null"),
    _of_types("boolean", "null"),
    _of_types("number", "string"),
    _of_types("array", "null"),
    _of_types("object", "array"),
    _of_types("string", "integer", "boolean"),
    _of_types("string", "number", "object", "null"),
]

_CONSTANTS = [
    Case({"const": value}, [value], [other])
    for value, other in [
        ("fixed", "Fixed"),
        (5, 6),
        (-1, 1),
        (2.5, 2.25),
        (True, False),
        (None, 0),
        ([], [1]),
        ([1, 2], [2, 1]),
        ({"a": 1}, {"a": 2}),
        ({"a": [{"b": None}]}, {"a": []}),
        ("é", "e"),
        ('with "quotes"', "with quotes"),
    ]
]

_ENUMERATIONS = [
    Case({"enum": ["red", "green", "blue"]}, ["red", "green", "blue"], ["yellow", "re", "", None]),
    Case({"type": "string", "enum": ["a"]}, ["a"], ["b", 1]),
    Case({"enum": [1, 2, 3]}, [1, 2, 3], [4, 12, "1"]),
    Case({"enum": [0.5, 1.5]}, [0.5, 1.5], [1, 0.25]),
    Case({"enum": [None]}, [None], [0, "null", False]),
    Case({"enum": [True]}, [True], [False, 1]),
    Case({"enum": ["yes", None]}, ["yes", None], ["no", "null"]),
    Case({"enum": [1, "1", True, None]}, [1, "1", True, None], [2, "2", False]),
    Case({"enum": [[1], {"a": 1}]}, [[1], {"a": 1}], [[], {}, {"a": 2}]),
    Case({"enum": ["a", "ab", "abc"]}, ["a", "ab", "abc"], ["b", "abcd", ""]),
    Case({"enum": ["new\nline", "tab\t", "slash/"]}, ["new\nline", "tab\t", "slash/"], ["newline", "tab"]),
    Case({"enum": [f"option-{index}" for index in range(200)]}, ["option-0", "option-199"], ["option-200", "option-"]),
    Case({"type": ["string", "null"], "enum": ["x", None]}, ["x", None], ["y", 0]),
    Case({"type": "integer", "enum": [1, 2], "minimum": 2}, [2], [1, 3]),
    Case({"enum": ["", " "]}, ["", " "], ["  "]),
]

_ANYTHING = [
    Case(True, [None, 1, "a", [1, {"b": []}], {"a": {}}], []),
    Case({}, [None, -1.5, "a", [], {"a": [{}]}], []),
    Case({"description": "Anything.", "title": "T", "examples": [1], "default": 2}, [True, []], []),
    Case({"$comment": "Notes do not constrain.", "deprecated": True, "readOnly": True}, ["x"], []),
]

VALUES = [*_TYPES, *_CONSTANTS, *_ENUMERATIONS, *_ANYTHING]
