"""Checkpoints of dense families for llama.cpp's own converter.

Checkpoints of families whose layers keep states, for llama.cpp's own converter.
"""

from __future__ import annotations

from collections.abc import Mapping

from tests.gpu_worker.models.families.random_models import SIZES
from tests.gpu_worker.quantization.gguf.converted import (
    FALCON,
    GEMMA3,
    GRANITE,
    HALF,
    LFM2,
    PLAIN,
    THETA,
    WINDOW,
    YARN,
    Converted,
)

_LLAMA3 = {
    "rope_type": "llama3", "factor": 4.0, "original_max_position_embeddings": 32, "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
}  # fmt: skip
_DIVISORS = [1.0 + 0.1 * pair for pair in range(6)]

DENSE: Mapping[str, Converted] = {
    "llama": Converted("llama", "Llama", {"num_key_value_heads": 1}),
    "llama-biases": Converted("llama", "Llama", {"attention_bias": True, "mlp_bias": True, "head_dim": 20}),
    "llama-llama3": Converted("llama", "Llama", {"rope_parameters": {**_LLAMA3, **THETA}}),
    "llama-linear": Converted("llama", "Llama", {"rope_parameters": {**PLAIN, "rope_type": "linear", "factor": 2}}),
    "llama-yarn": Converted("llama", "Llama", {"rope_parameters": YARN}),
    "mistral": Converted("llama", "Mistral", {"sliding_window": None, "head_dim": 20}),
    "gpt2": Converted("gpt2", "GPT2", {"n_inner": 4 * SIZES["hidden_size"]}, published={"n_ctx": 128}),
    "apertus": Converted("apertus", "Apertus", {"rope_parameters": {**_LLAMA3, **THETA}, "head_dim": 12}),
    "apertus-biases": Converted("apertus", "Apertus", {"rope_parameters": PLAIN, "attention_bias": True}),
    "qwen2": Converted("qwen2", "Qwen2", {"tie_word_embeddings": True}),
    "qwen2-yarn": Converted("qwen2", "Qwen2", {"rope_parameters": YARN}),
    "qwen3": Converted("qwen3", "Qwen3", {"head_dim": 32}),
    "gemma": Converted("gemma", "Gemma", {"head_dim": 20}),
    "gemma2": Converted("gemma2", "Gemma2", {**WINDOW, "query_pre_attn_scalar": 16, "num_hidden_layers": 3}),
    "gemma3": Converted("gemma3", "Gemma3Text", GEMMA3, "Gemma3"),
    "phi2": Converted(
        "phi2", "Phi", {"partial_rotary_factor": 0.5, "num_key_value_heads": 4, "intermediate_size": 192},
    ),
    "phi3": Converted("phi3", "Phi3", {"rope_parameters": PLAIN, "sliding_window": None}),
    "phi3-longrope": Converted(
        "phi3", "Phi3",
        {
            "rope_parameters": {
                **THETA, "rope_type": "longrope", "short_factor": _DIVISORS,
                "long_factor": [2 * divisor for divisor in _DIVISORS],
            },
            "original_max_position_embeddings": 32, "sliding_window": None,
        },
    ),
    "glm4": Converted("glm4", "Glm4", {"head_dim": 16, "rope_parameters": HALF, "attention_bias": True}),
    "chatglm": Converted(
        "chatglm", "Glm",
        {
            "head_dim": 12, "rope_parameters": {**HALF, "rope_theta": 10_000.0}, "rms_norm_eps": 1e-5,
            "attention_bias": True,
        },
        published={"seq_length": 128},
    ),
    "olmo2": Converted("olmo2", "Olmo2"),
    "olmo3": Converted("olmo2", "Olmo3", {"num_hidden_layers": 5, "sliding_window": 8, "rope_parameters": YARN}),
    "exaone4": Converted("exaone4", "Exaone4", {"num_hidden_layers": 5, **WINDOW, "sliding_window_pattern": 4}),
    "command-r": Converted("command-r", "Cohere", {"logit_scale": 0.5, "attention_bias": True}),
    "command-r-plus": Converted("command-r", "Cohere", {"logit_scale": 0.5, "use_qk_norm": True}),
    "cohere2": Converted(
        "cohere2", "Cohere2", {"num_hidden_layers": 5, "sliding_window": 8, "logit_scale": 0.5},
        published={"rotary_pct": 1.0},
    ),
    "granite": Converted("granite", "Granite", GRANITE),
    "nemotron": Converted(
        "nemotron", "Nemotron", {"partial_rotary_factor": 0.5, "head_dim": 12, "num_key_value_heads": 1},
    ),
    "smollm3": Converted("smollm3", "SmolLM3", {"num_hidden_layers": 5}),
    "starcoder2": Converted("starcoder2", "Starcoder2", {"sliding_window": None}),
    "seed_oss": Converted("seed_oss", "SeedOss", {"head_dim": 16}),
    "stablelm": Converted("stablelm", "StableLm", {"partial_rotary_factor": 0.5, "use_qkv_bias": True}),
    "stablelm-parallel": Converted(
        "stablelm", "StableLm", {"partial_rotary_factor": 0.5, "use_parallel_residual": True},
    ),
    "internlm3": Converted(
        "llama", "InternLM3", {"head_dim": 12}, "Llama", {"architectures": ["InternLM3ForCausalLM"]},
    ),
    "iquestcoder": Converted(
        "llama", "IQuestCoder", {"head_dim": 12}, "Llama", {"architectures": ["IQuestCoderForCausalLM"]},
    ),
    "jais2": Converted("jais2", "Jais2"),
    "gptneox": Converted(
        "gptneox", "GPTNeoX", {"rope_parameters": {**HALF, "rope_theta": 10_000.0}}, published={"rotary_pct": 0.5},
    ),
    "gptneox-serial": Converted(
        "gptneox", "GPTNeoX", {"rope_parameters": {**HALF, "rope_theta": 10_000.0}, "use_parallel_residual": False},
        published={"rotary_pct": 0.5},
    ),
    "arcee": Converted("arcee", "Arcee", {"rope_parameters": YARN, "head_dim": 20}),
    "ministral3": Converted(
        "mistral3", "Ministral3",
        {
            "head_dim": 12,
            "rope_parameters": {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.5},
        },
    ),
    "ernie4_5": Converted("ernie4_5", "Ernie4_5", {"head_dim": 20}),
    "hunyuan-dense": Converted("hunyuan-dense", "HunYuanDenseV1", {"head_dim": 12}),
    "hunyuan-dense-alpha": Converted(
        "hunyuan-dense", "HunYuanDenseV1",
        {
            "head_dim": 12, "max_position_embeddings": 32768,
            "rope_parameters": {"rope_type": "dynamic", "rope_theta": 10_000.0, "factor": 1.0, "alpha": 100.0},
        },
    ),
}  # fmt: skip


_EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 24}
_DELTA = {
    "head_dim": 32, "linear_num_key_heads": 2, "linear_num_value_heads": 6, "linear_key_head_dim": 12,
    "linear_value_head_dim": 20, "num_hidden_layers": 4,
    "rope_parameters": {**PLAIN, "partial_rotary_factor": 0.25, "mrope_section": [2, 1, 1]},
}  # fmt: skip
# The converter counts a layer that drafts, whose tensors checkpoints may lack.
_DRAFTS = {"mtp_num_hidden_layers": 1}
_DELTA_EXPERTS = {**_EXPERTS, "num_experts": 6, "shared_expert_intermediate_size": 40}
_GRANITE_LAYERS = ["mamba", "attention", "mamba"]
_MAMBA2 = {
    "mamba_n_heads": 4, "mamba_d_head": 24, "mamba_n_groups": 2, "mamba_d_state": 20, "mamba_chunk_size": 16,
    "num_hidden_layers": 3,
}  # fmt: skip
_NEMOTRON_H = {
    "layers_block_type": ["mamba", "mlp", "attention", "mamba", "mlp"], "num_hidden_layers": 5, "mamba_num_heads": 4,
    "mamba_head_dim": 32, "n_groups": 2, "ssm_state_size": 20, "chunk_size": 16, "head_dim": 20, "time_step_min": 1e-9,
}  # fmt: skip
_FALCON = {**FALCON, "mamba_d_ssm": 96, "mamba_rms_norm": True}

HYBRIDS: Mapping[str, Converted] = {
    "granitehybrid": Converted(
        "granitehybrid", "GraniteMoeHybrid",
        {
            **GRANITE, **_MAMBA2, "num_local_experts": 5, "num_experts_per_tok": 2, "shared_intermediate_size": 28,
            "layer_types": _GRANITE_LAYERS,
        },
        published={"layer_types": _GRANITE_LAYERS},
    ),
    "granitehybrid-dense": Converted(
        "granitehybrid", "GraniteMoeHybrid",
        {
            **GRANITE, **_MAMBA2, "num_local_experts": 0, "num_experts_per_tok": 0, "shared_intermediate_size": 28,
            "layer_types": _GRANITE_LAYERS,
        },
        published={"layer_types": _GRANITE_LAYERS},
    ),
    "granite-attention-only": Converted(
        "granite", "GraniteMoeHybrid",
        {
            **GRANITE, **_MAMBA2, "num_local_experts": 0, "num_experts_per_tok": 0, "shared_intermediate_size": 40,
            "layer_types": ["attention"] * 3, "position_embedding_type": "rope",
        },
        published={"layer_types": ["attention"] * 3},
    ),
    "bamba": Converted(
        "granitehybrid", "Bamba", {**_MAMBA2, "attn_layer_indices": [1], "rope_parameters": HALF},
        published={"attn_rotary_emb": 6},
    ),
    "mamba2": Converted(
        "mamba2", "Mamba2", {"num_heads": 4, "head_dim": 24, "state_size": 20, "n_groups": 2, "chunk_size": 16},
        published={"intermediate_size": None},
    ),
    "nemotron_h": Converted(
        "nemotron_h", "NemotronH", _NEMOTRON_H,
        published={
            "hybrid_override_pattern": "M-*M-", "layers_block_type": None, "num_hidden_layers": 5,
            **dict.fromkeys(("num_experts_per_tok", "n_routed_experts", "n_group", "topk_group")),
        },
    ),
    "nemotron_h_moe": Converted(
        "nemotron_h_moe", "NemotronH",
        {
            **_NEMOTRON_H, **_EXPERTS, "layers_block_type": ["mamba", "moe", "attention", "moe", "mamba"],
            "n_routed_experts": 6, "n_group": 2, "topk_group": 1, "moe_shared_expert_intermediate_size": 40,
            "moe_latent_size": 36, "routed_scaling_factor": 1.7,
        },
    ),
    "qwen3next": Converted(
        "qwen3next", "Qwen3Next",
        {**_DELTA, **_DELTA_EXPERTS, "rope_parameters": {**PLAIN, "partial_rotary_factor": 0.25}}, published=_DRAFTS,
    ),
    "qwen35": Converted("qwen35", "Qwen3_5Text", _DELTA, "Qwen3_5", _DRAFTS),
    "qwen35moe": Converted("qwen35moe", "Qwen3_5MoeText", {**_DELTA, **_DELTA_EXPERTS}, "Qwen3_5Moe", _DRAFTS),
    "falcon-h1": Converted("falcon-h1", "FalconH1", {**_MAMBA2, **_FALCON}),
    "lfm2": Converted("lfm2", "Lfm2", LFM2),
    "lfm2moe": Converted("lfm2moe", "Lfm2Moe", {**LFM2, **_EXPERTS, "num_experts": 6, "num_dense_layers": 1}),
}  # fmt: skip
