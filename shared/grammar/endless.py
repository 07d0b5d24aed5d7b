"""Finds schemas of which every document is endless: an object that must hold an object of its own kind, and so on.

llguidance compiles them. Their output would begin and never end, and a chain of references that leads back to itself
matches nothing at all.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from shared.grammar.grammar import GrammarError
from shared.grammar.schema_walk import resolve, schemas_within


def refuse_endless(schema: Any) -> None:
    """Refuse a schema without a document of finite length.

    Only what always holds is concluded: a schema passes where its keywords may allow a document.

    Raises:
        GrammarError: Every document is endless.
    """
    if not isinstance(schema, dict):
        return
    needs = {id(each): _needs(each, schema) for each, _ in schemas_within(schema)}
    users: defaultdict[int, set[int]] = defaultdict(set)
    for identity, ways in needs.items():
        for used in (used for options in ways for used in options):
            users[used].add(identity)
    finite = set[int]()
    waiting = list(needs)
    while waiting:
        identity = waiting.pop()
        ways = needs.get(identity, [])
        # Each need is met by any one of its options. What is not known is taken to be finite.
        if identity not in finite and all(any(o in finite or o not in needs for o in options) for options in ways):
            finite.add(identity)
            waiting += users[identity]
    if id(schema) not in finite:
        raise GrammarError("No document of finite length matches: it refers to itself on every way. Make it optional.")


def _needs(schema: dict[str, Any], root: dict[str, Any]) -> list[list[int]]:
    """Return what must be finite for a schema to be: all of the lists, and of each list one."""
    needs: list[list[int]] = []
    reference = schema.get("$ref")
    if isinstance(reference, str):
        target = resolve(root, reference)
        if isinstance(target, dict):
            needs.append([id(target)])
    for keyword in ("anyOf", "oneOf"):
        alternatives = schema.get(keyword)
        if isinstance(alternatives, list) and all(isinstance(each, dict) for each in alternatives):
            needs.append([id(each) for each in alternatives])
    needs += [[id(each)] for each in _listed(schema.get("allOf")) if isinstance(each, dict)]
    if schema.get("type") == "object":
        properties = schema.get("properties")
        required = [name for name in _listed(schema.get("required")) if isinstance(name, str)]
        if isinstance(properties, dict):
            needs += [[id(properties[name])] for name in required if isinstance(properties.get(name), dict)]
    items = schema.get("items")
    has_items = _is_positive(schema.get("minItems")) and not schema.get("prefixItems")
    if schema.get("type") == "array" and isinstance(items, dict) and has_items:
        needs.append([id(items)])
    return needs


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _is_positive(value: Any) -> bool:
    return isinstance(value, int | float) and value > 0
