"""The input of llguidance for a `Grammar`: a schema, or a grammar in Lark's syntax.

A grammar that is over a bound, unreadable or unsupported raises `GrammarError`.
"""

from __future__ import annotations

import json
import re
from typing import Any

import msgspec

from shared.grammar.bounds import check_lark, check_regex, check_schema, check_size
from shared.grammar.gbnf_lark import GbnfAsLark
from shared.grammar.grammar import Grammar, GrammarError
from shared.grammar.patterns import with_exact_patterns
from shared.grammar.property_names import with_named_properties

# One space, or a new line with its indentation: what writers of JSON write. A model cannot go on with spaces for ever.
WHITESPACE = r"[ \t]|\r?\n[ \t]{0,40}"

_GBNF_RULE = re.compile(r"^[ \t]*[\w-]+[ \t]*::=", re.MULTILINE)


def grammar_text(grammar: Grammar) -> str:
    """Return the text that `LLMatcher` reads.

    Equal grammars have equal texts, on the gateway and on every worker.
    """
    if grammar.kind == "json_schema":
        check_size(grammar.source, "The schema")
        return _encode({"json_schema": llguidance_schema(decode_schema(grammar.source), strict=grammar.strict)})
    if grammar.kind == "regex":
        check_regex(grammar.source)
        return _encode({"lark_grammar": f"start: {lark_regex(grammar.source)}"})
    if grammar.kind == "gbnf":
        check_size(grammar.source, "The grammar")
        lark = GbnfAsLark(grammar.source).text()
    else:
        lark = grammar.source
    check_lark(lark)
    return _encode({"lark_grammar": lark})


def decode_schema(source: str) -> Any:
    """Return a JSON schema within its bounds."""
    try:
        schema = msgspec.json.decode(source)
    except (msgspec.DecodeError, RecursionError) as error:
        raise GrammarError(f"The schema is not valid JSON: {error}.") from None
    if not isinstance(schema, dict | bool):
        raise GrammarError("The schema must be an object or a boolean.")
    check_schema(schema)
    return schema


def llguidance_schema(schema: Any, *, strict: bool) -> Any:
    """Return a decoded schema as llguidance is to be given it, alone or behind `%json` in a Lark grammar."""
    if isinstance(schema, bool):
        return {} if schema else False
    # Every option, so that none that stands in the client's schema weakens it.
    options = {
        "whitespace_pattern": WHITESPACE,
        "whitespace_flexible": True,
        "item_separator": ",",
        "key_separator": ":",
        "lenient": False,
        "coerce_one_of": not strict,
    }
    return {**with_exact_patterns(with_named_properties(schema)), "x-guidance": options}


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


def _encode(grammar: dict[str, Any]) -> str:
    # Not msgspec: it refuses integers of more than 64 bits.
    return json.dumps({"grammars": [grammar]}, separators=(",", ":"))
