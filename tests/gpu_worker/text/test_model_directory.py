"""Sizes of a model, whatever its family calls them, its special tokens and its advice for sampling."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from gpu_worker.text.model_directory import read_model_directory, read_sampling_defaults
from shared.errors import ConfigError
from shared.sampling import SamplingDefaults
from tests.gpu_worker.text.conftest import CopiedModel

GPT2 = {"architectures": ["GPT2LMHeadModel"], "vocab_size": 9, "n_embd": 8, "n_head": 2, "n_layer": 1}
MAMBA2 = {
    "architectures": ["Mamba2ForCausalLM"],
    "vocab_size": 9,
    "hidden_size": 8,
    "num_hidden_layers": 1,
    "num_heads": 4,
    "head_dim": 4,
    "n_groups": 2,
    "state_size": 4,
}
LLAMA = {"architectures": ["LlamaForCausalLM"], "vocab_size": 9, "hidden_size": 8, "max_position_embeddings": 0}
COMPLETE = {**LLAMA, "num_attention_heads": 2, "num_hidden_layers": 1, "intermediate_size": 8}


def write(folder: Path, config: dict[str, Any]) -> Path:
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_text("{}")
    return folder


@pytest.mark.parametrize(("config", "length"), [({**GPT2, "n_positions": 33}, 33), (GPT2, 1024), (MAMBA2, 8192)])
def test_sizes_that_the_family_names_otherwise_are_its_descriptions(
    tmp_path: Path, config: dict[str, Any], length: int
) -> None:
    model = read_model_directory(write(tmp_path, config))
    assert (model.vocab_size, model.hidden_size, model.max_model_len) == (9, 8, length)


def test_infinity_of_published_configurations_is_read(tmp_path: Path) -> None:
    """Python writes it bare, and most files of models with Mamba-2 have it."""
    write(tmp_path, {**LLAMA, "max_position_embeddings": 9, "time_step_limit": [0.0, float("inf")]})
    assert "Infinity" in (tmp_path / "config.json").read_text()
    assert read_model_directory(tmp_path).max_model_len == 9


def test_size_that_is_not_usable_is_refused_by_its_field(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^HEADRACE_MODEL: .* field 'max_position_embeddings' is 0; it must be"):
        read_model_directory(write(tmp_path, COMPLETE))


@pytest.mark.parametrize(("ends", "kept", "told"), [([1, 9], {1}, "ignored"), (9, set(), "no other ends an")])
def test_special_tokens_beyond_the_vocabulary_are_ignored_and_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, ends: Any, kept: set[int], told: str
) -> None:
    config = {**COMPLETE, "max_position_embeddings": 33, "eos_token_id": ends, "bos_token_id": 12}
    model = read_model_directory(write(tmp_path, config))
    assert (model.eos_token_ids, model.bos_token_id) == (kept, None)
    (message,) = caplog.messages
    assert "the special tokens 9, 12, but the model has the ids 0 to 8 only" in message
    assert told in message


@pytest.mark.parametrize(("outer", "expected"), [({"eos_token_id": [1, 6]}, {1, 6}), ({}, {1})])
def test_tokens_that_end_a_text_are_said_outside_of_the_text_part(
    tmp_path: Path, outer: dict[str, Any], expected: set[int]
) -> None:
    text = {"vocab_size": 9, "hidden_size": 8, "max_position_embeddings": 33, "eos_token_id": 1}
    model = read_model_directory(write(tmp_path, {"text_config": text, **outer}))
    assert model.eos_token_ids == expected


@pytest.mark.parametrize(
    ("file", "content", "problem"),
    [
        ("generation_config.json", "[" * 50_000, "generation_config.json is not usable"),
        ("generation_config.json", '{"eos_token_id": [[1]]}', "eos_token_id of .* is .*; it must be a token id"),
        ("generation_config.json", '{"eos_token_id": "</s>"}', "eos_token_id of .*; it must be a token id"),
        ("generation_config.json", '{"bos_token_id": -1}', "bos_token_id of .*; it must be a token id"),
        ("tokenizer_config.json", '{"a": "\xff"}', "tokenizer_config.json is not usable"),
        ("config.json", '{"text_config": ["a"]}', "text_config in .* is not an object"),
        ("config.json", json.dumps({**COMPLETE, "max_position_embeddings": 9, "vocab_size": 10**30}), "vocab_size"),
    ],
)
def test_hostile_file_is_refused_by_its_name(tmp_path: Path, file: str, content: str, problem: str) -> None:
    write(tmp_path, {**LLAMA, "max_position_embeddings": 9})
    (tmp_path / file).write_bytes(content.encode("latin-1"))
    with pytest.raises(ConfigError, match=problem):
        read_model_directory(tmp_path)


def test_sampling_that_a_model_advises_is_read(copied: CopiedModel) -> None:
    advised = {"eos_token_id": 0, "do_sample": True, "temperature": 1, "top_k": 20, "top_p": 0.8}
    (copied.path / "generation_config.json").write_text(json.dumps(advised))
    expected = SamplingDefaults(temperature=1.0, top_k=20, top_p=0.8)
    assert copied.read().sampling_defaults == expected
    (copied.path / "generation_config.json").unlink()
    assert copied.read().sampling_defaults is None


def test_advised_value_that_no_request_could_have_is_left_out_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        found = read_sampling_defaults({"temperature": 3.5, "top_p": "much", "min_p": float("nan"), "top_k": None})
    assert found is None
    assert [record.getMessage().split()[1] for record in caplog.records] == ["temperature", "top_p", "min_p"]
    assert read_sampling_defaults({"temperature": 3.5, "top_k": 50}) == SamplingDefaults(top_k=50)
