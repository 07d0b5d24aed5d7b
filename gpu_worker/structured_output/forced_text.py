"""The tokens of text that a grammar forces, where a part of it reads like a special token.

llguidance spells forced text with the model's tokenizer, which takes the text of a special token for that token. Its
mask allows that token alone, and its parser refuses it: for the grammar it is no text. Such text is spelled here by
tokens that are text.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from gpu_worker.structured_output.grammar_tokenizer import GrammarTokenizer

if TYPE_CHECKING:
    from llguidance import LLMatcher


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
