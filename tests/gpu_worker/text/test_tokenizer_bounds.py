from __future__ import annotations

import base64
import dataclasses
import json
import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from gpu_worker.structured_output.grammar_tokenizer import GrammarTokenizer, TokenizerSource, UnsupportedTokenizerError
from gpu_worker.text.library import TokenizerError
from gpu_worker.text.model_directory import ModelDirectory
from gpu_worker.text.tokenizer import ModelTokenizer
from gpu_worker.text.tokenizer_bounds import (
    MAX_TOKEN_CHARACTERS,
    MAX_TOKENS,
    TokenizerBoundsError,
    check_steps,
    check_vocabulary_sizes,
)
from gpu_worker.text.vocabulary_check import check_vocabulary
from shared.errors import ConfigError
from tests.gpu_worker.text.conftest import CopiedModel, sentencepiece_tokenizer, wordpiece_tokenizer


def replacing(pattern: str, content: str, kind: str = "String") -> dict[str, Any]:
    return {"type": "Replace", "pattern": {kind: pattern}, "content": content}


def sequence(*steps: dict[str, Any], name: str = "normalizers") -> dict[str, Any]:
    return {"type": "Sequence", name: list(steps)}


def charsmap(text: str) -> dict[str, Any]:
    data = (4).to_bytes(4, "little") + bytes(4) + text.encode() + b"\0"
    return {"type": "Precompiled", "precompiled_charsmap": base64.b64encode(data).decode()}


def template(num_ids: int, num_texts: int = 1) -> dict[str, Any]:
    pieces = [{"SpecialToken": {"id": "x", "type_id": 0}}, *[{"Sequence": {"id": "A", "type_id": 0}}] * num_texts]
    special = {"x": {"id": "x", "ids": [1] * num_ids, "tokens": ["x"] * num_ids}}
    return {"type": "TemplateProcessing", "single": pieces, "pair": [], "special_tokens": special}


DOUBLING = replacing("a", "aa")
HOSTILE: dict[str, dict[str, Any]] = {
    "doubles thirty times": {"normalizer": sequence(*[DOUBLING] * 30)},
    "nested": {"normalizer": sequence(sequence(*[DOUBLING] * 9), sequence(*[DOUBLING] * 9))},
    "before each character": {"normalizer": replacing("(?=.)", "x" * 2000, "Regex")},
    "empty pattern": {"normalizer": replacing("", "x" * 2000)},
    "prepends": {"normalizer": {"type": "Prepend", "prepend": "x" * 2000}},
    "charsmap": {"normalizer": charsmap("x" * 2000)},
    "forms again and again": {"normalizer": sequence(*[{"type": "NFKC"}] * 3)},
    "bytes of bytes": {"pre_tokenizer": sequence(*[{"type": "ByteLevel"}] * 6, name="pretokenizers")},
    "decoder": {"decoder": sequence(*[DOUBLING] * 30, name="decoders")},
    "adds tokens": {"post_processor": template(5000)},
    "repeats the text": {"post_processor": template(1, 100)},
    "within a sequence": {"post_processor": sequence(template(5000), name="processors")},
    "no steps": {"normalizer": {"type": "Sequence"}},
    "no type": {"decoder": {}},
    "not base64": {"normalizer": {"type": "Precompiled", "precompiled_charsmap": "~"}},
    "token without end": {"added_tokens": [{"id": 0, "content": "x" * (2 << 20)}]},
}


@pytest.mark.parametrize("changes", HOSTILE.values(), ids=HOSTILE)
def test_tokenizer_that_could_fill_the_memory_is_refused_before_it_is_loaded(changes: dict[str, Any]) -> None:
    with pytest.raises(TokenizerBoundsError):
        check_steps(json.dumps(changes).encode())


def published() -> dict[str, Tokenizer]:
    """Tokenizers with the steps of those that are published."""
    plain = Tokenizer(models.WordLevel({"a": 0}, unk_token="a"))
    t5 = Tokenizer.from_str(plain.to_str())
    t5.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Replace(" {2,}", "▁")])
    t5.pre_tokenizer = pre_tokenizers.Metaspace()
    t5.decoder = decoders.Metaspace()
    bert = Tokenizer.from_str(plain.to_str())
    bert.normalizer = normalizers.BertNormalizer()
    bert.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    gpt = Tokenizer.from_str(plain.to_str())
    gpt.normalizer = normalizers.NFC()
    steps = [pre_tokenizers.Digits(), pre_tokenizers.Punctuation(), pre_tokenizers.ByteLevel()]
    gpt.pre_tokenizer = pre_tokenizers.Sequence(steps)
    gpt.decoder = decoders.ByteLevel()
    own = {"sentencepiece": sentencepiece_tokenizer(strips_space=True), "wordpiece": wordpiece_tokenizer()}
    return {"t5": t5, "bert": bert, "gpt": gpt, "plain": plain, **own}


@pytest.mark.parametrize("name", published())
def test_steps_of_published_tokenizers_are_allowed(name: str) -> None:
    check_steps(published()[name].to_str().encode())


def test_charsmap_of_sentencepiece_is_allowed() -> None:
    check_steps(json.dumps({"normalizer": sequence(charsmap("صلى الله عليه وسلم"), replacing(" ", "▁"))}).encode())


def test_vocabularies_beyond_any_that_is_known_are_refused() -> None:
    check_vocabulary_sizes({"a": MAX_TOKENS - 1, "b" * MAX_TOKEN_CHARACTERS: 0}, MAX_TOKENS)
    for vocabulary, size in [({"a": MAX_TOKENS}, 1), ({"b" * (MAX_TOKEN_CHARACTERS + 1): 0}, 1), ({}, MAX_TOKENS + 1)]:
        with pytest.raises(TokenizerBoundsError):
            check_vocabulary_sizes(vocabulary, size)


def test_model_that_claims_two_thousand_million_tokens_is_refused(demo_directory: ModelDirectory) -> None:
    with pytest.raises(ConfigError, match="at most 4194304 are read"):
        ModelTokenizer(replace(demo_directory, vocab_size=2**31 - 1))


SLOW_PATTERN = {"type": "Split", "pattern": {"Regex": "(a|aa)+$"}, "behavior": "Isolated", "invert": False}
NO_UNKNOWN = {"type": "WordLevel", "vocab": {"x": 0}, "unk_token": "[UNK]"}


def test_text_on_which_the_library_panics_is_an_error_of_that_text(copied: CopiedModel) -> None:
    """A panic is no `Exception`: a request with such a text would end its worker, and then the next one."""
    copied.change("tokenizer.json", pre_tokenizer=SLOW_PATTERN)
    tokenizer = copied.tokenizer()
    with pytest.raises(TokenizerError, match="retry-limit-in-match"):
        tokenizer.encode_text("a" * 60 + "b")
    assert tokenizer.encode_text("aa")


def test_text_that_the_library_refuses_is_an_error_of_ours(copied: CopiedModel) -> None:
    copied.change("tokenizer.json", model=NO_UNKNOWN)
    with pytest.raises(TokenizerError, match="Missing"):
        copied.tokenizer().encode_text("y")


def test_tokenizer_on_which_the_library_panics_is_refused(copied: CopiedModel) -> None:
    copied.change("tokenizer.json", normalizer={"type": "Precompiled", "precompiled_charsmap": "AAAA"})
    with pytest.raises(ConfigError, match=r"is not usable: .*precompiled_charsmap"):
        copied.tokenizer()


def test_vocabulary_on_which_the_library_of_grammars_panics_is_not_supported(demo_directory: ModelDirectory) -> None:
    with pytest.raises(UnsupportedTokenizerError, match="assertion failed"):
        GrammarTokenizer(
            TokenizerSource((demo_directory.path / "tokenizer.json").read_text(), 1 << 21, 4096, frozenset({0}))
        )


TEMPLATE = "{% for message in messages %}{{ message['content'] }}<|turn|>{% endfor %}"
MakeModel = Callable[..., ModelDirectory]


@pytest.fixture
def make_model(demo_directory: ModelDirectory, tmp_path: Path) -> MakeModel:
    """Makes a model whose tokenizer has one token more than the model, `<|turn|>`."""

    def make(change: Callable[[Tokenizer], Any] = lambda _: None, **fields: Any) -> ModelDirectory:
        tokenizer = Tokenizer.from_buffer(demo_directory.read_tokenizer())
        tokenizer.add_special_tokens([AddedToken("<|turn|>", special=True)])
        change(tokenizer)
        tokenizer.save(str(tmp_path / "tokenizer.json"))
        return dataclasses.replace(demo_directory, path=tmp_path, **fields)

    return make


def check(directory: ModelDirectory) -> None:
    check_vocabulary(ModelTokenizer(directory), directory)


def test_tokenizer_that_fits_says_nothing(demo_directory: ModelDirectory, caplog: pytest.LogCaptureFixture) -> None:
    check(demo_directory)
    assert not caplog.records


def test_token_that_the_model_does_not_have_is_warned_about_once(
    make_model: MakeModel, caplog: pytest.LogCaptureFixture
) -> None:
    directory = make_model()
    with caplog.at_level(logging.WARNING):
        check(directory)
    (record,) = caplog.records
    size = directory.vocab_size
    assert f"1 tokens that the model does not have, which knows the ids 0 to {size - 1}: '<|turn|>' ({size})" in (
        record.getMessage()
    )


def add_turn(tokenizer: Tokenizer) -> None:
    """Put the token before every text."""
    turn = ("<|turn|>", tokenizer.token_to_id("<|turn|>"))
    tokenizer.post_processor = processors.TemplateProcessing("<|turn|> $A", special_tokens=[turn])


@pytest.mark.parametrize(
    ("change", "config", "what"),
    [
        (add_turn, {"chat_template": "{{ messages[0]['content'] }}"}, "the tokenizer adds to every text"),
        (lambda _: None, {"chat_template": TEMPLATE}, "the chat template adds to every conversation"),
    ],
)
def test_token_that_only_texts_or_only_conversations_need_is_warned_about(
    make_model: MakeModel, caplog: pytest.LogCaptureFixture, change: Any, config: dict[str, str], what: str
) -> None:
    directory = make_model(change, tokenizer_config=config)
    check(directory)
    assert f"lacks the token {directory.vocab_size}, which {what}; such prompts are refused" in caplog.messages[0]


@pytest.mark.parametrize(
    ("config", "told"), [({"chat_template": TEMPLATE}, r" and the token \d+, which the chat template"), ({}, ";")]
)
def test_token_that_every_prompt_needs_is_refused(make_model: MakeModel, config: dict[str, str], told: str) -> None:
    with pytest.raises(ConfigError, match=f"adds to every text{told}"):
        check(make_model(add_turn, tokenizer_config=config))


def test_tokenizer_with_a_larger_vocabulary_is_another_models(demo_directory: ModelDirectory) -> None:
    size = demo_directory.vocab_size
    with pytest.raises(ConfigError, match=rf"vocabulary has {size} ids and the model {size - 1};"):
        check(dataclasses.replace(demo_directory, vocab_size=size - 1))


@pytest.mark.parametrize("config", [{"chat_template": "{{ raise_exception('no') }}"}, {}])
def test_template_that_refuses_the_shortest_conversation_or_is_missing_is_no_defect(
    make_model: MakeModel, config: dict[str, str]
) -> None:
    check(make_model(tokenizer_config=config))
