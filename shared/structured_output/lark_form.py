"""Lark's syntax: how it is told from GBNF, and how a regular expression is written in it."""

from __future__ import annotations

import re

_GBNF_RULE = re.compile(r"^[ \t]*[\w-]+[ \t]*::=", re.MULTILINE)


def looks_like_lark(source: str) -> bool:
    """Return whether a grammar is in Lark's syntax: its rules are defined by `:`, those of GBNF by `::=`."""
    return _GBNF_RULE.search(source) is None


def lark_regex(pattern: str) -> str:
    """Return a regular expression as it stands in Lark: between slashes, on one line."""
    escaped: list[str] = []
    is_escape = False
    for character in pattern:
        if character == "/" and not is_escape:
            escaped.append("\\/")
        elif character == "\n":
            escaped.append("n" if is_escape else "\\n")
        else:
            escaped.append(character)
        is_escape = character == "\\" and not is_escape
    return f"/{''.join(escaped)}/"
