"""Families with mixtures of experts, each with sizes that are odd somewhere and options that matter."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from tests.gpu_worker.models.families.random_models import Case, case

_YARN = {
    "rope_type": "yarn", "rope_theta": 500.0, "factor": 4.0, "original_max_position_embeddings": 32, "truncate": False,
    "beta_fast": 32.0, "beta_slow": 1.0,
}  # fmt: skip
_GRANITE = {
    "num_local_experts": 5, "num_experts_per_tok": 2, "attention_multiplier": 0.2, "residual_multiplier": 0.7,
    "embedding_multiplier": 3.0, "logits_scaling": 2.0,
}  # fmt: skip
_GEMMA4 = {
    "head_dim": 20, "global_head_dim": 28, "sliding_window": 9, "layer_types": ["sliding_attention", "full_attention"],
    "hidden_size_per_layer_input": 0, "attention_k_eq_v": True, "num_global_key_value_heads": 1,
    "enable_moe_block": True, "num_experts": 6, "top_k_experts": 3, "moe_intermediate_size": 24,
}  # fmt: skip
_GLM = {
    "n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24, "first_k_dense_replace": 1,
    "head_dim": 16,
}  # fmt: skip
_LLAMA4 = {
    "head_dim": 12, "num_hidden_layers": 3, "intermediate_size_mlp": 56, "num_local_experts": 5,
    "interleave_moe_layer_step": 2, "no_rope_layer_interval": 2, "attention_chunk_size": 11, "floor_scale": 7,
    "attn_scale": 0.3,
}  # fmt: skip
# What `transformers` calls its own names for tensors, of which experts' are stacked.
_STACKED = {"save_original_format": False}

CASES: Mapping[str, Case] = {
    "mixtral": case("Mixtral", num_local_experts=5, num_experts_per_tok=2, sliding_window=9),
    "qwen2-moe": case(
        "Qwen2Moe", num_experts=6, num_experts_per_tok=3, moe_intermediate_size=24, shared_expert_intermediate_size=32,
        decoder_sparse_step=2,
    ),
    "qwen3-moe": case(
        "Qwen3Moe", num_local_experts=7, num_experts_per_tok=3, moe_intermediate_size=24, head_dim=16,
        norm_topk_prob=True, mlp_only_layers=[0], tie_word_embeddings=True, num_key_value_heads=1,
    ),
    "olmoe": case("Olmoe", num_experts=6, num_experts_per_tok=4, num_key_value_heads=4),
    "gpt-oss": case(
        "GptOss", num_local_experts=6, num_experts_per_tok=3, head_dim=16, sliding_window=8, rope_parameters=_YARN,
    ),
    "gemma4-moe": case("Gemma4Text", _GEMMA4, model="Gemma4"),
    "glm4-moe": case("Glm4Moe", _GLM, n_group=4, topk_group=2, routed_scaling_factor=1.7),
    "granite-moe": case("GraniteMoe", _GRANITE),
    "granite-moe-shared": case("GraniteMoeShared", _GRANITE, shared_intermediate_size=24),
    "llama4": case("Llama4Text", _LLAMA4, model="Llama4"),
}  # fmt: skip
"""One of each family."""

MORE_CASES: Mapping[str, Case] = {
    "mixtral-stacked": case("Mixtral", num_local_experts=5, num_experts_per_tok=1, saved=_STACKED),
    "qwen2-moe-renormalised": case(
        "Qwen2Moe", num_experts=9, num_experts_per_tok=9, moe_intermediate_size=20, shared_expert_intermediate_size=24,
        norm_topk_prob=True, use_sliding_window=True, sliding_window=7, max_window_layers=1,
        layer_types=["full_attention", "sliding_attention"], saved=_STACKED,
    ),
    "qwen3-moe-bf16": case(
        "Qwen3Moe", num_local_experts=4, num_experts_per_tok=2, moe_intermediate_size=24, head_dim=16,
        attention_bias=True, dtype=torch.bfloat16,
    ),
    "olmoe-stacked-bf16": case("Olmoe", num_experts=6, num_experts_per_tok=2, dtype=torch.bfloat16, saved=_STACKED),
    "gpt-oss-bf16": case(
        "GptOss", num_local_experts=4, num_experts_per_tok=4, head_dim=8, sliding_window=5, swiglu_limit=1.5,
        dtype=torch.bfloat16,
    ),
    "gemma4-moe-e-bf16": case(
        "Gemma4Text", _GEMMA4, num_hidden_layers=4, num_kv_shared_layers=2, use_double_wide_mlp=True,
        layer_types=["sliding_attention", "full_attention"] * 2, hidden_size_per_layer_input=10,
        vocab_size_per_layer_input=97, dtype=torch.bfloat16, model="Gemma4",
    ),
    "glm4-moe-biases": case("Glm4Moe", _GLM, use_qk_norm=True, attention_bias=True, n_shared_experts=2),
    "granite-moe-stacked": case("GraniteMoe", _GRANITE, tie_word_embeddings=True, saved=_STACKED),
    "llama4-options": case(
        "Llama4Text", _LLAMA4, moe_layers=[0, 1], no_rope_layers=[1, 0, 1],
        layer_types=["chunked_attention", "full_attention", "full_attention"], use_qk_norm=False,
        attn_temperature_tuning=False, num_key_value_heads=1, tie_word_embeddings=True,
        rope_parameters={
            "rope_type": "llama3", "rope_theta": 500.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 1.0,
            "original_max_position_embeddings": 32,
        },
        model="Llama4",
    ),
    "llama4-bf16": case("Llama4Text", _LLAMA4, attention_bias=True, dtype=torch.bfloat16, model="Llama4"),
    "granite-moe-no-shared": case("GraniteMoeShared", _GRANITE, shared_intermediate_size=0),
}  # fmt: skip
"""Other options, names and forms of stored tensors."""
