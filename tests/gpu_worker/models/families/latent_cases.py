"""Families with attention by latent vectors, with sizes that are odd somewhere and options that matter."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from tests.gpu_worker.models.families.random_models import Case, case

_YARN = {
    "rope_type": "yarn", "rope_theta": 500.0, "factor": 4.0, "original_max_position_embeddings": 32, "beta_fast": 32.0,
    "beta_slow": 1.0, "mscale": 0.7, "mscale_all_dim": 1.2,
}  # fmt: skip
_LATENT = {
    "num_key_value_heads": 4, "kv_lora_rank": 24, "qk_nope_head_dim": 12, "qk_rope_head_dim": 8, "v_head_dim": 20,
    "n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24, "first_k_dense_replace": 1,
}  # fmt: skip
# Those that a dense decoder has too.
_SIZES = ("num_key_value_heads", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
_V3 = {**_LATENT, "q_lora_rank": 20, "n_group": 4, "topk_group": 2, "routed_scaling_factor": 1.7}

CASES: Mapping[str, Case] = {
    "deepseek-v2-lite": case("DeepseekV2", _LATENT, q_lora_rank=None, rope_parameters=_YARN),
    "deepseek-v3": case("DeepseekV3", _V3),
}
MORE_CASES: Mapping[str, Case] = {
    "deepseek-v2": case(
        "DeepseekV2", _LATENT, q_lora_rank=28, topk_method="group_limited_greedy", n_group=4, topk_group=2,
        routed_scaling_factor=3.0, attention_bias=True,
    ),
    "deepseek-v3-yarn": case("DeepseekV3", _V3, rope_parameters=_YARN, rope_interleave=False),
    "deepseek-v3-wide": case("DeepseekV3", _V3, kv_lora_rank=40, qk_rope_head_dim=16, v_head_dim=44),
    "deepseek-v3-bfloat16": case("DeepseekV3", _V3, dtype=torch.bfloat16),
    "youtu": case("Youtu", {name: _LATENT[name] for name in _SIZES} | {"q_lora_rank": None}),
    "youtu-rank": case(
        "Youtu",
        {name: _LATENT[name] for name in _SIZES}
        | {"q_lora_rank": 20, "tie_word_embeddings": False, "rope_interleave": False},
    ),
    "mistral4": case("Mistral4", _LATENT, q_lora_rank=20, rope_parameters={**_YARN, "llama_4_scaling_beta": 0.3}),
    "mistral4-groups": case(
        "Mistral4", _V3, q_lora_rank=None, first_k_dense_replace=0, norm_topk_prob=False,
        rope_parameters={**_YARN, "original_max_position_embeddings": 16, "llama_4_scaling_beta": 0.5},
    ),
    "glm4-moe-lite": case("Glm4MoeLite", _V3, mlp_layer_types=["sparse", "dense"]),
}  # fmt: skip
