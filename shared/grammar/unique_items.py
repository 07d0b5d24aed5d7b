"""Writes `uniqueItems` as an enumeration where few lists are possible; no grammar can hold longer ones to it.

What may still stand in a list would depend on all that stands before it, and llguidance does not read the keyword.
"""

from __future__ import annotations

import copy
import itertools
import json
import math
from typing import Any

from shared.grammar.grammar import GrammarError
from shared.grammar.schema_walk import resolve, schemas_within

MAX_LISTS = 100
"""Lists that one enumeration has: all of four values, or those of up to two of nine."""

_KEYWORD = "uniqueItems"
_NOTES = frozenset({"title", "description", "$comment", "examples", "default"})
_READ = _NOTES | {"type", "items", "minItems", "maxItems", _KEYWORD}
_MAX_WRITTEN_CHARACTERS = 1 << 16
_REASON = (
    "'uniqueItems' is not supported, except for lists of at most one item, and of a few values ('enum', 'const' or "
    f"booleans) that make at most {MAX_LISTS} lists. Leave it out, and check afterwards that no item is repeated."
)


def with_unique_items(schema: Any) -> Any:
    """Return a decoded schema that says without `uniqueItems` what it said with it.

    Its depth is bounded before.

    Raises:
        GrammarError: It cannot be said otherwise; `path` says where.
    """
    if not any(_KEYWORD in each for each, _ in schemas_within(schema)):
        return schema
    written = copy.deepcopy(schema)
    num_written = 0
    for each, path in list(schemas_within(written)):
        if _KEYWORD in each:
            num_written += _rewrite(each, written, path)
            if num_written > _MAX_WRITTEN_CHARACTERS:
                raise GrammarError(_REASON, path)
    return written


def _rewrite(schema: dict[str, Any], root: Any, path: str) -> int:
    """Write one `uniqueItems` otherwise; return how many characters that took."""
    if schema[_KEYWORD] is False or _length(schema, "maxItems", 2) <= 1:
        del schema[_KEYWORD]
        return 0
    values = _values(schema.get("items"), root)
    if schema[_KEYWORD] is not True or values is None or schema.get("type") != "array" or set(schema) - _READ:
        raise GrammarError(_REASON, path)
    least, most = _length(schema, "minItems", 0), min(_length(schema, "maxItems", len(values)), len(values))
    lengths = range(least, most + 1)
    if not 0 < sum(math.perm(len(values), length) for length in lengths) <= MAX_LISTS:
        raise GrammarError(_REASON, path)
    lists = [list(each) for length in lengths for each in itertools.permutations(values, length)]
    for name in ("type", "items", "minItems", "maxItems", _KEYWORD):
        schema.pop(name, None)
    schema["enum"] = lists
    return len(json.dumps(lists))


def _length(schema: dict[str, Any], keyword: str, otherwise: int) -> int:
    value = schema.get(keyword)
    return value if type(value) is int and value >= 0 else otherwise


def _values(items: Any, root: Any) -> list[Any] | None:
    """Return the different values that an item may have; None where they are not listed."""
    if isinstance(items, dict) and set(items) - _NOTES == {"$ref"} and isinstance(items["$ref"], str):
        items = resolve(root, items["$ref"])
    if not isinstance(items, dict):
        return None
    asked = {keyword: value for keyword, value in items.items() if keyword not in _NOTES}
    kind = asked.pop("type", None)
    if not asked and kind == "boolean":
        return [False, True]
    listed = [asked["const"]] if set(asked) == {"const"} else asked.get("enum")
    if len(asked) != 1 or not isinstance(listed, list):
        return None
    # Numbers are equal in several forms, and a type may exclude some of the values.
    is_simple = all(isinstance(value, str) for value in listed) and kind in (None, "string")
    is_whole = all(type(value) is int for value in listed) and kind in (None, "integer", "number")
    return list(dict.fromkeys(listed)) if is_simple or is_whole else None
