"""A model's tokenizer as llguidance needs it: the bytes of every token, and which tokens end an answer.

llguidance spells text that a grammar forces by this tokenizer, which takes the text of a special token for that token.
Its mask allows only that token, and its parser refuses it, because a special token is not text. Such text is
spelled here by ordinary tokens.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from shared.errors import HeadraceError
from shared.grammar import LlguidanceMissingError
from shared.rust_panics import panics_as

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

_END_TOKEN = "<|headrace-end|>"


class UnsupportedTokenizerError(HeadraceError):
    """llguidance cannot read the model's tokenizer."""

    def __init__(self, reason: str) -> None:
        super().__init__(f"This model's output cannot be constrained: its tokenizer is not supported ({reason[:200]}).")


class TokenizerSource(msgspec.Struct, frozen=True):
    """What a `GrammarTokenizer` is made of; `num_tokens` is the largest id and one, `vocab_size` the model's."""

    tokenizer_json: str
    num_tokens: int
    vocab_size: int
    eos_token_ids: frozenset[int]


class GrammarTokenizer:
    """The tokenizer of one model.

    Attributes:
        tokenizer: llguidance's own, of the larger vocabulary, and one token more where none ends an answer.
        vocab_size: Token ids that the model can produce.
        special_tokens, special_ids: Token ids by text of those that llguidance takes for no text, and these ids.
    """

    __slots__ = ("eos_token_ids", "special_ids", "special_tokens", "tokenizer", "vocab_size")

    tokenizer: LLTokenizer

    def __init__(self, source: TokenizerSource) -> None:
        """Read a tokenizer; one of 128,000 tokens takes a second, in which no other thread of Python runs.

        Raises:
            LlguidanceMissingError: The package is not installed.
            UnsupportedTokenizerError: It cannot read this tokenizer.
        """
        try:
            from llguidance import LLTokenizer
        except ImportError:
            raise LlguidanceMissingError from None
        self.vocab_size, self.eos_token_ids = source.vocab_size, source.eos_token_ids
        tokenizer_json, ends = source.tokenizer_json, sorted(source.eos_token_ids)
        size = max(source.num_tokens, source.vocab_size)
        if not ends:
            tokenizer_json, size, ends = _with_end_token(tokenizer_json, size), size + 1, [size]
        try:
            with panics_as(UnsupportedTokenizerError):
                self.tokenizer = LLTokenizer(tokenizer_json, n_vocab=size, eos_token=ends)
        except ValueError as error:
            raise UnsupportedTokenizerError(str(error)) from None
        added = msgspec.json.decode(tokenizer_json, type=_AddedTokens).added_tokens
        self.special_tokens = {each.content: each.id for each in added if self.tokenizer.is_special_token(each.id)}
        self.special_ids = frozenset(self.special_tokens.values())


class _AddedToken(msgspec.Struct):
    id: int
    content: str


class _AddedTokens(msgspec.Struct):
    """The part of `tokenizer.json` that lists tokens outside of the vocabulary proper."""

    added_tokens: list[_AddedToken] = []


def _with_end_token(tokenizer_json: str, token_id: int) -> str:
    content = msgspec.json.decode(tokenizer_json)
    flags = {"special": True, "normalized": False, "single_word": False, "lstrip": False, "rstrip": False}
    content.setdefault("added_tokens", []).append({"id": token_id, "content": _END_TOKEN, **flags})
    return msgspec.json.encode(content).decode()


def forced_tokens(matcher: LLMatcher, tokenizer: GrammarTokenizer) -> list[int]:
    """Return tokens that the grammar forces next, all of which it takes; none where it forces nothing."""
    tokens: list[int] = matcher.compute_ff_tokens()
    if tokenizer.special_ids.isdisjoint(tokens):
        return tokens
    count = matcher.validate_tokens(tokens)
    return tokens[:count] if count else _spelled(matcher, tokenizer)


def respelled_token(matcher: LLMatcher, tokenizer: GrammarTokenizer) -> int | None:
    """Return the one token that may come next, where the mask would have a special token that the grammar refuses."""
    tokens = matcher.compute_ff_tokens()
    if not tokens or tokens[0] not in tokenizer.special_ids or matcher.validate_tokens(tokens[:1]):
        return None
    spelled = _spelled(matcher, tokenizer)
    return spelled[0] if spelled else None


def _spelled(matcher: LLMatcher, tokenizer: GrammarTokenizer) -> list[int]:
    text = matcher.compute_ff_bytes().decode(errors="ignore")
    tokens: list[int] = tokenizer.tokenizer.greedy_tokenize(text)
    return tokens[: matcher.validate_tokens(tokens)]
