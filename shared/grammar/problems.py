"""Says in a client's words why llguidance refuses a grammar, and where in a schema the reason stands."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

from shared.grammar.grammar import GrammarError
from shared.grammar.schema_walk import schemas_within

MAX_REASON_CHARACTERS = 400
_MAX_READ_CHARACTERS = 2_000

# What follows on further lines are those of the grammar around the schema.
_UNKNOWN_KEYS = re.compile(r"Unimplemented keys: (\[.*)", re.DOTALL)
_UNKNOWN_FORMAT = re.compile(r"Unknown format: ([^\n]*)")
_ELSEWHERE = re.compile(r"Resource '(.*?)' is not present", re.DOTALL)
_NO_TARGET = re.compile(r"Pointer '(.*?)' does not exist", re.DOTALL)
_REGEX = re.compile(r"regex parse error:.*?error: ([^\n]*)", re.DOTALL)
_LOOKAROUND = re.compile(r"lookarounds not supported|look-around")
_LOOKS_AROUND = re.compile(r"\(\?<?[=!]|\\[bB]")
_ONE_OF = re.compile(r"oneOf constraints are not supported")
_TOO_LARGE = re.compile(r"schema too large|too big|too many|grammar size|fuel|too complex")
_RANGE = re.compile(r"Failed to generate regex for (?:float|integer) range")
_NO_TEXT = re.compile(r"NoExtensionBias")
_BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
# The least whole number that, as a float, is 2^63.
_BEYOND = 2**63 - 512
_PLACE_IN_GRAMMAR = re.compile(r"^(?:at )?(\d+)\((\d+)\): (.*)")

# Keywords of the oldest draft, which llguidance reads over.
_OLD_KEYWORDS = ("extends", "disallow", "divisibleBy")


def named_problem(problem: str, schema: Any = None) -> GrammarError:
    """Return the error for llguidance's message about a grammar; `schema` is the decoded schema, where it is one."""
    if len(problem) > 2 * _MAX_READ_CHARACTERS:
        # It repeats the client's text; the error stands at its ends.
        problem = f"{problem[:_MAX_READ_CHARACTERS]}\n{problem[-_MAX_READ_CHARACTERS:]}"
    if found := _UNKNOWN_KEYS.search(problem):
        return _unknown_keyword(found[1], schema)
    reason, is_it = _reason(problem)
    return GrammarError(reason, "" if is_it is None else _path(schema, is_it))


def _reason(problem: str) -> tuple[str, Callable[[dict[str, Any]], bool] | None]:
    """Return the error message, and a predicate that finds the schema at fault."""
    if found := _UNKNOWN_FORMAT.search(problem):
        return f"the format '{found[1][:64]}' is not supported.", lambda s: s.get("format") == found[1]
    if found := _ELSEWHERE.search(problem):
        reason = f"'{found[1][:128]}' is not followed: '$ref' and '$schema' may not lead out of the schema."
        return reason, lambda s: isinstance(s.get("$ref"), str) and s["$ref"].startswith(found[1])
    if found := _NO_TARGET.search(problem):
        reason = f"'$ref' points to '{found[1][:128]}', which does not exist."
        return reason, lambda s: s.get("$ref") in (f"#{found[1]}", found[1])
    if _ONE_OF.search(problem):
        reason = (
            "'oneOf' is only supported where no two alternatives can match at once. Use 'anyOf', or tell the "
            "alternatives apart by a required property with another 'const' in each."
        )
        return reason, lambda s: "oneOf" in s
    if _RANGE.search(problem):
        reason = (
            "the bounds of a number must lie between -2^63 and 2^63 (about 9.22e18). Leave out those beyond, and check "
            "the number afterwards."
        )
        return reason, lambda s: any(_is_beyond(s.get(name)) for name in _BOUNDS)
    return _other(problem), _has_lookaround if _LOOKAROUND.search(problem) else None


def refuse_old_keywords(schema: Any) -> None:
    """Refuse keywords that llguidance would read over."""
    for each, path in schemas_within(schema):
        for keyword in _OLD_KEYWORDS:
            if keyword in each:
                raise GrammarError(f"'{keyword}' is not supported.", path)


def _unknown_keyword(listed: str, schema: Any) -> GrammarError:
    try:
        names = [name for name in json.JSONDecoder().raw_decode(listed)[0] if isinstance(name, str)]
    except ValueError:
        names = [listed.partition("\n")[0][:64]]
    path = _path(schema, lambda s: all(name in s for name in names))
    names_text = ", ".join(f"'{name[:64]}'" for name in names[:8])
    instead = " Leave it out, and check afterwards; lists of one item at most may have it."
    instead = instead if "uniqueItems" in names else ""
    return GrammarError(f"{names_text} {'is' if len(names) == 1 else 'are'} not supported.{instead}", path)


def _other(problem: str) -> str:
    if regex := _REGEX.search(problem):
        return f"a regular expression is not supported: {regex[1][:200]}."
    if "lookarounds" in problem:
        return "a regular expression is not supported: it looks ahead, behind, or at the edge of a word."
    if _NO_TEXT.search(problem):
        return "it matches no text: no first character can stand there."
    if "invalid regex" in problem:
        return "a regular expression is wrong, or not supported."
    if _TOO_LARGE.search(problem):
        return "it is too large or too deeply combined to be compiled. Make it simpler."
    first = (problem.strip() or "it cannot be compiled").splitlines()[0][:MAX_REASON_CHARACTERS]
    if place := _PLACE_IN_GRAMMAR.match(first):
        first = f"line {place[1]}, column {place[2]}: {place[3]}"
    return f"{first.rstrip('.')}."


def _path(schema: Any, is_it: Callable[[dict[str, Any]], bool]) -> str:
    """Return where the first schema that `is_it` stands; nothing if none does."""
    return next((path for each, path in schemas_within(schema) if is_it(each)), "")


def _has_lookaround(schema: dict[str, Any]) -> bool:
    pattern = schema.get("pattern")
    return isinstance(pattern, str) and _LOOKS_AROUND.search(pattern) is not None


def _is_beyond(value: Any) -> bool:
    return isinstance(value, int | float) and abs(value) >= _BEYOND
