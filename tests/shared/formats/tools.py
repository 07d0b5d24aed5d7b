"""The tools of all tests of formats."""

from __future__ import annotations

import json

from shared.formats import Tool

WEATHER = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer"},
        "metric": {"type": "boolean"},
    },
    "required": ["city"],
    "additionalProperties": False,
}
SEARCH = {
    "type": "object",
    "properties": {
        "query": {"type": "string"},
        "kind": {"enum": ["news", "books"]},
        "tags": {"type": "array", "items": {"type": "string"}},
        "near": {"$ref": "#/$defs/place"},
        "limit": {"type": ["integer", "null"]},
    },
    "required": ["query", "kind", "tags"],
    "additionalProperties": False,
    "$defs": {"place": {"type": "object", "properties": {"x": {"type": "number"}}, "required": ["x"]}},
}


def tools(*, strict: bool = False) -> list[Tool]:
    """Return a tool with scalars, one with everything else, and one without arguments."""
    return [
        Tool("get_weather", json.dumps(WEATHER), strict),
        Tool("search", json.dumps(SEARCH), strict),
        Tool("get", None, strict),
    ]


SCHEMAS = {"get_weather": json.dumps(WEATHER), "search": json.dumps(SEARCH), "get": '{"type": "object"}'}
