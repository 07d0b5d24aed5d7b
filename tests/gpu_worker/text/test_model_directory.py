"""Sizes of a model, whatever its family calls them, its special tokens and its advice for sampling.

The matrices behind a pooling: what they compute against torch, and which files are refused.
"""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from gpu_worker.text.model_directory import read_model_directory, read_sampling_defaults
from gpu_worker.text.sentence_modules import DenseModule, read_dense
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


def save(folder: Path, activation: str | None = None, **tensors: torch.Tensor) -> None:
    fields: dict[str, Any] = {} if activation is None else {"activation_function": f"torch.nn.modules.{activation}"}
    (folder / "config.json").write_text(json.dumps(fields))
    save_file({f"linear.{name}": tensor for name, tensor in tensors.items()}, folder / "model.safetensors")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("activation", "function"), [(None, torch.tanh), ("linear.Identity", lambda out: out)])
def test_a_module_computes_what_a_layer_of_torch_does(
    tmp_path: Path, dtype: torch.dtype, activation: str | None, function: Any
) -> None:
    weight, bias, values = torch.randn(5, 3).to(dtype), torch.randn(5).to(dtype), torch.randn(3)
    save(tmp_path, activation, weight=weight, bias=bias)
    module = read_dense(tmp_path, 3)
    assert isinstance(module, DenseModule)
    expected = function(torch.nn.functional.linear(values, weight.float(), bias.float())).numpy()
    np.testing.assert_allclose(module(values.double().numpy()), expected, atol=1e-6, rtol=0)


def test_what_is_not_served_says_why(tmp_path: Path) -> None:
    (tmp_path / "2_Dense").mkdir()
    assert "2_Dense has no model.safetensors" in str(read_dense(tmp_path / "2_Dense", 3))
    save(tmp_path, "activation.GELU", weight=torch.zeros(2, 3))
    assert "ends with GELU; served are Identity and Tanh" in str(read_dense(tmp_path, 3))


@pytest.mark.parametrize(
    ("tensors", "problem"),
    [
        ({"weight": torch.zeros(2, 4)}, r"is of shape \[2, 4\]; it must take 3 numbers"),
        ({"bias": torch.zeros(2)}, "is missing; it must take 3 numbers"),
        ({"weight": torch.zeros(2, 3), "bias": torch.zeros(3)}, r"linear.bias in .* is of shape \[3\]"),
        ({"weight": torch.zeros(2, 3, dtype=torch.int8)}, "is not usable"),
    ],
)
def test_a_file_that_does_not_fit_is_refused(tmp_path: Path, tensors: dict[str, torch.Tensor], problem: str) -> None:
    save(tmp_path, **tensors)
    with pytest.raises(ConfigError, match=problem):
        read_dense(tmp_path, 3)


@pytest.mark.parametrize("content", [b"", b"\xff" * 8, b"\x02" + b"\0" * 7 + b"[]"])
def test_a_file_that_is_none_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(ConfigError, match="is not usable"):
        read_dense(tmp_path, 3)
