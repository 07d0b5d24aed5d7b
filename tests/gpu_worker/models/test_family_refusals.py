"""What families refuse of a configuration, by its field: sizes and options that none of their layers has."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from gpu_worker.layers.mixture import MixtureShape
from gpu_worker.models.families import families
from gpu_worker.models.json_file import CheckpointError
from gpu_worker.models.registry import read_model_config
from kernels.activation.experts import SILU
from tests.gpu_worker.models.support_page import SAMPLE, sample_config

GPT2, OPT, AFMOE, HUNYUAN = "GPT2LMHeadModel", "OPTForCausalLM", "AfmoeForCausalLM", "HunYuanMoEV1ForCausalLM"
MIMO, FALCON, NEMOTRON = "MiMoV2FlashForCausalLM", "FalconH1ForCausalLM", "NemotronHForCausalLM"
MAMBA2 = "Mamba2ForCausalLM"


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
        (MIMO, {"n_shared_experts": 1}, "field 'n_shared_experts' is 1; supported: 0"),
        (MIMO, {"head_dim": 32, "swa_head_dim": 16}, r"field 'swa_head_dim' is 16; it must be head_dim \(32\)"),
        (MIMO, {"hybrid_layer_pattern": [0, 2] * 4}, "field 'hybrid_layer_pattern' must be 0 or 1 for each"),
        (MIMO, {"moe_layer_freq": [0]}, r"field 'moe_layer_freq' must be 0 or 1 for each .* \(8\) layers"),
        (MIMO, {"swa_num_key_value_heads": 5}, r"field 'swa_num_key_value_heads' is 5; it must divide .* \(8\)"),
        (HUNYUAN, {"num_experts": [4] * 7}, r"field 'num_experts' must be .* num_hidden_layers \(8\) layers"),
        (HUNYUAN, {"moe_topk": [1] * 7 + [17]}, "field 'moe_topk' is 17; there are 16 experts"),
        (HUNYUAN, {"moe_intermediate_size": [512] * 7 + [64]}, "field 'moe_intermediate_size' differs"),
        ("HunYuanDenseV1ForCausalLM", {"rope_scaling": {"type": "dynamic", "factor": 1.0, "alpha": 1e308}}, "alpha"),
        ("Lfm2ForCausalLM", {"block_ffn_dim_multiplier": 1e308}, "block_ffn_dim_multiplier"),
        (MAMBA2, {"time_step_limit": [10**400, 1.0]}, "time_step_limit"),
        (MAMBA2, {"time_step_limit": [0.0, 10**400]}, "time_step_limit"),
        (FALCON, {"attention_in_multiplier": 2.0, "attention_bias": True}, "attention_in_multiplier"),
        (FALCON, {"ssm_in_multiplier": 2.0, "mamba_proj_bias": True}, "ssm_in_multiplier"),
        (FALCON, {"ssm_multipliers": [1.0, 2.0]}, "ssm_multipliers"),
        (FALCON, {"mlp_multipliers": [1.0]}, "mlp_multipliers"),
        *(
            ("GraniteSWAForCausalLM", {"layer_rope_theta": thetas}, r"field 'layer_rope_theta' must be 0, or above 1")
            for thetas in (5, "12345678", [1e4] * 7, [1e4] * 7 + ["1e4"], [1e4] * 7 + [1.0], [1e4] * 7 + [True])
        ),
        (NEMOTRON, {"hybrid_override_pattern": "MX"}, "is 'MX'; it must have a letter of 'M.-E' for each layer"),
        (NEMOTRON, {"layers_block_type": ["conv"]}, "its kinds must be among"),
        (NEMOTRON, {"attention_bias": True}, "served without biases"),
        (NEMOTRON, {"hybrid_override_pattern": "ME", "mlp_hidden_act": "silu"}, "supported: 'relu2'"),
        (NEMOTRON, {"hybrid_override_pattern": "M-", "intermediate_size": None}, "intermediate_size"),
    ],
)
def test_options_that_no_layer_has_are_refused_by_their_field(
    architecture: str, fields: dict[str, Any], problem: str
) -> None:
    given = {"moe_intermediate_size": 512} if architecture == HUNYUAN else {}
    with pytest.raises(CheckpointError, match=problem):
        sample_config(architecture, **{**given, **fields})


@pytest.mark.parametrize(("name", "num_classes"), [("GPT2Model", 0), ("GPT2ForSequenceClassification", 3)])
def test_layers_of_gpt2_are_found_by_a_name_that_ends_as_the_whole_models(
    tmp_path: Path, name: str, num_classes: int
) -> None:
    (tmp_path / "config.json").write_text(
        json.dumps({**SAMPLE, "n_embd": 64, "n_head": 4, "n_layer": 2, "architectures": [name], "num_labels": 3})
    )
    assert read_model_config(tmp_path).num_classes == num_classes


def test_published_names_of_mimo_mean_what_those_of_transformers_do() -> None:
    names = {
        "hybrid_layer_pattern": [0, 1] * 4, "moe_layer_freq": [0] + [1] * 7, "swa_num_key_value_heads": 4,
        "swa_rope_theta": 1e4, "rope_theta": 5e6, "partial_rotary_factor": 0.334, "sliding_window_size": 128,
        "layernorm_epsilon": 1e-5,
    }  # fmt: skip
    kinds = ["full_attention", "sliding_attention"] * 4
    config = sample_config(MIMO, **names)
    assert repr(config) == repr(sample_config(MIMO, layer_types=kinds, sliding_window=129))
    assert [config.attention_shape(index).sliding_window for index in range(8)] == [None, 129] * 4


def test_learned_positions_bound_a_sequence_and_leave_the_stack_unfused() -> None:
    config = sample_config(OPT, max_position_embeddings=77)
    assert config.max_model_len == 77
    assert config.block.positions is not None
    assert (config.block.positions.num_positions, config.block.positions.first_row) == (77, 2)
    assert not config.block.is_fusable


def mixtures(architecture: str) -> list[MixtureShape]:
    layers = sample_config(architecture).layers
    return [layer.feed_forward for layer in layers if isinstance(layer.feed_forward, MixtureShape)]


ALL = [family.architecture for family in families()]
WITH_SILU = [name for name in ALL if any(shape.activation == SILU for shape in mixtures(name))]


def test_most_families_with_experts_have_silu() -> None:
    assert len(WITH_SILU) >= 10


@pytest.mark.parametrize("architecture", WITH_SILU)
def test_other_activations_of_experts_are_refused(architecture: str) -> None:
    with pytest.raises(CheckpointError, match=r"field 'hidden_act' is 'gelu'.*'silu'"):
        sample_config(architecture, hidden_act="gelu")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"n_group": 5}, "field 'n_group' is 5; it must divide"),
        ({"n_group": 2, "topk_group": 3}, "field 'topk_group' is 3; there are 2 groups"),
        ({"n_group": 8, "topk_group": 1}, "field 'num_experts_per_tok' is 4; .* have 2 experts"),
    ],
)
@pytest.mark.parametrize("architecture", ["DeepseekV2ForCausalLM", "DeepseekV3ForCausalLM", "Glm4MoeForCausalLM"])
def test_groups_of_experts_that_cannot_be_are_refused(architecture: str, fields: dict[str, int], message: str) -> None:
    fields = {"num_experts_per_tok": 4, "n_group": 1, "topk_group": 1, **fields}
    with pytest.raises(CheckpointError, match=message):
        sample_config(architecture, topk_method="group_limited_greedy", **fields)
