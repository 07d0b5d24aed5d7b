"""Reads a grammar in GBNF, the notation of llama.cpp.

Source: the description of GBNF in llama.cpp (grammars/README.md). Rules of tokens (`<think>`, `<[1000]>`) are refused.
"""

from __future__ import annotations

import re
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
