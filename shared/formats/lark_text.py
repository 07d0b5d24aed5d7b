"""Writes a grammar in Lark's syntax, as llguidance reads it.

llguidance has a lexer below its parser, which takes the longest lexeme it can. So free text and the marker that ends it
are one lexeme here, and no marker stands in free text. A marker that may be a special token of the model's vocabulary
is a rule of its own, of which the worker makes that token (`shared.formats.lark_text`); no lexeme contains it then.

A schema that is too large, or has a pattern that is not supported, raises `GrammarError`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from shared.bounds import MAX_GRAMMAR_CHARACTERS
from shared.formats.schema import ALL_TYPES
from shared.formats.tools import Tool, TooLargeError
from shared.grammar import Grammar, decode_schema, llguidance_schema
from shared.grammar.grammar_text import lark_regex
from shared.grammar.patterns import exact_pattern

RULE_PREFIX = "marker"

_RULE = re.compile(rf'^({RULE_PREFIX}_[0-9]+): ("(?:[^"\\]|\\.)*")$', re.MULTILINE)


def with_marker_tokens(grammar: Grammar, token_ids: Mapping[str, int]) -> Grammar:
    """Return a grammar in which markers are special tokens of a model's vocabulary.

    The gateway writes grammars without knowing the vocabulary: each marker that may be a token of its own is a rule
    with the marker's text. llguidance takes a special token for no text at all, so that the model could not write its
    own marker otherwise.
    Grammars that no `ChatFormat` has written are left as they are.
    """
    if grammar.kind != "lark":
        return grammar

    def as_token(rule: re.Match[str]) -> str:
        token_id = token_ids.get(json.loads(rule[2]))
        return rule[0] if token_id is None else f"{rule[1]}: <[{token_id}]>"

    return msgspec.structs.replace(grammar, source=_RULE.sub(as_token, grammar.source))


ANY_TEXT = "/(?s:.*)/"
# A dollar sign that no backslash escapes.
_ANCHORED_END = re.compile(r"(?<!\\)(?:\\\\)*\$\Z")
_QUOTED = re.compile(r'"(?:[^"\\]|\\.)*"')
_QUOTED_RUN = re.compile(rf"{_QUOTED.pattern}(?:\s+{_QUOTED.pattern})*")


class LarkText:
    """Owns the rules and terminals written so far, equal ones once; too many characters are a `TooLargeError`."""

    def __init__(self, tokens: Sequence[str]) -> None:
        self._tokens = frozenset(tokens)
        longest_first = sorted(tokens, key=len, reverse=True)
        self._special = re.compile(f"({'|'.join(map(re.escape, longest_first)) or '(?!)'})")
        self._definitions: list[str] = []
        self._names: dict[tuple[str, str], str] = {}
        self._num_characters = 0

    def literal(self, text: str) -> str:
        """Return a text as it stands in a rule; nothing for the empty text."""
        pieces = [self._piece(each) for each in self._special.split(text) if each]
        # Where its markers are text, all of it is one lexeme, so that no other may be the longer one.
        return f"( {quoted(text)} | {' '.join(pieces)} )" if len(pieces) > 1 else "".join(pieces)

    def rule(self, prefix: str, body: str) -> str:
        """Write a rule, and return its name, which begins with `prefix`."""
        return self._named(prefix.lower(), body)

    def terminal(self, prefix: str, body: str) -> str:
        """Write a terminal, and return its name, which begins with `prefix`."""
        return self._named(prefix.upper(), body)

    def text(self, without: tuple[str, ...] = (), pattern: str = ANY_TEXT) -> str:
        """Return a terminal for text of a pattern in which none of some texts stands."""
        sought = " | ".join(quoted(each) for each in without if each)
        return self.terminal("TEXT", f"{pattern} & ~( {ANY_TEXT} ( {sought} ) {ANY_TEXT} )" if sought else pattern)

    def through(self, end: str, without: tuple[str, ...] = (), pattern: str = ANY_TEXT) -> str:
        """Return an expression for text of a pattern without some texts, and the marker that ends it."""
        plain, *special = self._special.split(end)
        text = self.text((end, *without), pattern)
        as_text = self.terminal("THROUGH", f"{text} {quoted(end)}")
        if not special:
            return as_text
        head = self.terminal("THROUGH", f"{text} {quoted(plain)}") if plain else text
        return f"( {as_text} | {head} {' '.join(self._piece(each) for each in special if each)} )"

    def schema(self, schema: Any, *, coerces_one_of: bool = False) -> str:
        """Return a rule for JSON that keeps to a schema."""
        return self.rule("json", f"%json {json.dumps(llguidance_schema(schema, strict=not coerces_one_of))}")

    def of_types(self, types: frozenset[str]) -> str:
        """Return a rule for JSON of any of these types."""
        return self.schema({} if types >= ALL_TYPES else {"type": sorted(types)})

    def arguments(self, tool: Tool) -> str:
        """Return a rule for a JSON object of arguments: of the tool's schema if it is strict, else any object."""
        if tool.strict and tool.parameters:
            return self.schema(decode_schema(tool.parameters))
        return self.schema({"type": "object"})

    def add(self, definitions: str) -> None:
        """Add definitions that were written elsewhere."""
        self._definitions.append(definitions)

    def source(self, start: str) -> str:
        """Return the grammar; its first line is the rule `start`."""
        return "\n".join((f"start: {start}", *self._definitions, ""))

    def _piece(self, text: str) -> str:
        return self.rule(RULE_PREFIX, quoted(text)) if text in self._tokens else quoted(text)

    def _named(self, prefix: str, body: str) -> str:
        self._num_characters += len(body)
        if self._num_characters > MAX_GRAMMAR_CHARACTERS:
            raise TooLargeError("The schemas make too large a grammar. Offer fewer or smaller ones at once.")
        key = (prefix, body)
        if key not in self._names:
            self._names[key] = name = f"{prefix}_{len(self._names)}"
            self._definitions.append(f"{name}: {body}")
        return self._names[key]


def joined(expression: str) -> str:
    """Return an expression in which texts that stand side by side are one.

    Free text may match the beginning of a call, so that the beginning has to be one lexeme to be the longer one.
    """
    return _QUOTED_RUN.sub(lambda run: quoted("".join(map(json.loads, _QUOTED.findall(run.group())))), expression)


def quoted(text: str) -> str:
    """Return a text as Lark writes it."""
    return json.dumps(text, ensure_ascii=False)


def whole_pattern(pattern: str) -> str:
    """Return a schema's regular expression, found anywhere in a text, as one for the whole text, in Lark."""
    is_open_end = _ANCHORED_END.search(pattern) is None
    begin = "" if pattern.startswith("^") else "(?s:.*)"
    end = "(?s:.*)" if is_open_end else ""
    inner = pattern.removeprefix("^") if not begin else pattern
    inner = exact_pattern(inner.removesuffix("$") if not end else inner)
    return lark_regex(f"{begin}({inner}){end}")
