"""Reads a grammar in GBNF, the notation of llama.cpp, and writes its rules in Lark's syntax as llguidance reads it.

llguidance has a lexer below its parser: the longest lexeme wins, and a mask is cheap inside a lexeme and dear across
many. So whatever does not reach a recursive rule becomes one lexeme, as large as possible. A grammar without recursion
is a single lexeme, and then nothing of it is lost to the rule of the longest.

Source: the description of GBNF in llama.cpp (grammars/README.md). Rules of tokens (`<think>`, `<[1000]>`) are refused.
"""

from __future__ import annotations

import itertools
import json
import re
from collections import defaultdict
from dataclasses import dataclass, field

from shared.grammar.grammar import GrammarError

MAX_NESTING = 60
MAX_REPETITIONS = 2_000


@dataclass(slots=True)
class Text:
    """Characters that stand for themselves."""

    text: str


@dataclass(slots=True)
class CharacterClass:
    """One character out of ranges of code points, both ends included; `negated` for one outside them."""

    ranges: list[tuple[int, int]]
    negated: bool = False


@dataclass(slots=True)
class Reference:
    """The rule of a name."""

    name: str


@dataclass(slots=True)
class Sequence:
    """One after the other; none is the empty text."""

    items: list[Expression] = field(default_factory=list)


@dataclass(slots=True)
class Choice:
    """One of them."""

    alternatives: list[Expression]


@dataclass(slots=True)
class Repetition:
    """At least `minimum` times, at most `maximum` times; None for any number."""

    item: Expression
    minimum: int
    maximum: int | None


Expression = Text | CharacterClass | Reference | Sequence | Choice | Repetition

ANY_CHARACTER = CharacterClass([], negated=True)

_SPACE = re.compile(r"(?:[ \t]|#[^\r\n]*)*")
_SPACE_AND_LINES = re.compile(r"(?:[ \t\r\n]|#[^\r\n]*)*")
_BAR = re.compile(rf"{_SPACE_AND_LINES.pattern}\|{_SPACE_AND_LINES.pattern}")
_NAME = re.compile(r"[A-Za-z0-9_-]+")
_COUNTS = re.compile(r"\{[ \t\r\n]*(\d{1,6})[ \t\r\n]*(,?)[ \t\r\n]*(\d{1,6})?[ \t\r\n]*\}")
_HEXADECIMAL = re.compile(r"x([0-9A-Fa-f]{2})|u([0-9A-Fa-f]{4})|U([0-9A-Fa-f]{8})")
_ESCAPES = {"n": "\n", "r": "\r", "t": "\t", "\\": "\\", '"': '"', "[": "[", "]": "]", "-": "-", "^": "^", "/": "/"}
_SUFFIXES: dict[str, tuple[int, int | None]] = {"*": (0, None), "+": (1, None), "?": (0, 1)}


class GbnfReader:
    """Reads one grammar. Text that is not GBNF, lacks a rule or is nested too deeply raises a `GrammarError`."""

    def __init__(self, source: str) -> None:
        self._source = source
        self._position = 0
        self._references: dict[str, int] = {}

    def rules(self) -> dict[str, Expression]:
        """Return the rules by name, in their order."""
        rules: dict[str, Expression] = {}
        self._skip(_SPACE_AND_LINES)
        while self._position < len(self._source):
            name = self._match(_NAME, "the name of a rule")[0]
            self._skip(_SPACE)
            if not self._source.startswith("::=", self._position):
                raise self._error("'::=' is expected")
            self._position += 3
            self._skip(_SPACE_AND_LINES)
            if name in rules:
                raise self._error(f"the rule '{name}' has been defined before")
            rules[name] = self._alternatives(0)
            if self._position < len(self._source) and self._peek() not in "\r\n":
                raise self._error("the end of a rule is expected")
            self._skip(_SPACE_AND_LINES)
        if "root" not in rules:
            raise GrammarError("The grammar has no rule 'root'.")
        for name, position in self._references.items():
            if name not in rules:
                self._position = position
                raise self._error(f"the rule '{name}' is not defined")
        return rules

    def _alternatives(self, nesting: int) -> Expression:
        alternatives = [self._sequence(nesting)]
        # A '|' may begin the next line.
        while (bar := _BAR.match(self._source, self._position)) is not None:
            self._position = bar.end()
            alternatives.append(self._sequence(nesting))
        return alternatives[0] if len(alternatives) == 1 else Choice(alternatives)

    def _sequence(self, nesting: int) -> Expression:
        space = _SPACE_AND_LINES if nesting else _SPACE
        items: list[Expression] = []
        while (item := self._item(nesting)) is not None:
            self._skip(space)
            while (counts := self._counts()) is not None:
                item = Repetition(item, *counts)
                self._skip(space)
            items.append(item)
        return items[0] if len(items) == 1 else Sequence(items)

    def _item(self, nesting: int) -> Expression | None:
        character = self._peek()
        if character in ('"', "[", "(", "."):
            self._position += 1
        match character:
            case '"':
                return Text(self._text())
            case "[":
                return self._class()
            case "(":
                return self._group(nesting + 1)
            case ".":
                return ANY_CHARACTER
        if character in ("<", "!"):
            raise self._error("rules of tokens are not supported")
        name = _NAME.match(self._source, self._position)
        if name is None:
            return None
        self._references.setdefault(name[0], self._position)
        self._position = name.end()
        return Reference(name[0])

    def _group(self, nesting: int) -> Expression:
        if nesting > MAX_NESTING:
            raise self._error(f"more than {MAX_NESTING} levels of parentheses")
        self._skip(_SPACE_AND_LINES)
        inner = self._alternatives(nesting)
        self._skip(_SPACE_AND_LINES)
        if self._peek() != ")":
            raise self._error("')' is expected")
        self._position += 1
        return inner

    def _counts(self) -> tuple[int, int | None] | None:
        character = self._peek()
        if character in _SUFFIXES:
            self._position += 1
            return _SUFFIXES[character]
        if character != "{":
            return None
        found = self._match(_COUNTS, "'{m}', '{m,}' or '{m,n}'")
        minimum = int(found[1])
        maximum = None if found[2] and not found[3] else int(found[3] or found[1])
        if max(minimum, maximum or 0) > MAX_REPETITIONS:
            raise self._error(f"at most {MAX_REPETITIONS} repetitions are allowed")
        if maximum is not None and maximum < minimum:
            raise self._error("a repetition's maximum is below its minimum")
        return minimum, maximum

    def _text(self) -> str:
        characters = []
        while self._peek() != '"':
            characters.append(self._character())
        self._position += 1
        return "".join(characters)

    def _class(self) -> CharacterClass:
        negated = self._peek() == "^"
        self._position += negated
        ranges = []
        while self._peek() != "]":
            first = last = ord(self._character())
            if self._peek() == "-" and not self._source.startswith("-]", self._position):
                self._position += 1
                last = ord(self._character())
            if last < first:
                raise self._error("a range of characters ends before it begins")
            ranges.append((first, last))
        self._position += 1
        if not ranges and not negated:
            raise self._error("a class of no characters matches nothing")
        return CharacterClass(ranges, negated)

    def _character(self) -> str:
        character = self._peek()
        if character in ("", "\r", "\n"):
            raise self._error("a closing quote or bracket is expected")
        self._position += 1
        if character != "\\":
            return character
        if self._peek() in _ESCAPES:
            self._position += 1
            return _ESCAPES[self._source[self._position - 1]]
        found = self._match(_HEXADECIMAL, "an escape (n, r, t, x00, u0000, U00000000)")
        code = int(found[1] or found[2] or found[3], 16)
        if code > 0x10FFFF or 0xD800 <= code <= 0xDFFF:
            raise self._error(f"U+{code:04X} is not a character")
        return chr(code)

    def _peek(self) -> str:
        return self._source[self._position : self._position + 1]

    def _skip(self, pattern: re.Pattern[str]) -> None:
        found = pattern.match(self._source, self._position)
        assert found is not None
        self._position = found.end()

    def _match(self, pattern: re.Pattern[str], expected: str) -> re.Match[str]:
        found = pattern.match(self._source, self._position)
        if found is None:
            raise self._error(f"{expected} is expected")
        self._position = found.end()
        return found

    def _error(self, problem: str) -> GrammarError:
        line = self._source.count("\n", 0, self._position) + 1
        column = self._position - (self._source.rfind("\n", 0, self._position) + 1) + 1
        return GrammarError(f"Line {line}, column {column} of the grammar: {problem}.")


class GbnfAsLark:
    """Writes one grammar. Rules of Lark are in small letters, lexemes in capitals."""

    def __init__(self, source: str) -> None:
        self._rules = rules = GbnfReader(source).rules()
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

    def _written(self, expression: Expression, in_lexeme: bool) -> str:
        """Return an expression as the body of a rule or, if it is `in_lexeme`, of a lexeme."""
        if not in_lexeme and not isinstance(expression, Reference) and self._is_regular(expression):
            return self._lexeme(expression)
        match expression:
            case Text(text):
                return json.dumps(text, ensure_ascii=False)
            case CharacterClass(ranges, negated):
                return _class(ranges, negated)
            case Reference(name):
                return self._names[name]
            case Sequence(items):
                return self._sequence(items, in_lexeme) or '""'
            case Choice(alternatives):
                return f"({' | '.join(self._written(each, in_lexeme) for each in alternatives)})"
            case Repetition(item, minimum, maximum):
                return f"({self._written(item, in_lexeme)}){_counts(minimum, maximum)}"

    def _sequence(self, items: list[Expression], in_lexeme: bool) -> str:
        """Return a sequence; outside of a lexeme, runs of regular items between recursive ones become lexemes."""
        if in_lexeme:
            return " ".join(self._written(item, True) for item in items)
        written: list[str] = []
        for is_regular, run in itertools.groupby(items, self._is_regular):
            if is_regular:
                written.append(self._lexeme(Sequence(list(run))))
            else:
                written += [self._written(item, False) for item in run]
        return " ".join(written)

    def _lexeme(self, expression: Expression) -> str:
        """Return the name of a lexeme for an expression; equal ones share theirs."""
        body = self._written(expression, True)
        return self._lexemes.setdefault(body, f"L{len(self._lexemes)}")

    def _is_regular(self, expression: Expression) -> bool:
        return all(name in self._regular for name in _references(expression))


def _regular_rules(rules: dict[str, Expression]) -> set[str]:
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


def _references(expression: Expression) -> list[str]:
    names: list[str] = []
    waiting = [expression]
    while waiting:
        match waiting.pop():
            case Reference(name):
                names.append(name)
            case Sequence(items):
                waiting += items
            case Choice(alternatives):
                waiting += alternatives
            case Repetition(item):
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
