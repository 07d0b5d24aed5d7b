"""How large the automata of `multipleOf` become, found without building them.

llguidance follows a number digit by digit and keeps its remainder: up to one state for each remainder. A divisor of
999,983 takes seconds and hundreds of megabytes, a power of ten times one digit a few megabytes.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from decimal import Decimal
from typing import Any

from shared.grammar.grammar import GrammarError
from shared.grammar.schema_walk import schemas_within

MAX_STATES = 10_000
"""For all divisors of a grammar together: about 6 MB and 30 ms."""

_MAX_ONE_DIGIT_STATES = 5_000
"""Of a divisor that is a power of ten times one digit, whatever its size: measured up to 4.3 MB, for 100,000,000."""

_MAX_DIGITS = 24
_RANGE = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "type")
_EMBEDDED = re.compile(r"%json\s*")


def check_multiples(schema: Any) -> None:
    """Refuse a decoded schema whose `multipleOf` take more than `MAX_STATES` states."""
    if num_states(schema) <= MAX_STATES:
        return
    divisors = [(_states(_scaled(each["multipleOf"])), path) for each, path in _with_divisor(schema)]
    raise GrammarError(
        f"'multipleOf' is too large: all divisors together, without their decimal points, may be at most {MAX_STATES}. "
        "Powers of ten count as at most 5000.",
        max(divisors)[1],
    )


def num_states(schema: Any) -> int:
    """Return about how many states the `multipleOf` of a decoded schema take, or more."""
    found: dict[tuple[Any, ...], int] = {}
    for each, _ in _with_divisor(schema):
        # Equal numbers share their automaton; a range is combined with it.
        found[each["multipleOf"], *(repr(each.get(name)) for name in _RANGE)] = _scaled(each["multipleOf"])
    if not found:
        return 0
    num_joined = sum(_joins_numbers(each) for each, _ in schemas_within(schema))
    if not num_joined:
        return sum(map(_states, found.values()))
    # A joined number must be a multiple of several divisors at once, and may be joined anew at each place.
    return _states(math.lcm(*found.values())) * (num_joined + len(found))


def grammar_states(text: str) -> int:
    """Return about how many states the `multipleOf` of a grammar take, given as llguidance reads it."""
    count = 0
    for grammar in json.loads(text)["grammars"]:
        schemas = [grammar["json_schema"]] if "json_schema" in grammar else embedded_schemas(grammar["lark_grammar"])
        count += sum(map(num_states, schemas))
    return count


def embedded_schemas(lark: str) -> Iterator[Any]:
    """Yield the schemas behind `%json` in a grammar in Lark's syntax, as far as they are JSON."""
    decoder, position = json.JSONDecoder(), 0
    while found := _EMBEDDED.search(lark, position):
        position = found.end()
        try:
            schema, position = decoder.raw_decode(lark, position)
        except ValueError:
            continue  # Not a schema, or llguidance reports the error in it.
        except RecursionError:
            raise GrammarError("A schema in the grammar is nested too deeply.") from None
        yield schema


def _with_divisor(schema: Any) -> Iterator[tuple[dict[str, Any], str]]:
    for each, path in schemas_within(schema):
        divisor = each.get("multipleOf")
        if isinstance(divisor, int | float) and math.isfinite(divisor) and divisor > 0:
            yield each, path


def _joins_numbers(schema: dict[str, Any]) -> bool:
    """Return whether a schema's own numbers are combined with those of another."""
    has_own = any(name in schema for name in ("multipleOf", *_RANGE[:4]))
    return "allOf" in schema or (has_own and any(name in schema for name in ("$ref", "anyOf", "oneOf")))


def _scaled(divisor: float) -> int:
    """Return a divisor without its decimal point, which is what remainders are counted by."""
    _, digits, exponent = Decimal(repr(divisor)).as_tuple()
    assert isinstance(exponent, int)
    if len(digits) + abs(exponent) > _MAX_DIGITS:
        return MAX_STATES**3 + 1
    value = int("".join(map(str, digits)))
    power: int = 10 ** abs(exponent)
    if exponent > 0:
        return value * power
    # A whole number that was written with a point.
    return value // power if value % power == 0 else value


def _states(scaled: int) -> int:
    return min(scaled, _MAX_ONE_DIGIT_STATES) if len(str(scaled).rstrip("0")) == 1 else scaled
