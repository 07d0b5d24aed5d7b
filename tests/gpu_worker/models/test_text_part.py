"""Models with a vision tower, served for text: against the text part of `transformers`' own model."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from gpu_worker.models.config import ModelConfig
from gpu_worker.models.errors import CheckpointError
from gpu_worker.models.json_file import JsonFile
from gpu_worker.models.loader import load_model
from gpu_worker.models.registry import FAMILIES, read_model_config
from gpu_worker.models.stored_weights import open_weights
from gpu_worker.models.weights_size import weights_bytes
from tests.gpu_worker.models.families.oracle_checks import assert_logits_equal
from tests.gpu_worker.models.families.random_models import SIZES
from tests.gpu_worker.models.pairs import CPU
from tests.gpu_worker.models.variants import randomize
from tests.gpu_worker.quantization.checkpoints import logits_of

_VISION = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}


def save(family: str, directory: Path, text: dict[str, Any], **options: Any) -> Any:
    """Save a model that sees, and return its text part with the head."""
    import transformers

    config_class = getattr(transformers, f"{family}Config")
    config = config_class(text_config={**SIZES, **text}, **{"vision_config": _VISION, **options})
    torch.manual_seed(1)
    model = getattr(transformers, f"{family}ForConditionalGeneration")._from_config(config, attn_implementation="eager")
    whole = getattr(model, "language_model", model)
    text_model = whole.model if whole is not model else model.model.language_model
    with torch.no_grad():
        randomize(text_model.eval())
        whole.lm_head.weight.normal_(0, 0.3)
    model.save_pretrained(directory)
    return whole


MODELS: dict[str, dict[str, Any]] = {
    "Gemma3": {"text": {"head_dim": 20, "sliding_window": 9}, "mm_tokens_per_image": 4, "image_token_index": 96},
    "Gemma4": {
        "text": {
            "head_dim": 20,
            "global_head_dim": 28,
            "sliding_window": 9,
            "num_hidden_layers": 4,
            "num_kv_shared_layers": 2,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "hidden_size_per_layer_input": 10,
            "vocab_size_per_layer_input": 97,
            "pad_token_id": 0,
        },
    },
    "Llama4": {
        "text": {
            "head_dim": 12,
            "intermediate_size_mlp": 56,
            "num_local_experts": 3,
            "interleave_moe_layer_step": 2,
            "attention_chunk_size": 11,
        },
    },
    "Mistral3": {
        "text": {"model_type": "mistral", "head_dim": 12, "sliding_window": None},
        "image_token_index": 96,
    },
}


_MROPE = {"rope_type": "default", "rope_theta": 500.0, "mrope_section": [1, 3, 2]}
_DEEP = {"vision_config": {"hidden_size": 16, "depth": 1, "num_heads": 2, "out_hidden_size": 48}}
SLOW_MODELS: dict[str, dict[str, Any]] = {
    "Qwen2_5_VL": {"text": {"rope_parameters": {**_MROPE, "rope_type": "mrope"}}, **_DEEP},
    "Qwen3VL": {"text": {"head_dim": 12, "rope_parameters": {**_MROPE, "mrope_interleaved": True}}, **_DEEP},
    "Exaone4_5_": {
        "text": {"model_type": "exaone4", "head_dim": 12, "num_hidden_layers": 4, "sliding_window": 9},
        **_DEEP,
    },
    "Lfm2Vl": {
        "text": {"layer_types": ["conv", "full_attention"], "block_multiple_of": 8},
        "projector_hidden_size": 24,
    },
    "Kimi_K25": {
        "text": {
            "num_key_value_heads": 4,
            "kv_lora_rank": 24,
            "q_lora_rank": 20,
            "qk_nope_head_dim": 12,
            "qk_rope_head_dim": 8,
            "v_head_dim": 20,
            "n_routed_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 24,
            "first_k_dense_replace": 1,
            "n_group": 1,
            "topk_group": 1,
        },
        "vision_config": {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2},
        "tie_word_embeddings": False,
    },
    "Qwen3VLMoe": {
        "text": {
            "head_dim": 12,
            "rope_parameters": _MROPE,
            "num_experts": 5,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 20,
            "norm_topk_prob": True,
        },
        **_DEEP,
    },
}


@pytest.mark.parametrize("family", [*MODELS, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW_MODELS)])
def test_text_is_served_without_the_tower(tmp_path: Path, family: str, caplog: pytest.LogCaptureFixture) -> None:
    oracle = save(family, tmp_path, **{**MODELS, **SLOW_MODELS}[family])
    with caplog.at_level(logging.INFO, "gpu_worker"):
        model = load_model(tmp_path, torch.float32, CPU)
    assert_logits_equal(model, oracle)
    messages = [record.message for record in caplog.records if "not loaded" in record.message]
    assert len(messages) == 1


@pytest.mark.slow
def test_experts_of_published_checkpoints_are_transposed(tmp_path: Path) -> None:
    oracle = save("Qwen3VLMoe", tmp_path, **SLOW_MODELS["Qwen3VLMoe"])
    path = tmp_path / "model.safetensors"
    tensors = {
        name: tensor.transpose(1, 2).contiguous() if ".experts." in name else tensor
        for name, tensor in load_file(path).items()
    }
    save_file(tensors, path)
    assert_logits_equal(load_model(tmp_path, torch.float32, CPU), oracle)


def test_weights_of_the_tower_take_no_memory(tmp_path: Path) -> None:
    oracle = save("Gemma3", tmp_path, **MODELS["Gemma3"])
    config = read_model_config(tmp_path)
    expected = sum(parameter.nbytes for parameter in oracle.model.language_model.parameters())
    names = config.block.names
    assert weights_bytes(tmp_path, torch.float32, CPU, is_tied=True, names=names) == expected
    with open_weights(tmp_path, torch.float32, CPU, names=names) as weights:
        assert weights.has("model.layers.0.self_attn.q_proj.weight")
        assert not weights.has("model.vision_tower.vision_model.embeddings.patch_embedding.weight")


def test_another_text_part_is_refused_by_name(tmp_path: Path) -> None:
    fields = {"architectures": ["Mistral3ForConditionalGeneration"], "text_config": {"model_type": "pixels"}}
    (tmp_path / "config.json").write_text(json.dumps(fields))
    with pytest.raises(CheckpointError, match=r"'pixels'; supported: 'mistral', 'ministral3', 'mistral4'"):
        read_model_config(tmp_path)


ROOT = "language_model.model.layers"
IGNORES = {
    "by name": ["language_model.lm_head", *(f"{ROOT}.{i}.self_attn.o_proj" for i in range(2))],
    "by a pattern of the whole name": ["re:.*lm_head", r"re:^language_model\.model\.layers\.\d+\.self_attn\.o_proj$"],
}


@pytest.mark.parametrize("ignored", IGNORES)
def test_layers_are_left_alone_by_the_names_that_the_checkpoint_has(tmp_path: Path, ignored: str) -> None:
    """Tools for compressed-tensors name modules as the whole model does, `language_model` included."""
    save("Mistral3", tmp_path, **MODELS["Mistral3"])
    tensors = load_file(tmp_path / "model.safetensors")
    for name in [name for name in tensors if name.startswith(ROOT) and name.endswith("proj.weight")]:
        if "o_proj" not in name:
            tensors[name] = tensors[name].mul(16).round().clamp(-127, 127) / 16
    save_file(tensors, tmp_path / "model.safetensors")
    expected = logits_of(load_model(tmp_path, torch.float32, CPU))
    _store_as_int8(tmp_path, tensors, IGNORES[ignored])
    torch.testing.assert_close(logits_of(load_model(tmp_path, torch.float32, CPU)), expected, atol=1e-4, rtol=0)


def _store_as_int8(directory: Path, tensors: dict[str, torch.Tensor], ignored: list[str]) -> None:
    """Store what is a sixteenth of a whole number as that, all but output projections."""
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


SEEING = {
    "Exaone4_5_ForConditionalGeneration": "exaone4",
    "Lfm2VlForConditionalGeneration": "lfm2",
    "KimiK25ForConditionalGeneration": "deepseek_v3",
    "Kimi_K25ForConditionalGeneration": "deepseek_v3",
    "Gemma3ForConditionalGeneration": "gemma3_text",
    "Gemma4ForConditionalGeneration": "gemma4_text",
    "Llama4ForConditionalGeneration": "llama4_text",
    "Mistral3ForConditionalGeneration": "mistral",
    "Qwen2VLForConditionalGeneration": "qwen2_vl_text",
    "Qwen2_5_VLForConditionalGeneration": "qwen2_5_vl_text",
    "Qwen3VLForConditionalGeneration": "qwen3_vl_text",
    "Qwen3VLMoeForConditionalGeneration": "qwen3_vl_moe_text",
    "Qwen3_5ForConditionalGeneration": "qwen3_5_text",
    "Qwen3_5MoeForConditionalGeneration": "qwen3_5_moe_text",
}


def test_each_family_that_sees_is_compared_below() -> None:
    assert set(SEEING) == {name for name in FAMILIES if name.endswith("ForConditionalGeneration")}


@pytest.mark.parametrize(("architecture", "kind"), SEEING.items())
def test_an_empty_text_part_means_the_defaults_of_its_class(architecture: str, kind: str) -> None:
    """`transformers` leaves out what is its class's default: Gemma 3 4B does not say how many heads it has."""
    import transformers

    text = transformers.AutoConfig.for_model(kind).to_dict() | {"bos_token_id": None, "eos_token_id": None}

    def read(part: dict[str, Any]) -> ModelConfig:
        fields = {"architectures": [architecture], "tie_word_embeddings": True, "text_config": part}
        return FAMILIES[architecture](JsonFile(Path("config.json"), json.loads(json.dumps(fields))))

    assert repr(read({"model_type": kind})) == repr(read(text))


@pytest.mark.parametrize("name", ["num_experts", "num_local_experts"])
def test_the_number_of_experts_is_said_by_either_of_its_names(name: str) -> None:
    architecture = "Qwen3VLMoeForConditionalGeneration"
    fields = {"architectures": [architecture], "tie_word_embeddings": True, "text_config": {name: 7}}
    config = FAMILIES[architecture](JsonFile(Path("config.json"), fields))
    assert {layer.mixture.num_experts for layer in config.layers if layer.mixture is not None} == {7}
