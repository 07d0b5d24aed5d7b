from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, processors

from gpu_worker.text.model_directory import ModelDirectory
from gpu_worker.text.tokenizer import ModelTokenizer
from gpu_worker.text.vocabulary_check import check_vocabulary
from shared.errors import ConfigError

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
