"""Writes the patterns of a JSON schema so that llguidance reads them as JSON Schema means them.

JSON Schema means ECMA-262; llguidance reads the syntax of Rust's regex crate. Inside the brackets of a class, `[`, `&&`
and `~~` are plain characters in the one and operators in the other.

llguidance 1.9 also lets `"` and a backslash through a class that excludes them, if the class holds all control
characters, as `[^"]` does. So NUL is taken out of every class that is written by what it excludes.

A `format` that JSON Schema defines is enforced, or the schema is refused. Every other name is a note that no validator
looks at (OpenAPI's `int32`, Zod's `cuid2`), so that whatever the rest of the schema allows keeps to it.
"""

from __future__ import annotations

import re
from typing import Any

from shared.grammar.grammar import GrammarError

# What stands under these names is a document or a text, not a schema.
_DOCUMENTS = frozenset({"const", "enum", "default", "examples", "title", "description", "$comment"})
_MAPS = frozenset({"properties", "$defs", "definitions", "dependentSchemas"})
# No class, no `\P` and no NUL: nothing to do.
_PLAIN = re.compile(r"[^\[]*\Z")
_NUL = re.compile(r"x00|u0000|0|x\{0+\}|u\{0+\}")
_PROPERTY = re.compile(r"([pP])(\{[^}]*\}|[A-Za-z])")
# JSON Schema 2020-12, Validation, 7.1 to 7.3, and its earlier drafts.
_DEFINED = re.compile(
    "date|time|date-time|duration|(?:idn-)?email|(?:idn-)?hostname|ipv[46]|[ui]ri(?:-reference)?|uri-template|uuid|"
    "(?:relative-)?json-pointer|regex|color|host-name|ip-address|phone|style|utc-millisec"
)


def is_note(name: str) -> bool:
    """Return whether a format says nothing that a validator holds a text to."""
    return _DEFINED.fullmatch(name) is None


def exact_pattern(pattern: str, path: str = "") -> str:
    """Return a pattern of ECMA-262 in the syntax of Rust's regular expressions, safe for llguidance."""
    if "\\P" not in pattern and _PLAIN.match(pattern):
        return pattern
    written: list[str] = []
    position = 0
    while position < len(pattern):
        if pattern[position] == "[":
            text, position = _class(pattern, position + 1, path)
        else:
            text, position = _atom(pattern, position)
        written.append(text)
    return "".join(written)


def with_exact_patterns(value: Any, path: str = "") -> Any:
    """Return a decoded schema with its patterns in the form that llguidance reads, and without formats that are notes.

    A class that cannot be written so is a `GrammarError`, which names its `path`. The depth is bounded before.
    """
    if isinstance(value, list):
        return [with_exact_patterns(each, f"{path}.[{index}]") for index, each in enumerate(value)]
    if not isinstance(value, dict):
        return value
    written: dict[str, Any] = {}
    for name, child in value.items():
        where = f"{path}.{name}"
        if name in _DOCUMENTS:
            written[name] = child
        elif name == "uniqueItems" and (child is False or value.get("maxItems") in (0, 1)):
            pass  # it says nothing, as the next one
        elif name == "format" and isinstance(child, str) and is_note(child):
            pass
        elif name == "pattern" and isinstance(child, str):
            written[name] = exact_pattern(child, path)
        elif name == "patternProperties" and isinstance(child, dict):
            written[name] = {
                exact_pattern(key, where): with_exact_patterns(each, f"{where}.{key}") for key, each in child.items()
            }
        elif name in _MAPS and isinstance(child, dict):
            written[name] = {key: with_exact_patterns(each, f"{where}.{key}") for key, each in child.items()}
        else:
            written[name] = with_exact_patterns(child, where)
    return written


def _atom(pattern: str, position: int) -> tuple[str, int]:
    """Return one character outside of brackets, or an escape, and where it ends."""
    if pattern[position] != "\\":
        return pattern[position], position + 1
    found = _PROPERTY.match(pattern, position + 1)
    if found is not None and found[1] == "P":
        return f"[^\\x00\\p{found[2]}]", found.end()
    return pattern[position : position + 2], position + 2


def _class(pattern: str, position: int, path: str) -> tuple[str, int]:
    """Return a class and where it ends; `position` is behind its opening bracket."""
    is_negated = pattern.startswith("^", position)
    position += is_negated
    if pattern.startswith("]", position):
        if not is_negated:
            raise GrammarError("a pattern has a class of no characters, which matches nothing.", path)
        return r"[\s\S]", position + 1
    written = ["[^\\x00" if is_negated else "["]
    while not pattern.startswith("]", position):
        if position >= len(pattern):
            raise GrammarError("a pattern has a class without its closing bracket.", path)
        character = pattern[position]
        if character == "\\":
            if not is_negated and (_NUL.match(pattern, position + 1) or pattern.startswith("P", position + 1)):
                raise GrammarError("a pattern with NUL or '\\P' within brackets is not supported.", path)
            written.append(pattern[position : position + 2])
            position += 2
            continue
        if pattern.startswith("--", position):
            raise GrammarError("a pattern with '--' within brackets is not supported; write '\\-'.", path)
        written.append(f"\\{character}" if character in "[&~" else character)
        position += 1
    return "".join([*written, "]"]), position + 1
