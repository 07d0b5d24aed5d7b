"""Checkpoints of families with experts, and of Gemma 4, for llama.cpp's own converter."""

from __future__ import annotations

from collections.abc import Mapping

from tests.gpu_worker.quantization.gguf.converted import GEMMA4, GRANITE, HALF, PLAIN, THETA, YARN, Converted

_EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 24}
_ROUTED = {
    **_EXPERTS, "num_experts_per_tok": 3, "n_routed_experts": 8, "n_shared_experts": 1, "first_k_dense_replace": 1,
    "routed_scaling_factor": 1.5, "norm_topk_prob": True,
}  # fmt: skip
_LATENT = {
    **_ROUTED, "num_key_value_heads": 4, "qk_rope_head_dim": 16, "qk_nope_head_dim": 32, "v_head_dim": 32,
    "kv_lora_rank": 64, "n_shared_experts": 2, "num_experts_per_tok": 3,
}  # fmt: skip
_DENSE_LATENT = ("num_key_value_heads", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim", "kv_lora_rank")
_YOUTU = {name: _LATENT[name] for name in _DENSE_LATENT}
_V2 = {**_LATENT, "topk_method": "greedy", "n_group": 1, "topk_group": 1, "norm_topk_prob": False}
_LATENT_YARN = {**YARN, "mscale": 0.7, "mscale_all_dim": 0.7}
_FULL, _SLIDING = "full_attention", "sliding_attention"
_MELLUM = {**_EXPERTS, "num_experts": 6, "head_dim": 20}
_DIVISORS = [1.0 + 0.1 * pair for pair in range(6)]
_PHI_MOE_SCALE = 1.243163121016122
_EXAONE_MOE = {
    **_EXPERTS, "num_experts": 6, "num_shared_experts": 1, "num_hidden_layers": 5, "sliding_window": 8,
    "sliding_window_pattern": 4, "routed_scaling_factor": 1.5, "norm_topk_prob": True, "num_nextn_predict_layers": 0,
    "head_dim": 12,
}  # fmt: skip
_HY_V3 = {**_EXPERTS, "num_experts": 6, "head_dim": 12, "router_scaling_factor": 1.7, "rope_parameters": PLAIN}
_MIMO = {
    **_EXPERTS, "n_routed_experts": 6, "num_hidden_layers": 3, "num_key_value_heads": 1, "head_dim": 24,
    "v_head_dim": 12, "sliding_window": 9,
    "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
    "rope_parameters": {
        "full_attention": {**PLAIN, "partial_rotary_factor": 0.334},
        "sliding_attention": {"rope_type": "default", "rope_theta": 80.0, "partial_rotary_factor": 0.334},
    },
}  # fmt: skip
# The field counts the tokens before a query.
_MIMO_PUBLISHED = {
    "hybrid_layer_pattern": [0, 1, 1], "moe_layer_freq": [0, 1, 1], "layer_types": None, "mlp_layer_types": None,
    "rope_parameters": None, "rope_theta": 500.0, "swa_rope_theta": 80.0, "partial_rotary_factor": 0.334,
    "swa_head_dim": 24, "swa_v_head_dim": 12, "swa_num_attention_heads": 4, "swa_num_key_value_heads": 2,
    "sliding_window": 8, "sliding_window_size": 8, "layernorm_epsilon": 1e-5, "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
}  # fmt: skip
_AFMOE = {
    **_EXPERTS, "num_experts": 6, "num_hidden_layers": 5, "num_dense_layers": 2, "num_shared_experts": 2,
    "head_dim": 12, "sliding_window": 8, "global_attn_every_n_layers": 4, "mup_enabled": True, "route_scale": 1.7,
}  # fmt: skip
_LLAMA4 = {
    "head_dim": 12, "num_hidden_layers": 5, "intermediate_size_mlp": 56, "num_local_experts": 5,
    "num_experts_per_tok": 1, "interleave_moe_layer_step": 2, "attention_chunk_size": 8192,
}  # fmt: skip

MIXTURES: Mapping[str, Converted] = {
    "mixtral": Converted("llama", "Mixtral", {"num_local_experts": 5, "num_experts_per_tok": 2}),
    "qwen2moe": Converted(
        "qwen2moe", "Qwen2Moe", {**_EXPERTS, "num_experts": 6, "shared_expert_intermediate_size": 32},
    ),
    "qwen3moe": Converted(
        "qwen3moe", "Qwen3Moe", {**_EXPERTS, "num_local_experts": 6, "head_dim": 16, "norm_topk_prob": True},
    ),
    "olmoe": Converted("olmoe", "Olmoe", {"num_experts": 6, "num_experts_per_tok": 4}),
    "gpt-oss": Converted(
        "gpt-oss", "GptOss",
        {
            "num_local_experts": 6, "num_experts_per_tok": 3, "head_dim": 64, "sliding_window": 8,
            "rope_parameters": {**YARN, "truncate": False, "beta_fast": 32.0, "beta_slow": 1.0},
        },
    ),
    "gemma4": Converted("gemma4", "Gemma4Text", GEMMA4, "Gemma4"),
    "gemma4-shared": Converted(
        "gemma4", "Gemma4Text",
        {
            **GEMMA4, "hidden_size_per_layer_input": 10, "vocab_size_per_layer_input": 97, "num_kv_shared_layers": 3,
            "use_double_wide_mlp": True,
        },
        "Gemma4",
    ),
    "gemma4-experts": Converted(
        "gemma4", "Gemma4Text",
        {
            **GEMMA4, "enable_moe_block": True, "num_experts": 6, "top_k_experts": 2, "moe_intermediate_size": 24,
            "attention_k_eq_v": True, "num_global_key_value_heads": 1,
        },
        "Gemma4",
    ),
    "hy-v3": Converted("hy_v3", "HYV3", {**_HY_V3, "num_hidden_layers": 3}),
    "hy-v3-layers": Converted(
        "hy_v3", "HYV3", {**_HY_V3, "num_shared_experts": 2, "mlp_layer_types": ["sparse", "dense"]},
    ),
    "youtu": Converted("deepseek2", "Youtu", {**_YOUTU, "q_lora_rank": 24}),
    "mimo2": Converted("mimo2", "MiMoV2Flash", _MIMO, published=_MIMO_PUBLISHED),
    "mimo2-biases": Converted(
        "mimo2", "MiMoV2Flash", {**_MIMO, "attention_bias": True, "attention_value_scale": None},
        published={**_MIMO_PUBLISHED, "attention_value_scale": None},
    ),
    "afmoe": Converted("afmoe", "Afmoe", _AFMOE),
    "phimoe": Converted(
        "phimoe", "Phimoe",
        {
            "num_local_experts": 6, "num_experts_per_tok": 2, "lm_head_bias": True, "attention_bias": True,
            "sliding_window": 128,
            "rope_parameters": {
                **THETA, "rope_type": "longrope", "short_factor": _DIVISORS, "long_factor": _DIVISORS,
                "short_mscale": _PHI_MOE_SCALE, "long_mscale": _PHI_MOE_SCALE, "original_max_position_embeddings": 32,
            },
        },
        published={"architectures": ["PhiMoEForCausalLM"], "original_max_position_embeddings": 32},
    ),
    "glm4moe": Converted(
        "glm4moe", "Glm4Moe",
        {**_ROUTED, "head_dim": 16, "use_qk_norm": True, "attention_bias": True, "rope_parameters": HALF},
        published={"num_nextn_predict_layers": 0},
    ),
    "solar-open": Converted(
        "glm4moe", "SolarOpen", {**_ROUTED, "head_dim": 16, "rope_parameters": {**PLAIN, "partial_rotary_factor": 1.0}},
        published={"num_nextn_predict_layers": 0},
    ),
    "deepseek2": Converted(
        "deepseek2", "DeepseekV2", {**_V2, "q_lora_rank": None}, published={"scoring_func": "softmax"},
    ),
    "deepseek2-yarn": Converted(
        "deepseek2", "DeepseekV2", {**_V2, "q_lora_rank": 20, "rope_parameters": _LATENT_YARN},
        published={"scoring_func": "softmax"},
    ),
    "deepseek-v3": Converted(
        "deepseek2", "DeepseekV3", {**_LATENT, "q_lora_rank": 20, "n_group": 4, "topk_group": 2},
        published={"scoring_func": "sigmoid", "num_nextn_predict_layers": 0},
    ),
    "glm4-moe-lite": Converted(
        "deepseek2", "Glm4MoeLite", {**_LATENT, "q_lora_rank": 20, "n_group": 1, "topk_group": 1},
        published={"num_nextn_predict_layers": 0},
    ),
    "exaone-moe": Converted("exaone-moe", "ExaoneMoe", _EXAONE_MOE, published={"scoring_func": "sigmoid"}),
    "granitemoe": Converted("granitemoe", "GraniteMoe", {**GRANITE, "num_local_experts": 5, "num_experts_per_tok": 2}),
    "granitemoe-shared": Converted(
        "granitemoe", "GraniteMoeShared",
        {**GRANITE, "num_local_experts": 5, "num_experts_per_tok": 2, "shared_intermediate_size": 24},
    ),
    "ernie4_5-moe": Converted(
        "ernie4_5-moe", "Ernie4_5_Moe",
        {
            "moe_num_experts": 6, "moe_k": 3, "moe_intermediate_size": 24, "num_hidden_layers": 3,
            "moe_layer_start_index": 1,
        },
    ),
    "dots1": Converted(
        "dots1", "Dots1", {**_ROUTED, "n_group": 4, "topk_group": 2, "head_dim": 12, "num_hidden_layers": 3},
    ),
    "hunyuan-moe": Converted(
        "hunyuan-moe", "HunYuanMoEV1", {"head_dim": 12, "num_experts": 5, "moe_topk": 2, "attention_bias": True},
        published={"moe_topk": [2, 2], "moe_intermediate_size": [40, 40], "num_shared_expert": [1, 1]},
    ),
    "minimax-m2": Converted(
        "minimax-m2", "MiniMaxM2", {"num_local_experts": 6, "num_experts_per_tok": 3, "head_dim": 16, "rotary_dim": 8},
        published={"rotary_dim": 8, "scoring_func": "sigmoid"},
    ),
    "llama4": Converted("llama4", "Llama4Text", _LLAMA4, "Llama4"),
    "mellum": Converted("mellum", "Mellum", {**_MELLUM, "rope_parameters": {_FULL: PLAIN, _SLIDING: PLAIN}}),
    "mellum-windows": Converted(
        "mellum", "Mellum",
        {
            **_MELLUM, "num_hidden_layers": 3, "sliding_window": 9, "layer_types": [_SLIDING, _FULL, _SLIDING],
            "rope_parameters": {_FULL: YARN, _SLIDING: {"rope_type": "default", "rope_theta": 80.0}},
        },
    ),
}  # fmt: skip
