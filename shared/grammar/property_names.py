"""Writes `propertyNames` as properties, so that llguidance, which does not read it, enforces the same.

Libraries write it for records: Zod for every one, Pydantic for those whose keys are an enumeration.
"""

from __future__ import annotations

import copy
import json
from typing import Any

from shared.grammar.bounds import MAX_PROPERTIES
from shared.grammar.schema_walk import resolve, schemas_within

_KEYWORD = "propertyNames"
_NOTES = frozenset({"title", "description", "$comment", "examples", "default"})
# What all names may come to, with the schema of their values written for each.
_MAX_WRITTEN_CHARACTERS = 1 << 16


def with_named_properties(schema: Any) -> Any:
    """Return a decoded schema without each `propertyNames` that can be said otherwise; the others stay as they are.

    Its depth is bounded before.
    """
    if not any(_KEYWORD in each for each, _ in schemas_within(schema)):
        return schema
    written = copy.deepcopy(schema)
    num_left = _MAX_WRITTEN_CHARACTERS
    # Inner ones first: what they become counts where it is repeated.
    for each, _ in reversed(list(schemas_within(written))):
        if _KEYWORD in each:
            num_left -= _rewrite(each, written, num_left)
    return written


def _rewrite(schema: dict[str, Any], root: Any, num_left: int) -> int:
    """Write one `propertyNames` otherwise, if it can be; return how many characters were written for its names."""
    names = _constraint(schema[_KEYWORD], root)
    if names is None:
        return 0
    if not names:
        del schema[_KEYWORD]
    elif "patternProperties" in schema:
        return 0
    elif "pattern" in names:
        _write_pattern(schema, names["pattern"])
    else:
        return _write_names(schema, names["enum"], num_left)
    return 0


def _constraint(names: Any, root: Any) -> dict[str, Any] | None:
    """Return the constraint on a name: empty, `enum`, or `pattern`. None for any other."""
    if isinstance(names, dict) and set(names) - _NOTES == {"$ref"} and isinstance(names["$ref"], str):
        names = resolve(root, names["$ref"])
    if names is True:
        return {}
    if not isinstance(names, dict) or names.get("type", "string") != "string":
        return None
    asked = {keyword: value for keyword, value in names.items() if keyword not in _NOTES and keyword != "type"}
    if set(asked) == {"const"}:
        asked = {"enum": [asked["const"]]}
    if not asked:
        return asked
    if set(asked) == {"enum"} and isinstance(asked["enum"], list):
        return {"enum": [name for name in asked["enum"] if isinstance(name, str)]}
    if set(asked) <= {"minLength", "maxLength"}:
        return _length_pattern(asked.get("minLength", 0), asked.get("maxLength"))
    return asked if set(asked) == {"pattern"} and isinstance(asked["pattern"], str) else None


def _length_pattern(least: Any, most: Any) -> dict[str, Any] | None:
    """Return names of some lengths, in characters, as a pattern; None if no name has one, or these are not lengths."""
    if type(least) is not int or least < 0:
        return None
    if most is None:
        return {"pattern": f"^[\\s\\S]{{{least},}}$"} if least else {}
    if type(most) is not int or most < least:
        return None
    return {"pattern": f"^[\\s\\S]{{{least},{most}}}$"}


def _write_pattern(schema: dict[str, Any], pattern: str) -> None:
    if "properties" in schema:
        return
    schema["patternProperties"] = {pattern: schema.get("additionalProperties", True)}
    schema["additionalProperties"] = False
    del schema[_KEYWORD]


def _write_names(schema: dict[str, Any], names: list[str], num_left: int) -> int:
    properties = schema.get("properties", {})
    value = schema.get("additionalProperties", True)
    if not isinstance(properties, dict) or not set(properties) <= set(names) or len(names) > MAX_PROPERTIES:
        return 0
    num_written = len(names) * len(json.dumps(value)) + sum(map(len, names))
    if num_written > num_left:
        return 0
    schema["properties"] = properties | {name: value for name in names if name not in properties}
    schema["additionalProperties"] = False
    del schema[_KEYWORD]
    return num_written
