"""Tokenizers of models: llguidance takes each token for the bytes that the worker sends for it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gpu_worker.structured_output.compiled_grammar import compile_grammar
from gpu_worker.structured_output.grammar_tokenizer import GrammarTokenizer, TokenizerSource, UnsupportedTokenizerError
from gpu_worker.text.model_directory import read_model_directory
from gpu_worker.text.token_table import build_table
from gpu_worker.text.tokenizer import ModelTokenizer
from shared.formats import Tool, ToolChoice, format_named
from shared.grammar import Grammar
from shared.sampling import Sampling
from tests.gpu_worker.consumer.harness import TOKENIZER
from tests.gpu_worker.quantization.gguf.gguf_models import write_model
from tests.gpu_worker.quantization.gguf.vocabularies import byte_pair_vocabulary, sentencepiece_vocabulary
from tests.gpu_worker.structured_output.tiny_tokenizer import EOS, VOCAB, tokenizer_json, tokens_of
from tests.gpu_worker.text.conftest import sentencepiece_tokenizer, wordpiece_tokenizer


def check_bytes(grammar_tokenizer: GrammarTokenizer, raw: list[bytes]) -> None:
    """Assert that all tokens mean the same bytes, but for special ones, which have none here."""
    tokenizer = grammar_tokenizer.tokenizer
    wrong = {
        token_id: (tokenizer.decode_bytes([token_id]), expected)
        for token_id, expected in enumerate(raw)
        # A byte that is not text by itself is told with a mark of llguidance's own.
        if expected not in (b"", b"\xff") and tokenizer.decode_bytes([token_id]) != expected
    }
    assert wrong == {}


def test_bytes_of_the_demo_models_tokens_are_the_same() -> None:
    raw = [TOKENIZER.token_bytes(token_id) for token_id in range(TOKENIZER.vocab_size)]
    check_bytes(TOKENIZER.grammar_tokenizer, raw)


@pytest.mark.parametrize("strips_space", [True, False])
def test_bytes_of_sentencepiece_tokens_are_the_same(strips_space: bool) -> None:
    tokenizer = sentencepiece_tokenizer(strips_space=strips_space)
    size = tokenizer.get_vocab_size(with_added_tokens=True)
    table = build_table(tokenizer, tokenizer.to_str().encode(), size)
    assert table is not None
    grammar_tokenizer = GrammarTokenizer(TokenizerSource(tokenizer.to_str(), size, size, frozenset({2})))
    check_bytes(grammar_tokenizer, table.raw)
    grammar = Grammar(kind="regex", source="ab é\n!")
    constraint = compile_grammar(grammar, grammar_tokenizer).constraint(Sampling(grammar=grammar), ())
    ids = [tokenizer.token_to_id(token) for token in ("ab", "▁", "é", "<0x0A>", "!")]
    assert all(map(constraint.advance, ids))
    assert constraint.is_complete


@pytest.mark.parametrize("name", ["qwen2", "llama-bpe", "sentencepiece"])
def test_gguf_tokenizer_follows_a_grammar(tmp_path: Path, name: str) -> None:
    vocabulary = sentencepiece_vocabulary() if name == "sentencepiece" else byte_pair_vocabulary(name)
    size = len(vocabulary.tokens)
    sizes = {"num_hidden_layers": 1, "hidden_size": 32, "intermediate_size": 32, "head_dim": 8, "vocab_size": size}
    path = tmp_path / "model.gguf"
    write_model(path, "llama-F32", vocabulary, **sizes)
    directory = read_model_directory(path)
    tokenizer = ModelTokenizer(directory)
    grammar_tokenizer = tokenizer.grammar_tokenizer
    assert grammar_tokenizer.eos_token_ids == directory.eos_token_ids
    check_bytes(grammar_tokenizer, [tokenizer.token_bytes(token_id) for token_id in range(size)])
    grammar = Grammar(kind="json_schema", source='{"type": "array", "items": {"type": "integer"}}')
    constraint = compile_grammar(grammar, grammar_tokenizer).constraint(Sampling(grammar=grammar), ())
    for text in ("[", "1", "]"):
        # Sentencepiece may have a token of the character and one of its byte.
        token_id = next(index for index in range(size) if tokenizer.token_bytes(index) == text.encode())
        assert constraint.advance(token_id)
    assert constraint.is_complete


@pytest.mark.parametrize("content", [wordpiece_tokenizer().to_str(), "{}"])
def test_tokenizer_without_bytes_or_without_anything_is_refused(content: str) -> None:
    with pytest.raises(UnsupportedTokenizerError, match="its tokenizer is not supported"):
        GrammarTokenizer(TokenizerSource(content, 7, 7, frozenset({2})))


OPEN, CLOSE = VOCAB, VOCAB + 1


def _tokenizer_with_tags() -> GrammarTokenizer:
    """Return a tokenizer like Qwen's: the tags of calls are tokens, though none that are left out of the text."""
    content = json.loads(tokenizer_json())
    tag = {"special": False, "normalized": False, "single_word": False, "lstrip": False, "rstrip": False}
    content["added_tokens"] += [
        {"id": OPEN, "content": "<tool_call>", **tag},
        {"id": CLOSE, "content": "</tool_call>", **tag},
    ]
    return GrammarTokenizer(TokenizerSource(json.dumps(content), VOCAB + 2, VOCAB + 2, frozenset({EOS})))


def test_special_tokens_are_known_by_their_text() -> None:
    special = {"<|end|>": EOS, "<tool_call>": OPEN, "</tool_call>": CLOSE}
    assert _tokenizer_with_tags().special_tokens == special


def test_model_writes_the_tags_of_a_call_as_its_own_tokens() -> None:
    strict = Tool("f", json.dumps({"type": "object", "properties": {}, "additionalProperties": False}), strict=True)
    call = (OPEN, *tokens_of('\n{"name": "f", "arguments": {}}\n'), CLOSE)
    for mode, before in (("required", ()), ("auto", tokens_of("I look."))):
        grammar = format_named("hermes").grammar([strict], ToolChoice(mode))
        assert grammar is not None
        compiled = compile_grammar(grammar, _tokenizer_with_tags())
        constraint = compiled.constraint(Sampling(grammar=grammar), before)
        assert all(map(constraint.advance, (*call, EOS)))


def test_grammar_of_a_client_is_left_as_it_is() -> None:
    grammar = Grammar(kind="lark", source='start: "<tool_call>"')
    constraint = compile_grammar(grammar, _tokenizer_with_tags()).constraint(Sampling(grammar=grammar), ())
    assert not constraint.advance(OPEN)
