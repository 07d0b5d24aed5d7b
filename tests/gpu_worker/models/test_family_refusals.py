"""What families refuse of a configuration, by its field: sizes and options that none of their layers has."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from gpu_worker.models.config import ModelConfig
from gpu_worker.models.errors import CheckpointError
from gpu_worker.models.json_file import JsonFile
from gpu_worker.models.registry import FAMILIES, read_model_config
from gpu_worker.models.support_page import SAMPLE

SIZES = {**SAMPLE, "n_embd": 64, "n_head": 4, "n_layer": 2}
GPT2, OPT, AFMOE, HUNYUAN = "GPT2LMHeadModel", "OPTForCausalLM", "AfmoeForCausalLM", "HunYuanMoEV1ForCausalLM"
MIMO = "MiMoV2FlashForCausalLM"


def read(architecture: str, fields: dict[str, Any]) -> ModelConfig:
    return FAMILIES[architecture](JsonFile(Path("config.json"), {**SIZES, **fields}))


@pytest.mark.parametrize(
    ("architecture", "fields", "problem"),
    [
        (GPT2, {"scale_attn_weights": False}, "field 'scale_attn_weights' is false"),
        (GPT2, {"scale_attn_by_inverse_layer_idx": True}, "field 'scale_attn_by_inverse_layer_idx' is true"),
        (GPT2, {"add_cross_attention": True}, "field 'add_cross_attention' is true"),
        (GPT2, {"n_embd": None}, "field 'n_embd' is missing"),
        (
            "Gemma4ForCausalLM",
            {"rope_scaling": {"type": "linear", "factor": 2.0}},
            "is of all layers; supported: rope_p",
        ),
        (OPT, {"do_layer_norm_before": False}, "field 'do_layer_norm_before' is false"),
        (OPT, {"word_embed_proj_dim": 128}, r"field 'word_embed_proj_dim' is 128; it must be hidden_size \(256\)"),
        (OPT, {"layer_norm_elementwise_affine": False}, "field 'layer_norm_elementwise_affine' is false"),
        (OPT, {"_remove_final_layer_norm": True}, "field '_remove_final_layer_norm' is true"),
        (AFMOE, {"attention_bias": True}, "field 'attention_bias' is true"),
        (AFMOE, {"score_func": "softmax"}, "field 'score_func' is 'softmax'; supported: 'sigmoid'"),
        (AFMOE, {"route_norm": False}, "field 'route_norm' is false"),
        (AFMOE, {"n_group": 4}, "field 'n_group' is 4; supported: 1"),
        (MIMO, {"attention_projection_layout": "fused_qkv"}, "field 'attention_projection_layout' is 'fused_qkv'"),
        (MIMO, {"n_shared_experts": 1}, "field 'n_shared_experts' is not 0"),
        (MIMO, {"head_dim": 32, "swa_head_dim": 16}, r"field 'swa_head_dim' is 16; it must be head_dim \(32\)"),
        (MIMO, {"hybrid_layer_pattern": [0, 2] * 4}, "field 'hybrid_layer_pattern' must be 0 or 1 for each"),
        (MIMO, {"moe_layer_freq": [0]}, r"field 'moe_layer_freq' must be 0 or 1 for each .* \(8\) layers"),
        (MIMO, {"swa_num_key_value_heads": 5}, r"field 'swa_num_key_value_heads' is 5; it must divide .* \(8\)"),
        (HUNYUAN, {"num_experts": [4] * 7}, r"field 'num_experts' must be .* num_hidden_layers \(8\) layers"),
        (HUNYUAN, {"moe_topk": [1] * 7 + [17]}, "field 'moe_topk' is 17; there are 16 experts"),
        (HUNYUAN, {"moe_intermediate_size": [512] * 7 + [64]}, "field 'moe_intermediate_size' differs"),
    ],
)
def test_options_that_no_layer_has_are_refused_by_their_field(
    architecture: str, fields: dict[str, Any], problem: str
) -> None:
    given = {"moe_intermediate_size": 512} if architecture == HUNYUAN else {}
    with pytest.raises(CheckpointError, match=problem):
        read(architecture, {**given, **fields})


@pytest.mark.parametrize(("name", "num_classes"), [("GPT2Model", 0), ("GPT2ForSequenceClassification", 3)])
def test_layers_of_gpt2_are_found_by_a_name_that_ends_as_the_whole_models(
    tmp_path: Path, name: str, num_classes: int
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**SIZES, "architectures": [name], "num_labels": 3}))
    assert read_model_config(tmp_path).num_classes == num_classes


def test_published_names_of_mimo_mean_what_those_of_transformers_do() -> None:
    names = {
        "hybrid_layer_pattern": [0, 1] * 4,
        "moe_layer_freq": [0] + [1] * 7,
        "swa_num_key_value_heads": 4,
        "swa_rope_theta": 1e4,
        "rope_theta": 5e6,
        "partial_rotary_factor": 0.334,
        "sliding_window_size": 128,
        "layernorm_epsilon": 1e-5,
    }
    kinds = ["full_attention", "sliding_attention"] * 4
    assert repr(read(MIMO, names)) == repr(read(MIMO, {"layer_types": kinds, "sliding_window": 129}))


def test_learned_positions_bound_a_sequence_and_leave_the_stack_unfused() -> None:
    config = read(OPT, {"max_position_embeddings": 77})
    assert config.max_model_len == 77
    assert config.block.positions is not None
    assert (config.block.positions.num_positions, config.block.positions.first_row) == (77, 2)
    assert not config.block.is_fusable
