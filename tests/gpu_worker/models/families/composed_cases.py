"""Families made of parts that other families have too: only the reading of their configurations is their own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from tests.gpu_worker.models.families.random_models import Case, case

_SMALL = {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 24, "num_hidden_layers": 3}
_ERNIE_MOE = {"moe_num_experts": 6, "moe_k": 3, "moe_intermediate_size": 24, "num_hidden_layers": 3}
_ERNIE_MOE |= {"moe_layer_start_index": 1}
_MINIMAX = {"num_local_experts": 6, "num_experts_per_tok": 3, "head_dim": 16, "rotary_dim": 8}
_PHI = {"num_local_experts": 6, "num_experts_per_tok": 2, "lm_head_bias": True, "attention_bias": True}
_GROUPED = {"n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24, "n_shared_experts": 1}
_ALPHA = {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 500.0, "factor": 1.0, "alpha": 100.0}}
_EXAONE = {**_SMALL, "sliding_window": 9, "head_dim": 12}
_HY_V3 = {**_SMALL, "head_dim": 12, "router_scaling_factor": 1.7}
_AFMOE = {**_SMALL, "head_dim": 20, "sliding_window": 9, "global_attn_every_n_layers": 2}
_CWM = {"head_dim": 12, "sliding_window": 9, "num_hidden_layers": 3, "bos_token_id": 1, "eos_token_id": 96}
_PLAIN = {"rope_type": "default", "rope_theta": 80.0}
_MIMO = {
    "n_routed_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 24, "num_hidden_layers": 3,
    "num_key_value_heads": 1, "head_dim": 24, "v_head_dim": 12, "sliding_window": 9,
    "layer_types": ["full_attention", "sliding_attention", "full_attention"],
}  # fmt: skip
_FACTORS = {"attention_multiplier": 0.2, "residual_multiplier": 0.7, "embedding_multiplier": 3.0, "logits_scaling": 0.8}
_GRANITE_MOE = {
    **_FACTORS, "num_hidden_layers": 3, "sliding_window": 9, "num_local_experts": 5, "num_experts_per_tok": 2,
}  # fmt: skip
_MELLUM = {**_SMALL, "num_experts_per_tok": 2, "head_dim": 20, "sliding_window": 9}
_COHERE_MOE = {
    "num_experts": 5, "num_experts_per_tok": 2, "num_hidden_layers": 5, "head_dim": 12, "sliding_window": 9,
    "sliding_window_pattern": 2, "logit_scale": 0.5,
}  # fmt: skip
_LFM2 = {**_SMALL, "num_experts": 5, "num_experts_per_tok": 2, "num_dense_layers": 1}
_LFM2_KINDS = {"layer_types": ["conv", "full_attention", "conv"]}


def phi_rope(trained_len: int, long_mscale: float) -> dict[str, Any]:
    """Divisors that are alike, because the oracle only ever takes the short ones; its amplitude follows the length."""
    divisors = [1.0 + 0.1 * pair for pair in range(6)]
    return {
        "rope_parameters": {
            "rope_type": "longrope", "rope_theta": 500.0, "short_factor": divisors, "long_factor": divisors,
            "short_mscale": 1.1, "long_mscale": long_mscale, "original_max_position_embeddings": trained_len,
        },
    }  # fmt: skip


CASES: Mapping[str, Case] = {
    "ernie": case("Ernie4_5", head_dim=20),
    "ernie-biases": case("Ernie4_5", head_dim=12, use_bias=True, tie_word_embeddings=False),
    "ernie-moe": case("Ernie4_5_Moe", _ERNIE_MOE),
    "ernie-moe-steps": case("Ernie4_5_Moe", _ERNIE_MOE, moe_layer_interval=2, moe_layer_end_index=1),
    "minimax-m2": case("MiniMaxM2", _MINIMAX),
    "minimax-m2-bf16": case("MiniMaxM2", _MINIMAX, num_key_value_heads=1, dtype=torch.bfloat16),
    "phimoe": case("Phimoe", _PHI, phi_rope(256, 1.3)),
    "phimoe-long": case("Phimoe", _PHI, phi_rope(16, 1.1), router_jitter_noise=0.4, sliding_window=9),
    "phimoe-plain": case("Phimoe", _PHI, attention_bias=False, lm_head_bias=False, dtype=torch.bfloat16),
    "dots1": case("Dots1", _GROUPED, first_k_dense_replace=1, n_group=4, topk_group=2),
    "dots1-windows": case("Dots1", _GROUPED, norm_topk_prob=True, sliding_window=9, max_window_layers=1),
    "solar-open": case("SolarOpen", _GROUPED, head_dim=16, attention_bias=True),
    "arcee": case("Arcee", mlp_bias=True),
    "nemotron": case("Nemotron", partial_rotary_factor=0.5, head_dim=16),
    "nemotron-biases": case("Nemotron", partial_rotary_factor=0.5, head_dim=16, attention_bias=True, mlp_bias=True),
    "phi": case("Phi", partial_rotary_factor=0.5, num_attention_heads=3, num_key_value_heads=3),
    "stablelm": case("StableLm", partial_rotary_factor=0.5, use_qkv_bias=True),
    "stablelm-parallel": case("StableLm", partial_rotary_factor=0.5, use_parallel_residual=True),
    "stablelm-12b": case("StableLm", partial_rotary_factor=0.5, use_parallel_residual=True, qk_layernorm=True),
    "command-r-plus": case("Cohere", logit_scale=0.5, use_qk_norm=True),
    "olmoe-clipped": case("Olmoe", num_experts=6, num_experts_per_tok=2, clip_qkv=0.8),
    "gpt-neox": case("GPTNeoX", rotary_pct=0.5, hidden_act="gelu"),
    "gpt-neox-serial": case(
        "GPTNeoX", rope_parameters={"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 1.0},
        use_parallel_residual=False, attention_bias=False,
    ),
    "hunyuan": case("HunYuanDenseV1", _ALPHA, head_dim=12),
    "hunyuan-moe": case("HunYuanMoEV1", head_dim=12, num_experts=5, moe_topk=2, attention_bias=True),
    "hunyuan-moe-layers": case(
        "HunYuanMoEV1", head_dim=12, num_experts=5, moe_topk=[1, 3], moe_intermediate_size=[40, 40],
    ),
    "exaone-moe": case("ExaoneMoe", _EXAONE, sliding_window_pattern=2),
    "exaone-moe-kinds": case("ExaoneMoe", _EXAONE, mlp_layer_types=["sparse", "dense", "sparse"]),
    "mimo-v2": case("MiMoV2Flash", _MIMO),
    "mimo-v2-options": case(
        "MiMoV2Flash", _MIMO, attention_bias=True, attention_value_scale=None, norm_topk_prob=False, n_group=2,
        topk_group=1,
        rope_parameters={
            "full_attention": {**_PLAIN, "partial_rotary_factor": 0.5},
            "sliding_attention": {**_PLAIN, "partial_rotary_factor": 1.0},
        },
    ),
    "apertus": case("Apertus"),
    "apertus-biases": case(
        "Apertus", attention_bias=True, rope_parameters={"rope_type": "default", "rope_theta": 500.0},
        tie_word_embeddings=True, num_key_value_heads=1,
    ),
    "hy-v3": case("HYV3", _HY_V3),
    "hy-v3-biases": case(
        "HYV3", _HY_V3, attention_bias=True, mlp_bias=True, num_shared_experts=2,
        mlp_layer_types=["sparse", "dense", "sparse"], tie_word_embeddings=True,
    ),
    "afmoe": case("Afmoe", _AFMOE, mup_enabled=True, route_scale=1.7),
    "afmoe-bf16": case(
        "Afmoe", _AFMOE, num_key_value_heads=1, num_dense_layers=2, num_shared_experts=1, dtype=torch.bfloat16,
    ),
    "gpt2": case("GPT2"),
    "gpt2-untied": case(
        "GPT2", n_inner=56, activation_function="relu", tie_word_embeddings=False, dtype=torch.bfloat16,
    ),
    "opt": case("OPT", ffn_dim=56, word_embed_proj_dim=48),
    "opt-no-biases": case(
        "OPT", ffn_dim=56, word_embed_proj_dim=48, enable_bias=False, tie_word_embeddings=False, dtype=torch.bfloat16,
    ),
    "cwm": case("Cwm", _CWM, rope_parameters=_PLAIN),
    "internlm3": case("InternLM3", head_dim=20, model="Llama", architecture="InternLM3ForCausalLM"),
    "internlm3-biases": case(
        "InternLM3", head_dim=12, attention_bias=True, mlp_bias=True, model="Llama",
        architecture="InternLM3ForCausalLM",
    ),
    "iquestcoder": case(
        "IQuestCoder", head_dim=20, num_key_value_heads=1, model="Llama", architecture="IQuestCoderForCausalLM",
    ),
    "helium": case("Helium", head_dim=12),
    "helium-bf16": case("Helium", head_dim=12, attention_bias=True, mlp_bias=True, dtype=torch.bfloat16),
    "jais2": case("Jais2"),
    "jais2-no-biases": case("Jais2", attention_bias=False, mlp_bias=False, head_dim=20, dtype=torch.bfloat16),
    "hyperclovax": case("HyperCLOVAX", _FACTORS),
    "hyperclovax-no-post-norm": case(
        "HyperCLOVAX", use_post_norm=False, attention_bias=True, mlp_bias=True, head_dim=20,
    ),
    "vaultgemma": case("VaultGemma", head_dim=20, sliding_window=9, query_pre_attn_scalar=16),
    "granite-swa": case("GraniteSWA", _FACTORS, num_hidden_layers=3, sliding_window=9),
    "granite-swa-thetas": case(
        "GraniteSWA", num_hidden_layers=4, attention_bias=True, sliding_window=9, attention_multiplier=0.3,
        layer_rope_theta=[500.0, 0, 80.0, 500.0],
        layer_types=["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
        tie_word_embeddings=False,
    ),
    "granite-moe-swa": case("GraniteMoeSWA", _GRANITE_MOE),
    "granite-moe-swa-shared": case(
        "GraniteMoeSWA", _GRANITE_MOE, shared_intermediate_size=28, layer_rope_theta=[0, 80.0, 0],
    ),
    "flex-olmo": case("FlexOlmo", num_experts=5, num_experts_per_tok=2),
    "flex-olmo-mqa": case("FlexOlmo", num_experts=4, num_experts_per_tok=3, norm_topk_prob=True, num_key_value_heads=1),
    "mellum": case("Mellum", _MELLUM),
    "mellum-windows": case(
        "Mellum", _MELLUM, norm_topk_prob=False,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        mlp_layer_types=["sparse", "dense", "sparse"],
        rope_parameters={
            "full_attention": {
                "rope_type": "yarn", "rope_theta": 500.0, "factor": 4.0, "original_max_position_embeddings": 32,
            },
            "sliding_attention": _PLAIN,
        },
    ),
    "cohere2-moe": case("Cohere2Moe", _COHERE_MOE),
    "cohere2-moe-options": case(
        "Cohere2Moe", _COHERE_MOE, rms_norm_eps=1e-5, num_shared_experts=2, expert_selection_fn="sigmoid",
        first_k_dense_replace=2, prefix_dense_intermediate_size=56, attention_bias=True,
    ),
    "cohere2-moe-sum": case(
        "Cohere2Moe", _COHERE_MOE, num_shared_experts=1, shared_expert_combination_strategy="sum",
        expert_selection_fn="sigmoid", norm_topk_prob=False, first_k_dense_replace=1,
        prefix_dense_sliding_window_pattern=2,
    ),
    "lfm2-moe": case("Lfm2Moe", _LFM2, _LFM2_KINDS),
    "lfm2-moe-no-bias": case("Lfm2Moe", _LFM2, _LFM2_KINDS, use_expert_bias=False, norm_topk_prob=False),
}  # fmt: skip
