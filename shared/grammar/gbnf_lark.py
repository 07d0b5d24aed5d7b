"""Writes the rules of a GBNF grammar in Lark's syntax as llguidance reads it.

llguidance has a lexer below its parser: the longest lexeme wins, and a mask is cheap inside a lexeme and dear across
many. So whatever does not reach a recursive rule becomes one lexeme, as large as possible. A grammar without recursion
is a single lexeme, and then nothing of it is lost to the rule of the longest.
"""

from __future__ import annotations

import itertools
import json
from collections import defaultdict

from shared.grammar import gbnf


class GbnfAsLark:
    """Writes one grammar. Rules of Lark are in small letters, lexemes in capitals."""

    def __init__(self, source: str) -> None:
        self._rules = rules = gbnf.GbnfReader(source).rules()
        self._regular = _regular_rules(rules)
        self._names = {name: f"R{index}" if name in self._regular else f"r{index}" for index, name in enumerate(rules)}
        self._lexemes: dict[str, str] = {}

    def text(self) -> str:
        """Return the grammar in Lark's syntax."""
        lines = [f"start: {self._names['root']}"]
        for name, expression in self._rules.items():
            lines.append(f"{self._names[name]}: {self._written(expression, name in self._regular)}")
        lines += [f"{name}: {body}" for body, name in self._lexemes.items()]
        return "\n".join(lines) + "\n"

    def _written(self, expression: gbnf.Expression, in_lexeme: bool) -> str:
        """Return an expression as the body of a rule or, if it is `in_lexeme`, of a lexeme."""
        if not in_lexeme and not isinstance(expression, gbnf.Reference) and self._is_regular(expression):
            return self._lexeme(expression)
        match expression:
            case gbnf.Text(text):
                return json.dumps(text, ensure_ascii=False)
            case gbnf.CharacterClass(ranges, negated):
                return _class(ranges, negated)
            case gbnf.Reference(name):
                return self._names[name]
            case gbnf.Sequence(items):
                return self._sequence(items, in_lexeme) or '""'
            case gbnf.Choice(alternatives):
                return f"({' | '.join(self._written(each, in_lexeme) for each in alternatives)})"
            case gbnf.Repetition(item, minimum, maximum):
                return f"({self._written(item, in_lexeme)}){_counts(minimum, maximum)}"

    def _sequence(self, items: list[gbnf.Expression], in_lexeme: bool) -> str:
        """Return a sequence; outside of a lexeme, runs of regular items between recursive ones become lexemes."""
        if in_lexeme:
            return " ".join(self._written(item, True) for item in items)
        written: list[str] = []
        for is_regular, run in itertools.groupby(items, self._is_regular):
            if is_regular:
                written.append(self._lexeme(gbnf.Sequence(list(run))))
            else:
                written += [self._written(item, False) for item in run]
        return " ".join(written)

    def _lexeme(self, expression: gbnf.Expression) -> str:
        """Return the name of a lexeme for an expression; equal ones share theirs."""
        body = self._written(expression, True)
        return self._lexemes.setdefault(body, f"L{len(self._lexemes)}")

    def _is_regular(self, expression: gbnf.Expression) -> bool:
        return all(name in self._regular for name in _references(expression))


def _regular_rules(rules: dict[str, gbnf.Expression]) -> set[str]:
    users: defaultdict[str, list[str]] = defaultdict(list)
    num_waiting: dict[str, int] = {}
    for name, expression in rules.items():
        used = set(_references(expression))
        num_waiting[name] = len(used)
        for each in used:
            users[each].append(name)
    ready = [name for name, num in num_waiting.items() if num == 0]
    regular = set[str]()
    while ready:
        name = ready.pop()
        regular.add(name)
        for user in users[name]:
            num_waiting[user] -= 1
            if num_waiting[user] == 0:
                ready.append(user)
    return regular


def _references(expression: gbnf.Expression) -> list[str]:
    names: list[str] = []
    waiting = [expression]
    while waiting:
        match waiting.pop():
            case gbnf.Reference(name):
                names.append(name)
            case gbnf.Sequence(items):
                waiting += items
            case gbnf.Choice(alternatives):
                waiting += alternatives
            case gbnf.Repetition(item):
                waiting.append(item)
    return names


def _class(ranges: list[tuple[int, int]], negated: bool) -> str:
    if not ranges:
        return "/(?s:.)/"
    body = "".join(f"\\x{{{first:X}}}-\\x{{{last:X}}}" for first, last in ranges)
    return f"/[{'^' if negated else ''}{body}]/"


def _counts(minimum: int, maximum: int | None) -> str:
    simple = {(0, None): "*", (1, None): "+", (0, 1): "?"}.get((minimum, maximum))
    return simple or f"{{{minimum},{'' if maximum is None else maximum}}}"
