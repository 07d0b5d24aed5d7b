"""A grammar of the content, as a part of the grammar of a whole answer."""

from __future__ import annotations

import re

import msgspec

from shared.formats.lark_text import LarkText
from shared.grammar import Grammar, decode_schema, grammar_text

# Strings, regular expressions, comments, and names, of which the last group is the one that may be `start`.
_TOKENS = re.compile(r'"(?:\\.|[^"\\\n])*"|/(?:\\.|[^/\\\n])+/|//[^\n]*|#[^\n]*|([A-Za-z_][\w-]*)')


def content_rule(lark: LarkText, content: Grammar) -> str:
    """Write a grammar of any kind as a rule, and return its name.

    Raises:
        GrammarError: It is not within its bounds.
    """
    if content.kind == "json_schema":
        return lark.schema(decode_schema(content.source), coerces_one_of=not content.strict)
    (grammar,) = msgspec.json.decode(grammar_text(content))["grammars"]
    name = "content"
    lark.add(_TOKENS.sub(lambda found: name if found.group(1) == "start" else found.group(), grammar["lark_grammar"]))
    return name
