"""Which metrics and labels a PromQL expression names: enough of the language for the expressions of this repository."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

_TOKEN = re.compile(
    r"""(?P<string>"(?:\\.|[^"\\])*"|'(?:\\.|[^'\\])*')|(?P<range>\[[^\]]*\])|(?P<word>[A-Za-z_:$][A-Za-z0-9_:$]*)"""
    r"""|(?P<number>[0-9][0-9.a-z]*)|(?P<sign>=~|!~|!=|==|>=|<=|[-+*/%^(){},=<>])|(?P<space>\s+)"""
)
_OPERATORS = frozenset({"and", "or", "unless", "bool", "offset"})
_GROUPING = frozenset({"by", "without", "on", "ignoring", "group_left", "group_right"})


@dataclass
class Selector:
    """A metric and the labels that its braces name."""

    metric: str
    labels: set[str] = field(default_factory=set)


@dataclass
class Named:
    """All that an expression names. `groups` are labels of `by` and the like, with no metric of their own."""

    selectors: list[Selector]
    groups: set[str]


def named(expression: str) -> Named:
    """Return what an expression names.

    Raises:
        ValueError: It has something that this reader does not know.
    """
    tokens = list(_tokens(expression))
    selectors: list[Selector] = []
    groups: set[str] = set()
    place = 0
    while place < len(tokens):
        kind, text = tokens[place]
        following = tokens[place + 1][1] if place + 1 < len(tokens) else ""
        place += 1
        if kind != "word" or text in _OPERATORS:
            continue
        if text in _GROUPING:
            end = tokens.index(("sign", ")"), place)
            groups |= {word for kind, word in tokens[place:end] if kind == "word"}
            place = end + 1
        elif following != "(" and following not in _GROUPING:
            selectors.append(Selector(text))
            if following == "{":
                end = tokens.index(("sign", "}"), place)
                selectors[-1].labels = {word for kind, word in tokens[place:end] if kind == "word"}
                place = end + 1
    return Named(selectors, groups)


def _tokens(expression: str) -> Iterator[tuple[str, str]]:
    place = 0
    while place < len(expression):
        match = _TOKEN.match(expression, place)
        if match is None:
            raise ValueError(f"unknown at {expression[place : place + 20]!r}")
        place = match.end()
        if match.lastgroup != "space":
            yield str(match.lastgroup), match.group()
