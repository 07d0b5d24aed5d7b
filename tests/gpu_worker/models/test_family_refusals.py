"""What families refuse of a configuration, by its field: sizes and options that none of their layers has."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from gpu_worker.models.config import ModelConfig
from gpu_worker.models.errors import CheckpointError
from gpu_worker.models.json_file import JsonFile
from gpu_worker.models.registry import FAMILIES
from gpu_worker.models.support_page import SAMPLE

SIZES = {**SAMPLE, "n_embd": 64, "n_head": 4, "n_layer": 2}
GPT2, OPT, AFMOE, HUNYUAN = "GPT2LMHeadModel", "OPTForCausalLM", "AfmoeForCausalLM", "HunYuanMoEV1ForCausalLM"


def read(architecture: str, fields: dict[str, Any]) -> ModelConfig:
    return FAMILIES[architecture](JsonFile(Path("config.json"), {**SIZES, **fields}))


@pytest.mark.parametrize(
    ("architecture", "fields", "problem"),
    [
        (GPT2, {"scale_attn_weights": False}, "field 'scale_attn_weights' is false"),
        (GPT2, {"scale_attn_by_inverse_layer_idx": True}, "field 'scale_attn_by_inverse_layer_idx' is true"),
        (GPT2, {"add_cross_attention": True}, "field 'add_cross_attention' is true"),
        (GPT2, {"n_embd": None}, "field 'n_embd' is missing"),
        (OPT, {"do_layer_norm_before": False}, "field 'do_layer_norm_before' is false"),
        (OPT, {"word_embed_proj_dim": 128}, r"field 'word_embed_proj_dim' is 128; it must be hidden_size \(256\)"),
        (OPT, {"layer_norm_elementwise_affine": False}, "field 'layer_norm_elementwise_affine' is false"),
        (OPT, {"_remove_final_layer_norm": True}, "field '_remove_final_layer_norm' is true"),
        (AFMOE, {"attention_bias": True}, "field 'attention_bias' is true"),
        (AFMOE, {"score_func": "softmax"}, "field 'score_func' is 'softmax'; supported: 'sigmoid'"),
        (AFMOE, {"route_norm": False}, "field 'route_norm' is false"),
        (AFMOE, {"n_group": 4}, "field 'n_group' is 4; supported: 1"),
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


def test_learned_positions_bound_a_sequence_and_leave_the_stack_unfused() -> None:
    config = read(OPT, {"max_position_embeddings": 77})
    assert config.max_model_len == 77
    assert config.block.positions is not None
    assert (config.block.positions.num_positions, config.block.positions.first_row) == (77, 2)
    assert not config.block.is_fusable
