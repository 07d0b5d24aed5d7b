"""Layouts of models that also see or hear, as tools and publishers write them, and those that are refused.

Models with a vision tower, served for text: against the text part of `transformers`' own model.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from gpu_worker.models.config import ModelConfig
from gpu_worker.models.json_file import CheckpointError, JsonFile
from gpu_worker.models.loader import load_model, open_weights, weights_bytes
from gpu_worker.models.registry import FAMILIES, read_model_config
from gpu_worker.models.text_part import TEXT_KINDS, WRAPPERS, Wrapper, text_part
from gpu_worker.text.model_directory import read_model_directory
from tests.gpu_worker.models.families.oracle_checks import assert_logits_equal
from tests.gpu_worker.models.pairs import CPU
from tests.gpu_worker.models.wrapper_cases import WRAPPER_CASES, oracle_of, save_wrapper
from tests.gpu_worker.quantization.checkpoints import logits_of

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


# The others differ from these in their tables alone.
FAST = ("gemma3", "gemma4", "llama4", "mistral3", "llava-llama", "smolvlm")


def all_cases() -> list[Any]:
    return [name if name in FAST else pytest.param(name, marks=pytest.mark.slow) for name in WRAPPER_CASES]


@pytest.mark.parametrize("name", all_cases())
def test_text_is_served_without_the_tower(tmp_path: Path, name: str, caplog: pytest.LogCaptureFixture) -> None:
    oracle = oracle_of(WRAPPER_CASES[name], save_wrapper(WRAPPER_CASES[name], tmp_path))
    with caplog.at_level(logging.INFO, "gpu_worker"):
        model = load_model(tmp_path, torch.float32, CPU)
    assert_logits_equal(model, oracle)
    messages = [record.message for record in caplog.records if "not loaded" in record.message]
    assert len(messages) == 1


@pytest.mark.slow
def test_experts_of_published_checkpoints_are_transposed(tmp_path: Path) -> None:
    oracle = save_wrapper(WRAPPER_CASES["qwen3-vl-moe"], tmp_path)
    path = tmp_path / "model.safetensors"
    tensors = {
        name: tensor.transpose(1, 2).contiguous() if ".experts." in name else tensor
        for name, tensor in load_file(path).items()
    }
    save_file(tensors, path)
    assert_logits_equal(load_model(tmp_path, torch.float32, CPU), oracle)


def test_weights_of_the_tower_take_no_memory(tmp_path: Path) -> None:
    oracle = save_wrapper(WRAPPER_CASES["gemma3"], tmp_path)
    config = read_model_config(tmp_path)
    expected = sum(parameter.nbytes for parameter in oracle.model.language_model.parameters())
    names = config.block.names
    assert weights_bytes(tmp_path, torch.float32, CPU, is_tied=True, names=names) == expected
    with open_weights(tmp_path, torch.float32, CPU, names=names) as weights:
        assert weights.has("model.layers.0.self_attn.q_proj.weight")
        assert not weights.has("model.vision_tower.vision_model.embeddings.patch_embedding.weight")


ROOT = "language_model.model.layers"
IGNORES = {
    "by name": ["language_model.lm_head", *(f"{ROOT}.{i}.self_attn.o_proj" for i in range(2))],
    "by a pattern of the whole name": ["re:.*lm_head", r"re:^language_model\.model\.layers\.\d+\.self_attn\.o_proj$"],
}


@pytest.mark.parametrize("ignored", IGNORES)
def test_layers_are_left_alone_by_the_names_that_the_checkpoint_has(tmp_path: Path, ignored: str) -> None:
    """Tools for compressed-tensors name modules as the whole model does, `language_model` included."""
    save_wrapper(WRAPPER_CASES["mistral3"], tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    for name in [name for name in tensors if name.startswith(ROOT) and name.endswith("proj.weight")]:
        if "o_proj" not in name:
            tensors[name] = tensors[name].mul(16).round().clamp(-127, 127) / 16
    save_file(tensors, tmp_path / "model.safetensors")
    expected = logits_of(load_model(tmp_path, torch.float32, CPU))
    _store_as_int8(tmp_path, tensors, IGNORES[ignored])
    torch.testing.assert_close(logits_of(load_model(tmp_path, torch.float32, CPU)), expected, atol=1e-4, rtol=0)


def _store_as_int8(directory: Path, tensors: dict[str, torch.Tensor], ignored: list[str]) -> None:
    """Store tensors of multiples of 1/16 as int8, except output projections."""
    for name in [name for name in tensors if name.startswith(ROOT) and name.endswith("proj.weight")]:
        if "o_proj" not in name:
            tensors[name.replace(".weight", ".weight_scale")] = torch.full((len(tensors[name]), 1), 1 / 16)
            tensors[name] = (tensors[name] * 16).to(torch.int8)
    save_file(tensors, directory / "model.safetensors")
    weights = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel"}
    config = json.loads((directory / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "compressed-tensors",
        "format": "int-quantized",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": None}},
        "ignore": ignored,
    }
    (directory / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize("kind", TEXT_KINDS)
def test_an_empty_text_part_means_the_defaults_of_its_class(kind: str) -> None:
    """`transformers` leaves out the defaults of its class: Gemma 3 4B does not say how many heads it has."""
    import transformers

    text = transformers.AutoConfig.for_model(kind).to_dict() | {"bos_token_id": None, "eos_token_id": None}
    if kind == "hyperclovax":
        # Follows from the heads, in our reader too.
        text |= {"attention_multiplier": None}

    def read(part: dict[str, Any]) -> ModelConfig:
        fields = {"tie_word_embeddings": True, "text_config": json.loads(json.dumps(part))}
        text, found = text_part(JsonFile(Path("config.json"), fields), Wrapper(kind))
        return FAMILIES[found.architecture](text)

    assert repr(read({"model_type": kind})) == repr(read(text))


def test_each_wrapper_has_a_kind_that_is_served() -> None:
    assert {wrapper.kind for wrapper in WRAPPERS.values()} <= set(TEXT_KINDS)
    assert {kind.architecture for kind in TEXT_KINDS.values()} <= set(FAMILIES)


@pytest.mark.parametrize("name", ["num_experts", "num_local_experts"])
def test_the_number_of_experts_is_said_by_either_of_its_names(tmp_path: Path, name: str) -> None:
    fields = {"architectures": ["Qwen3VLMoeForConditionalGeneration"], "text_config": {name: 7}}
    (tmp_path / "config.json").write_text(json.dumps(fields))
    config = read_model_config(tmp_path)
    assert {layer.mixture.num_experts for layer in config.layers if layer.mixture is not None} == {7}
