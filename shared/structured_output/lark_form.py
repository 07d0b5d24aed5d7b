"""Tells a grammar in Lark's syntax from one in GBNF."""

from __future__ import annotations

import re

_GBNF_RULE = re.compile(r"^[ \t]*[\w-]+[ \t]*::=", re.MULTILINE)


def looks_like_lark(source: str) -> bool:
    """Return whether a grammar is in Lark's syntax: its rules are defined by `:`, those of GBNF by `::=`."""
    return _GBNF_RULE.search(source) is None
