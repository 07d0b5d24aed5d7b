"""Models with a vision tower, served for text: against the text part of `transformers`' own model."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from gpu_worker.models.errors import CheckpointError
from gpu_worker.models.loader import load_model
from gpu_worker.models.registry import read_model_config
from gpu_worker.models.stored_weights import open_weights
from gpu_worker.models.weights_size import weights_bytes
from tests.gpu_worker.models.families.oracle_checks import assert_logits_equal
from tests.gpu_worker.models.families.random_models import SIZES
from tests.gpu_worker.models.pairs import CPU
from tests.gpu_worker.models.variants import randomize

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
    with pytest.raises(CheckpointError, match=r"model_type' is 'pixels'; supported: 'mistral', 'ministral3'"):
        read_model_config(tmp_path)
