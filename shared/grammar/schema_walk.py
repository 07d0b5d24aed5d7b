"""The schemas within a JSON schema, and where they stand."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

_MAPS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems", "items")
_ITEMS = ("items", "additionalItems", "unevaluatedItems", "contains")
_SINGLE = (*_ITEMS, "additionalProperties", "unevaluatedProperties", "propertyNames", "not", "if", "then", "else")


def schemas_within(schema: Any) -> Iterator[tuple[dict[str, Any], str]]:
    """Yield a decoded schema and every schema below it with its place, such as `.properties.name`, outer ones first."""
    waiting: list[tuple[Any, str]] = [(schema, "")]
    for value, path in waiting:
        if isinstance(value, dict):
            yield value, path
            waiting += children(value, path)


def children(schema: dict[str, Any], path: str = "") -> Iterator[tuple[Any, str]]:
    """Yield the schemas directly below one."""
    for keyword in _MAPS:
        values = schema.get(keyword)
        if isinstance(values, dict):
            yield from ((value, f"{path}.{keyword}.{name}") for name, value in values.items())
    for keyword in _LISTS:
        values = schema.get(keyword)
        if isinstance(values, list):
            yield from ((value, f"{path}.{keyword}.[{index}]") for index, value in enumerate(values))
    for keyword in _SINGLE:
        value = schema.get(keyword)
        if isinstance(value, dict):
            yield value, f"{path}.{keyword}"


def resolve(schema: Any, reference: str) -> Any:
    """Return what `#/…` points to within a schema; None where it points to nothing or elsewhere."""
    if reference == "#":
        return schema
    if not reference.startswith("#/"):
        return None
    value = schema
    for part in reference[2:].split("/"):
        name = part.replace("~1", "/").replace("~0", "~")
        if isinstance(value, dict):
            value = value.get(name)
        elif isinstance(value, list) and name.isdecimal() and int(name) < len(value):
            value = value[int(name)]
        else:
            return None
    return value
