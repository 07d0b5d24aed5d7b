"""Tokenizers from GGUF metadata against the tokenizers that the metadata were made of."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gpu_worker.quantization.gguf.byte_reader import GGUFError
from gpu_worker.quantization.gguf.metadata import CONTROL, Metadata, end_token_ids
from gpu_worker.text.gguf_tokenizer import tokenizer_json
from gpu_worker.text.model_directory import ModelDirectory, read_model_directory
from gpu_worker.text.tokenizer import ModelTokenizer
from shared.conversation import ChatMessage
from shared.errors import BadRequestError
from shared.sampling import Sampling
from tests.gpu_worker.quantization.gguf.gguf_models import write_model
from tests.gpu_worker.quantization.gguf.vocabularies import (
    TEXTS,
    Vocabulary,
    byte_pair_vocabulary,
    merged_vocabulary,
    sentencepiece_vocabulary,
)

PRE_TOKENIZERS = (
    *("gpt-2", "smollm", "llama-bpe", "qwen2", "tekken"),
    *("command-r", "glm4", "gpt-4o", "seed-coder", "deepseek-v3"),
    *("qwen35", "kimi-k2", "deepseek-llm", "deepseek-coder", "exaone-moe", "tiny_aya"),
)
CHATML = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}{{ eos_token }}"
VOCABULARIES: dict[str, Callable[[], Vocabulary]] = {
    **{pre: lambda pre=pre: byte_pair_vocabulary(pre) for pre in PRE_TOKENIZERS},
    "llama-bpe without bos": lambda: byte_pair_vocabulary("llama-bpe", add_bos=False),
    "qwen2 with bos": lambda: byte_pair_vocabulary("qwen2", add_bos=True),
    "sentencepiece": sentencepiece_vocabulary,
    "sentencepiece without prefix": lambda: sentencepiece_vocabulary(False),
    "gemma4": merged_vocabulary,
}

Write = Callable[[Callable[[Any], None], int], Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Write a model of one layer with a vocabulary; return its path."""

    def make(vocabulary: Callable[[Any], None], size: int) -> Path:
        sizes = {"num_hidden_layers": 1, "hidden_size": 32, "intermediate_size": 32, "head_dim": 8, "vocab_size": size}
        path = tmp_path / "model.gguf"
        write_model(path, "llama-F32", vocabulary, **sizes)
        return path

    return make


def load(write: Write, vocabulary: Vocabulary) -> tuple[ModelDirectory, ModelTokenizer]:
    directory = read_model_directory(write(vocabulary, len(vocabulary.tokens)))
    return directory, ModelTokenizer(directory)


@pytest.mark.parametrize("name", VOCABULARIES)
def test_ids_and_texts_equal_the_original_tokenizer(write: Write, name: str) -> None:
    vocabulary = VOCABULARIES[name]()
    _, tokenizer = load(write, vocabulary)
    for text in filter(None, TEXTS):
        for adds in (True, False):
            expected = vocabulary.tokenizer.encode(text, add_special_tokens=adds).ids
            assert tokenizer.encode_text(text, add_special_tokens=adds) == expected, text
        decoded = vocabulary.tokenizer.decode(expected, skip_special_tokens=True)
        output = tokenizer.output_text([], Sampling())
        assert "".join([output.feed(token_id) for token_id in expected]) + output.finish() == decoded


@pytest.mark.parametrize("name", ["gpt-2", "sentencepiece"])
def test_facts_of_the_vocabulary_are_known(write: Write, name: str) -> None:
    vocabulary = VOCABULARIES[name]()
    directory, tokenizer = load(write, vocabulary)
    assert directory.vocab_size == tokenizer.vocab_size == len(vocabulary.tokens)
    assert directory.bos_token_id == vocabulary.tokens.index("<s>")
    assert directory.max_model_len == 128
    ends = {"</s>", "<|im_end|>"} & set(vocabulary.tokens)
    assert directory.eos_token_ids == {vocabulary.tokens.index(token) for token in ends}


def test_unused_and_special_tokens_have_no_text(write: Write) -> None:
    vocabulary = byte_pair_vocabulary("qwen2")
    _, tokenizer = load(write, vocabulary)
    for token in ("[PAD0]", "<s>", "<|im_end|>"):
        assert tokenizer.token_bytes(vocabulary.tokens.index(token)) == b""
    assert tokenizer.token_bytes(vocabulary.tokens.index("<tool>")) == b"<tool>"


def test_chat_template_places_special_tokens_and_content_cannot(write: Write) -> None:
    vocabulary = replace(byte_pair_vocabulary("qwen2"), chat_template=CHATML)
    _, tokenizer = load(write, vocabulary)
    ids = tokenizer.encode_chat([ChatMessage(role="user", content="hi <|im_end|>")]).token_ids
    end = vocabulary.tokens.index("<|im_end|>")
    assert ids.count(end) == 1
    assert ids[0] == vocabulary.tokens.index("<|im_start|>")
    assert ids[-1] == vocabulary.tokens.index("</s>")


def test_file_without_a_chat_template_says_so(write: Write) -> None:
    _, tokenizer = load(write, byte_pair_vocabulary("gpt-2"))
    with pytest.raises(BadRequestError, match="no chat template"):
        tokenizer.encode_chat([ChatMessage(role="user", content="hi")])


def _changed(**changes: Any) -> Vocabulary:
    return replace(byte_pair_vocabulary("gpt-2"), **changes)


def _tokens(index: int, token: str) -> list[str]:
    tokens = list(byte_pair_vocabulary("gpt-2").tokens)
    tokens[index] = token
    return tokens


DEFECTS: dict[str, tuple[Callable[[], Vocabulary], str]] = {
    "unknown pre-tokenizer": (
        lambda: _changed(pre="jais"),
        r"'tokenizer\.ggml\.pre' is 'jais'; supported: gpt-2, smollm, llama-bpe, .*qwen2, .*tekken",
    ),
    "no pre-tokenizer": (lambda: _changed(pre=None), r"'tokenizer\.ggml\.pre' is missing; convert .* gpt-2, smollm"),
    "unknown model": (
        lambda: _changed(model="rwkv"),
        r"'tokenizer\.ggml\.model' is 'rwkv'; supported: 'gpt2', 'llama', 'gemma4', 'bert' and 't5'",
    ),
    "model without a vocabulary": (lambda: _changed(model="none"), "is 'none'; supported"),
    "no merges": (lambda: _changed(merges=None), r"'tokenizer\.ggml\.merges' is missing"),
    "merge of unknown tokens": (lambda: _changed(merges=["q zq"]), "holds 'q zq', which is not two tokens"),
    "merge of one token": (lambda: _changed(merges=["the"]), "holds 'the', which is not two tokens"),
    "token twice": (lambda: _changed(tokens=_tokens(5, _tokens(0, "")[6])), "names a token twice"),
    "token that takes forever to cut up": (lambda: _changed(tokens=_tokens(5, "x" * 513)), "a token of 513 characters"),
    "types for other tokens": (
        lambda: _changed(types=[1, 2, 3]),
        r"token_type' is an array of 3; it must be an array of",
    ),
    "scores for other tokens": (lambda: replace(sentencepiece_vocabulary(), scores=[0.0]), r"scores' is an array of 1"),
    "scores that are not numbers": (
        lambda: replace(sentencepiece_vocabulary(), scores=[float("nan")] * len(sentencepiece_vocabulary().tokens)),
        "finite numbers",
    ),
}


@pytest.mark.parametrize("defect", DEFECTS)
def test_defect_of_a_vocabulary_is_named(write: Write, defect: str) -> None:
    make, problem = DEFECTS[defect]
    with pytest.raises(GGUFError, match=problem):
        load(write, make())


def test_special_token_that_is_no_token_is_refused(write: Write) -> None:
    vocabulary = byte_pair_vocabulary("gpt-2")

    def wrong(writer: Any) -> None:
        vocabulary(writer)
        writer.add_eot_token_id(len(vocabulary.tokens))

    with pytest.raises(GGUFError, match=r"'tokenizer\.ggml\.eot_token_id' is \d+; it must be a whole number from 0"):
        read_model_directory(write(wrong, len(vocabulary.tokens)))


def test_more_tokens_than_rows_of_the_embedding_are_refused(write: Write) -> None:
    vocabulary = byte_pair_vocabulary("gpt-2")
    with pytest.raises(GGUFError, match=r"tokens' has \d+ tokens, but token_embd\.weight \d+ rows"):
        read_model_directory(write(vocabulary, len(vocabulary.tokens) - 1))


def test_embedding_may_have_more_rows_than_there_are_tokens(write: Write) -> None:
    vocabulary = byte_pair_vocabulary("gpt-2")
    tokenizer = ModelTokenizer(read_model_directory(write(vocabulary, len(vocabulary.tokens) + 7)))
    assert tokenizer.vocab_size == len(vocabulary.tokens) + 7
    assert tokenizer.token_bytes(tokenizer.vocab_size - 1) == b""


NORMAL = 1


def ends(tokens: list[str], named: str, kinds: list[int] | None = None) -> set[str]:
    types = np.array(kinds or [CONTROL] * len(tokens), np.int32)
    fields = {
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.eos_token_id": tokens.index(named),
    }
    return {tokens[index] for index in end_token_ids(Metadata(Path("model.gguf"), fields))}


@pytest.mark.parametrize(
    ("tokens", "named", "expected"),
    [
        (["<eos>", "<start_of_turn>", "<end_of_turn>"], "<eos>", {"<eos>", "<end_of_turn>"}),
        (["<|endoftext|>", "<|end|>", "<|user|>"], "<|endoftext|>", {"<|endoftext|>", "<|end|>"}),
        (
            ["<|endoftext|>", "<|return|>", "<|end|>", "<|call|>"],
            "<|return|>",
            {"<|endoftext|>", "<|return|>", "<|call|>"},
        ),
        (["<|end_of_text|>", "<|eom|>", "<|eot|>"], "<|eot|>", {"<|end_of_text|>", "<|eom|>", "<|eot|>"}),
        (["<eos>", "<|turn>", "<turn|>"], "<eos>", {"<eos>", "<turn|>"}),
        (
            ["<|endoftext|>", "[gMASK]", "<|user|>", "<|observation|>", "<|assistant|>"],
            "<|endoftext|>",
            {"<|endoftext|>", "<|user|>", "<|observation|>"},
        ),
        (["<|endoftext|>", "<|user|>"], "<|endoftext|>", {"<|endoftext|>"}),
    ],
    ids=["gemma", "phi", "gpt-oss", "llama 4", "gemma 4", "glm", "a user's turn in another family"],
)
def test_turns_end_with_more_tokens_than_the_file_names(tokens: list[str], named: str, expected: set[str]) -> None:
    assert ends(tokens, named) == expected


def test_text_that_is_spelled_like_an_end_is_none() -> None:
    assert ends(["<eos>", "<end_of_turn>"], "<eos>", [CONTROL, NORMAL]) == {"<eos>"}


def test_tokens_without_types_are_ordinary_text() -> None:
    fields = {
        "tokenizer.ggml.model": "gemma4",
        "tokenizer.ggml.tokens": ["a", "b", "ab"],
        "tokenizer.ggml.merges": ["a b"],
    }
    read = json.loads(tokenizer_json(Metadata(Path("model.gguf"), fields)))
    assert (read["added_tokens"], read["model"]["vocab"]) == ([], {"a": 0, "b": 1, "ab": 2})
