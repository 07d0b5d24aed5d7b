"""A tokenizer of 97 tokens, as many as the tiny models have: printable ASCII, a line feed, and the end of an answer."""

from __future__ import annotations

import json
from collections.abc import Iterable
from functools import cache

import numpy as np

from gpu_worker.structured_output.compiled_grammar import CompiledGrammar, compile_grammar
from gpu_worker.structured_output.grammar_constraint import GrammarConstraint
from gpu_worker.structured_output.grammar_tokenizer import GrammarTokenizer, TokenizerSource
from shared.grammar import Grammar
from shared.sampling import Sampling

CHARACTERS = "".join(map(chr, range(32, 127))) + "\n"
EOS = len(CHARACTERS)
VOCAB = EOS + 1


def tokenizer_json() -> str:
    """Return it as the content of a `tokenizer.json`."""
    vocabulary = {token: place for place, token in enumerate(CHARACTERS.replace(" ", "Ġ").replace("\n", "Ċ"))}
    end = {"id": EOS, "content": "<|end|>", "special": True, "normalized": False}
    return json.dumps(
        {
            "version": "1.0",
            "truncation": None,
            "padding": None,
            "added_tokens": [{**end, "single_word": False, "lstrip": False, "rstrip": False}],
            "normalizer": None,
            "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
            "post_processor": None,
            "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
            "model": {"type": "BPE", "vocab": vocabulary, "merges": []},
        }
    )


@cache
def tiny_tokenizer(vocab_size: int = VOCAB, eos_token_ids: frozenset[int] = frozenset({EOS})) -> GrammarTokenizer:
    return GrammarTokenizer(TokenizerSource(tokenizer_json(), VOCAB, vocab_size, frozenset(eos_token_ids)))


@cache
def compiled(grammar: Grammar) -> CompiledGrammar:
    return compile_grammar(grammar, tiny_tokenizer())


def constraint_of(sampling: Sampling, emitted: Iterable[int] = ()) -> GrammarConstraint:
    assert sampling.grammar is not None
    return compiled(sampling.grammar).constraint(sampling, tuple(emitted))


def tokens_of(text: str) -> tuple[int, ...]:
    return tuple(map(CHARACTERS.index, text))


def text_of(token_ids: Iterable[int]) -> str:
    """Return the text of an output, without the token that ended it."""
    return "".join(CHARACTERS[token_id] for token_id in token_ids if token_id != EOS)


def allowed(constraint: GrammarConstraint, drafts: tuple[int, ...] = (), vocab_size: int = VOCAB) -> set[int]:
    """Return the tokens that a constraint's mask allows behind drafts."""
    mask = np.full(-(-vocab_size // 32) + 1, 0x5A5A5A5A, dtype=np.int32)
    constraint.fill_mask(drafts, mask.ctypes.data)
    assert mask[-1] == 0x5A5A5A5A, "it wrote behind its mask"
    bits = np.unpackbits(mask[:-1].view(np.uint8), bitorder="little")[:vocab_size]
    return set(np.flatnonzero(bits).tolist())
