"""A vocabulary of single bytes and of a format's special tokens, and llguidance's matcher over it."""

from __future__ import annotations

import re
from functools import cache
from typing import Any

import llguidance

from shared.formats import ChatFormat
from shared.formats.lark_text import with_marker_tokens
from shared.grammar import Grammar, grammar_text

END = 256


class Vocabulary:
    """Tokens 0 to 255 are bytes, 256 ends an answer, then follow special tokens."""

    eos_token_id = END
    bos_token_id = None

    def __init__(self, special: tuple[str, ...] = ()) -> None:
        self.token_ids = {text: END + 1 + index for index, text in enumerate(special)}
        self.tokens = [bytes([byte]) for byte in range(256)] + [b"<end>", *(text.encode() for text in special)]
        self.special_token_ids = [END, *self.token_ids.values()]
        self.tokenizer = llguidance.LLTokenizer(llguidance.TokenizerWrapper(self))
        self._matchers: dict[Grammar, Any] = {}
        self._pieces = re.compile("|".join(map(re.escape, sorted(special, key=len, reverse=True))) or "(?!)")

    def __call__(self, text: bytes) -> list[int]:
        """Return the bytes, as llguidance tokenizes what a grammar forces."""
        return list(text)

    def encode(self, text: str) -> list[int]:
        ids: list[int] = []
        at = 0
        for match in self._pieces.finditer(text):
            ids += [*text[at : match.start()].encode(), self.token_ids[match.group()]]
            at = match.end()
        return [*ids, *text[at:].encode()]

    def decode(self, ids: list[int]) -> str:
        return b"".join(self.tokens[each] for each in ids).decode(errors="replace")

    def matcher(self, grammar: Grammar) -> Any:
        """Return a matcher at the beginning of an answer; the same again for the same grammar."""
        if grammar not in self._matchers:
            self._matchers[grammar] = self._new_matcher(grammar)
        matcher = self._matchers[grammar]
        matcher.reset()
        return matcher

    def _new_matcher(self, grammar: Grammar) -> Any:
        return llguidance.LLMatcher(
            self.tokenizer, grammar_text(with_marker_tokens(grammar, self.token_ids)), log_level=0
        )

    def accepts(self, grammar: Grammar, text: str) -> bool:
        """Return True if a grammar allows a whole text."""
        matcher = self.matcher(grammar)
        assert not matcher.is_error(), matcher.get_error()
        ids = self.encode(text)
        return bool(matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting())


@cache
def vocabularies(spoken: ChatFormat) -> tuple[Vocabulary, Vocabulary]:
    return Vocabulary(), Vocabulary(spoken.tokens)


def check_grammar(
    spoken: ChatFormat, grammar: Grammar | None, *, allows: tuple[str, ...] = (), refuses: tuple[str, ...] = ()
) -> None:
    assert grammar is not None
    for vocabulary in vocabularies(spoken):
        for text in (*allows, *refuses):
            assert vocabulary.accepts(grammar, text) == (text in allows), text
