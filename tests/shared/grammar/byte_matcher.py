"""Whether a text matches a grammar, by llguidance over a vocabulary of the 256 bytes."""

from __future__ import annotations

from functools import cache

from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper

from shared.grammar import parser_limits

END = 256


class _Bytes:
    eos_token_id = END
    bos_token_id = None
    tokens = (*(bytes([value]) for value in range(256)), b"<|end|>")
    special_token_ids = (END,)

    def __call__(self, text: str | bytes) -> list[int]:
        return list(text.encode() if isinstance(text, str) else text)


@cache
def byte_tokenizer() -> LLTokenizer:
    return LLTokenizer(TokenizerWrapper(_Bytes()), n_vocab=257, slices=[])


def accepts(grammar: str, text: str) -> bool:
    """Return whether the whole text may be written, byte by byte, and may end there."""
    matcher = LLMatcher(byte_tokenizer(), grammar, log_level=0, limits=parser_limits())
    assert not matcher.is_error(), matcher.get_error()
    encoded = list(text.encode())
    return matcher.try_consume_tokens(encoded) == len(encoded) and matcher.is_accepting()
