"""How large a grammar may be. Checked before llguidance sees it, because it cannot be interrupted.

llguidance walks rules and references by recursion: a chain of 100,000 of them overflows the stack and ends the process.
Properties of one object cost it time by their square. The bounds keep every grammar far from both.
What exceeds one raises `GrammarError`, whose `path` says where.
"""

from __future__ import annotations

import re
from typing import Any

from shared.grammar.grammar import GrammarError
from shared.grammar.multiples import MAX_STATES, check_multiples, embedded_schemas, num_states
from shared.grammar.schema_walk import resolve

MAX_CHARACTERS = 256 << 10
MAX_DEPTH = 64
MAX_VALUES = 20_000
MAX_PROPERTIES = 1_000
MAX_ALTERNATIVES = 4_000
MAX_REFERENCES = 1_000
MAX_REFERENCE_DEPTH = 100
MAX_PATTERN_CHARACTERS = 4_096
MAX_RULES = 2_000

_ALTERNATIVES = frozenset({"enum", "anyOf", "oneOf", "allOf", "prefixItems", "items", "type"})
# A line that begins with a name, before anything that stands in the body of a rule only.
_RULE = re.compile(r'^[ \t]*[?!]?[A-Za-z_][^\n:"/|()]*:', re.MULTILINE)


def check_size(source: str, what: str) -> None:
    """Refuse a source that is too long."""
    _check(len(source), MAX_CHARACTERS, f"{what} has", "characters")


def _check(count: int, most: int, has: str, things: str, path: str = "") -> None:
    if count > most:
        raise GrammarError(f"{has} {count} {things}; at most {most} are allowed.", path)


def check_lark(source: str) -> None:
    """Refuse a Lark grammar that is too long, or has too many rules, references or too large schemas behind `%json`."""
    check_size(source, "The grammar")
    _check(sum(1 for _ in _RULE.finditer(source)), MAX_RULES, "The grammar has", "rules")
    _check(source.count('"$ref"'), MAX_REFERENCES, "The grammar has", "times '$ref'")
    _check(source.count("|"), MAX_ALTERNATIVES, "The grammar has", "alternatives")
    for schema in embedded_schemas(source):
        check_reference_depth(schema)
    if sum(map(num_states, embedded_schemas(source))) > MAX_STATES:
        raise GrammarError(f"'multipleOf' is too large: all divisors together may be at most {MAX_STATES}.")


def check_regex(source: str) -> None:
    """Refuse a regular expression that is too long or has too many alternatives."""
    check_size(source, "The regular expression")
    _check(source.count("|"), MAX_ALTERNATIVES, "The regular expression has", "alternatives")


def check_schema(schema: Any) -> None:
    """Refuse a decoded JSON schema that is nested too deeply, or has too much of something.

    It walks without recursion.
    """
    num_values = num_references = 0
    waiting: list[tuple[Any, str, int]] = [(schema, "", 1)]
    while waiting:
        value, path, depth = waiting.pop()
        num_values += 1
        if num_values > MAX_VALUES:
            raise GrammarError(f"The schema has more than {MAX_VALUES} values, which is the most allowed.")
        if not isinstance(value, dict | list):
            continue
        if depth > MAX_DEPTH:
            raise GrammarError(f"The schema is nested more than {MAX_DEPTH} levels deep, which is the most allowed.")
        if isinstance(value, dict):
            num_references += isinstance(value.get("$ref"), str)
            _check_object(value, path)
            waiting += [(child, f"{path}.{key}", depth + 1) for key, child in value.items()]
        else:
            waiting += [(child, f"{path}.[{index}]", depth + 1) for index, child in enumerate(value)]
    _check(num_references, MAX_REFERENCES, "The schema has", "times '$ref'")
    check_reference_depth(schema)
    check_multiples(schema)


def check_reference_depth(schema: Any) -> None:
    """Refuse a schema whose references lead one to the next too often.

    Each reference is followed where it is met first, as llguidance does, which recurses there: a chain of 700
    overflowed its stack and ended the process.
    """
    seen: set[str] = set()
    waiting: list[tuple[Any, int]] = [(schema, 0)]
    while waiting:
        value, depth = waiting.pop()
        if depth > MAX_REFERENCE_DEPTH:
            message = f"The schema has a chain of references longer than {MAX_REFERENCE_DEPTH}, the most allowed."
            raise GrammarError(message)
        if isinstance(value, dict):
            waiting += [(child, depth) for child in value.values() if isinstance(child, dict | list)]
            reference = value.get("$ref")
            if isinstance(reference, str) and reference not in seen:
                seen.add(reference)
                waiting.append((resolve(schema, reference), depth + 1))
        elif isinstance(value, list):
            waiting += [(child, depth) for child in value if isinstance(child, dict | list)]


def _check_object(value: dict[str, Any], path: str) -> None:
    for name in ("properties", "patternProperties"):
        if isinstance(properties := value.get(name), dict):
            _check(len(properties), MAX_PROPERTIES, "An object has", "properties", f"{path}.{name}")
    for name in _ALTERNATIVES:
        if isinstance(alternatives := value.get(name), list):
            _check(len(alternatives), MAX_ALTERNATIVES, "There are", "alternatives", f"{path}.{name}")
    if isinstance(pattern := value.get("pattern"), str):
        _check(len(pattern), MAX_PATTERN_CHARACTERS, "The pattern has", "characters", f"{path}.pattern")
