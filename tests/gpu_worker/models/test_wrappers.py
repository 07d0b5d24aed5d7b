"""Layouts of models that also see or hear, as tools and publishers write them, and those that are refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from gpu_worker.models.errors import CheckpointError
from gpu_worker.models.loader import load_model
from gpu_worker.models.registry import read_model_config
from gpu_worker.text.model_directory import read_model_directory
from tests.gpu_worker.models.families.oracle_checks import assert_answers_are_greedy, assert_logits_equal
from tests.gpu_worker.models.pairs import CPU
from tests.gpu_worker.models.wrapper_cases import WRAPPER_CASES, oracle_of, save_wrapper

TEXT, HEAD = "language_model.model.", "language_model.lm_head."


def rename(directory: Path, new_name: Callable[[str], str]) -> None:
    path = directory / "model.safetensors"
    save_file({new_name(name): tensor for name, tensor in load_file(path).items()}, path)


def rewrite(directory: Path, change: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    path = directory / "config.json"
    path.write_text(json.dumps(change(json.loads(path.read_text()))))


@pytest.mark.slow
@pytest.mark.parametrize(
    "text", ["model.language_model.", "language_model.model.", "model.text_model.", "text_model.", "model."]
)
def test_every_layout_of_a_text_part_is_read(tmp_path: Path, text: str) -> None:
    oracle = save_wrapper(WRAPPER_CASES["llava-llama"], tmp_path)
    rename(tmp_path, lambda name: name.replace(TEXT, text).replace(HEAD, "lm_head."))
    assert_logits_equal(load_model(tmp_path, torch.float32, CPU), oracle)


@pytest.mark.slow
@pytest.mark.parametrize("name", WRAPPER_CASES)
def test_answers_are_greedy_with_hits_chunks_and_preemptions(tmp_path: Path, name: str) -> None:
    oracle = oracle_of(WRAPPER_CASES[name], save_wrapper(WRAPPER_CASES[name], tmp_path))
    assert_answers_are_greedy(tmp_path, oracle)


@pytest.mark.slow
@pytest.mark.parametrize("case", ["internvl-qwen2", "internvl-qwen3"])
def test_internvl_is_read_as_it_was_published_with_code(tmp_path: Path, case: str) -> None:
    oracle = save_wrapper(WRAPPER_CASES[case], tmp_path)
    rewrite(tmp_path, lambda config: {"architectures": ["InternVLChatModel"], "llm_config": config["text_config"]})
    rename(
        tmp_path, lambda name: name.replace("vision_tower.", "vision_model.").replace("multi_modal_projector", "mlp1")
    )
    assert_logits_equal(load_model(tmp_path, torch.float32, CPU), oracle)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "name"),
    [("qwen2.5-omni-thinker", "Qwen2_5OmniModel"), ("qwen3-omni-thinker", "Qwen3OmniMoeForConditionalGeneration")],
)
def test_a_model_that_speaks_is_served_by_its_thinker(tmp_path: Path, case: str, name: str) -> None:
    oracle = save_wrapper(WRAPPER_CASES[case], tmp_path)
    rewrite(tmp_path, lambda config: {"architectures": [name], "thinker_config": config})
    rename(tmp_path, lambda name: f"thinker.{name}")
    path = tmp_path / "model.safetensors"
    save_file(load_file(path) | {"talker.model.embed_tokens.weight": torch.zeros(3, 4)}, path)
    assert_logits_equal(load_model(tmp_path, torch.float32, CPU), oracle)
    (tmp_path / "tokenizer.json").write_text("{}")
    assert read_model_directory(tmp_path).vocab_size == 97


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "name"),
    [
        # Tools that leave the tower out do not always write the text part's own configuration.
        ("gemma3", "Gemma3ForCausalLM"),
        ("qwen3-vl", "Qwen3ForCausalLM"),
        # As it was published with code.
        ("kimi-k2.5", "KimiVLForConditionalGeneration"),
    ],
)
def test_a_model_of_another_name_is_read_from_the_configuration_of_the_whole(
    tmp_path: Path, case: str, name: str
) -> None:
    oracle = save_wrapper(WRAPPER_CASES[case], tmp_path)
    rewrite(tmp_path, lambda config: config | {"architectures": [name]})
    assert_logits_equal(load_model(tmp_path, torch.float32, CPU), oracle)


def test_layers_without_a_head_make_vectors(tmp_path: Path) -> None:
    save_wrapper(WRAPPER_CASES["llava-llama"], tmp_path)
    rewrite(tmp_path, lambda config: config | {"architectures": ["LlavaModel"]})
    assert read_model_config(tmp_path).tie_word_embeddings


@pytest.mark.parametrize("tied", [None, True, False])
def test_whether_the_head_is_the_embedding_is_what_the_files_hold(tmp_path: Path, tied: bool | None) -> None:
    """Some configurations say it outside of the text part, some inside, some nowhere, and some are wrong."""
    for case, is_tied in (("llava-llama", False), ("smolvlm", True)):
        save_wrapper(WRAPPER_CASES[case], tmp_path)
        rewrite(tmp_path, lambda config: config | {"tie_word_embeddings": tied})
        assert read_model_config(tmp_path).tie_word_embeddings is is_tied


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"architectures": ["PaliGemmaForConditionalGeneration"]}, "its prompts attend in both directions; Gemma 3 is"),
        ({"architectures": ["MllamaForConditionalGeneration"]}, "not supported; Llama 3.1, .* is"),
        ({"architectures": ["Gemma3nForConditionalGeneration"]}, "not supported; Gemma 4 E2B"),
        (
            {"architectures": ["NewVLForConditionalGeneration"], "text_config": {"model_type": "qwen3"}},
            "around a text part that is 'qwen3', which is served: take the checkpoint of text",
        ),
        (
            {"architectures": ["NewVLForConditionalGeneration"], "text_config": {"model_type": "rwkv"}},
            "around a text part that is 'rwkv', which is not served",
        ),
        ({"architectures": ["NewVLModel"], "text_config": {"hidden_size": 8}}, "a text part that is not named"),
        (
            {"architectures": ["LlavaForConditionalGeneration"], "text_config": {"model_type": "rwkv"}},
            r"field 'text_config.model_type' is 'rwkv'; supported: 'cohere2', .*'llama'",
        ),
    ],
)
def test_what_is_not_served_is_refused_with_what_would_help(
    tmp_path: Path, fields: dict[str, Any], problem: str
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(fields))
    with pytest.raises(CheckpointError, match=problem):
        read_model_config(tmp_path)
