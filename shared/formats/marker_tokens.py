"""Markers in a grammar that are special tokens of a model's vocabulary.

The gateway writes grammars without knowing the vocabulary: each marker that may be a token of its own is a rule with
the marker's text. The worker, which knows it, puts the token there. llguidance takes a special token for no text at
all, so that the model could not write its own marker otherwise.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping

import msgspec

from shared.grammar import Grammar

RULE_PREFIX = "marker"

_RULE = re.compile(rf'^({RULE_PREFIX}_[0-9]+): ("(?:[^"\\]|\\.)*")$', re.MULTILINE)


def with_marker_tokens(grammar: Grammar, token_ids: Mapping[str, int]) -> Grammar:
    """Return a grammar in which markers are tokens.

    Args:
        grammar: As a `ChatFormat` has written it; any other is left as it is.
        token_ids: The special tokens of the vocabulary, by their text.
    """
    if grammar.kind != "lark":
        return grammar

    def as_token(rule: re.Match[str]) -> str:
        token_id = token_ids.get(json.loads(rule[2]))
        return rule[0] if token_id is None else f"{rule[1]}: <[{token_id}]>"

    return msgspec.structs.replace(grammar, source=_RULE.sub(as_token, grammar.source))
