from __future__ import annotations

import inspect
import json
from typing import Any

import pytest
import transformers
from transformers.models.auto import tokenization_auto as auto

from gpu_worker.text.tokenizer_classes import DEFAULTS, MISNAMED, REGISTERED, default_tokens
from tests.gpu_worker.text.conftest import CopiedModel


@pytest.mark.parametrize("name", DEFAULTS)
def test_tokens_are_those_of_the_class(name: str) -> None:
    parameters = inspect.signature(getattr(transformers, name).__init__).parameters
    given = {key: str(each.default) for key, each in parameters.items() if isinstance(each.default, str)}
    assert DEFAULTS[name] == {key: text for key, text in given.items() if key.endswith("_token")}


def test_kinds_have_the_classes_of_transformers() -> None:
    names = {kind: str(auto.TOKENIZER_MAPPING_NAMES.get(kind)).removesuffix("Fast") for kind in REGISTERED}
    assert names == dict(REGISTERED)
    wrong = auto.MODELS_WITH_INCORRECT_HUB_TOKENIZER_CLASS & REGISTERED.keys()
    assert {kind for kind in wrong if REGISTERED[kind] in DEFAULTS} == MISNAMED


@pytest.mark.parametrize(
    ("model_type", "named"),
    [
        ("llama", "LlamaTokenizer"),
        ("llama", "GPT2TokenizerFast"),
        ("llama", "PreTrainedTokenizerFast"),
        ("llama", None),
        ("mistral", "LlamaTokenizerFast"),
        ("mistral", "Qwen2Tokenizer"),
        ("qwen2", "PreTrainedTokenizerFast"),
        ("qwen2", None),
        ("qwen3", "Qwen2Tokenizer"),
        ("qwen3", "PreTrainedTokenizerFast"),
        ("qwen3", "GPT2Tokenizer"),
        ("qwen3", "OwnTokenizer"),
        ("olmoe", None),
        ("phi", "CodeGenTokenizer"),
    ],
)
def test_class_is_chosen_as_transformers_does(copied: CopiedModel, model_type: str, named: str | None) -> None:
    copied.change("config.json", model_type=model_type)
    settings: dict[str, Any] = {} if named is None else {"tokenizer_class": named}
    (copied.path / "tokenizer_config.json").write_text(json.dumps(settings))
    expected = transformers.AutoTokenizer.from_pretrained(copied.path).special_tokens_map
    assert default_tokens(model_type, named, is_byte_level=True) == expected
