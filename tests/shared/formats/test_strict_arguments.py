from __future__ import annotations

import contextlib
import json
import time
from typing import Any

import pytest

from shared.formats import Tool, ToolChoice, format_named
from shared.grammar import GrammarError
from tests.shared.formats.vocabulary import Vocabulary
from tests.shared.formats.writers import WRITERS

FAMILIES = ["qwen-coder", "gemma", "llama-pythonic", "hermes"]
RAW = ["qwen-coder", "gemma"]
_VOCABULARY = Vocabulary()


def _tool(schema: dict[str, Any]) -> Tool:
    return Tool("f", json.dumps({"type": "object", "additionalProperties": False, **schema}), strict=True)


def _allows(name: str, own: dict[str, Any], value: Any, **more: Any) -> bool:
    tool = _tool({"properties": {"a": own}, "required": ["a"], **more})
    grammar = format_named(name).grammar([tool], ToolChoice("required"))
    assert grammar is not None
    return _VOCABULARY.accepts(grammar, WRITERS[name]([("f", {"a": value})]))


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize(
    ("own", "good", "bad"),
    [
        ({"enum": ["a", "b c"]}, "b c", "c"),
        ({"const": "a"}, "a", "b"),
        ({"type": "string", "pattern": "^[a-z/]+$"}, "a/b", "a1"),
        ({"type": "string", "pattern": "b[^c]"}, "abd", "abc"),
        ({"type": "string", "pattern": r"a\\/b"}, r"a\/b", "a/b"),
        ({"type": "string", "pattern": r"a\\$"}, "a\\", "a\\b"),
        ({"type": "string", "pattern": r"a\$"}, "a$b", "a"),
        ({"type": "string", "minLength": 2, "maxLength": 3}, "ab", "abcd"),
        ({"type": "string", "format": "date"}, "2026-02-28", "2026-13-01"),
        ({"type": "string", "format": "cuid2", "maxLength": 3}, "a 1", "long"),
        ({"anyOf": [{"type": "string", "pattern": "^x"}, {"enum": ["y"]}]}, "y", "z"),
        ({"anyOf": [{"enum": ["y"]}, {"type": "null"}]}, None, "null "),
        ({"type": "integer", "minimum": 3}, 3, 2),
        ({"type": "array", "items": {"$ref": "#/$defs/word"}}, ["ab"], ["a"]),
        ({"$ref": "#/$defs/word"}, "ab", "a"),
        ({"allOf": [{"$ref": "#/$defs/word"}], "description": "A word."}, "ab", "a"),
    ],
)
def test_strict_argument_keeps_to_its_schema(name: str, own: dict[str, Any], good: Any, bad: Any) -> None:
    more = {"$defs": {"word": {"type": "string", "minLength": 2}}}
    assert _allows(name, own, good, **more)
    assert not _allows(name, own, bad, **more)


@pytest.mark.parametrize("name", RAW)
@pytest.mark.parametrize(
    "schema",
    [
        {"properties": {"a": {"type": "string", "not": {"const": "b"}}}},
        {"properties": {"a": {"type": "string", "format": "color"}}},
        {"properties": {"a": {"type": "string", "minLength": -1}}},
        {"properties": {"a": {"type": "string", "pattern": "[]"}}},
        {"properties": {"a": {"type": "string", "minLength": 1, "anyOf": [{"pattern": "a"}]}}},
        {"properties": {}, "required": ["b"]},
        {"properties": {"a": {}}, "anyOf": [{"required": ["a"]}]},
    ],
)
def test_condition_that_cannot_be_held_to_is_refused(name: str, schema: dict[str, Any]) -> None:
    with pytest.raises(GrammarError):
        format_named(name).grammar([_tool(schema)], ToolChoice("required"))


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize(
    "schema",
    [
        {"properties": {"a": {"$ref": "#/$defs/a"}}, "$defs": {"a": {"anyOf": [{"$ref": "#/$defs/a"}] * 9}}},
        {"properties": {"a": {"$ref": "#/properties/a"}}},
        {
            "properties": {f"p{i}": {"$ref": "#/$defs/a"} for i in range(900)},
            "$defs": {"a": {"enum": ["x" * 99] * 999}},
        },
    ],
)
def test_hostile_schema_costs_little(name: str, schema: dict[str, Any]) -> None:
    begin = time.process_time()
    with contextlib.suppress(GrammarError):
        format_named(name).grammar([_tool(schema)], ToolChoice("required"))
    reader = format_named(name).reader([_tool(schema)])
    reader.feed(WRITERS[name]([("f", {"a": "x"})]))
    reader.finish()
    assert time.process_time() - begin < 1
