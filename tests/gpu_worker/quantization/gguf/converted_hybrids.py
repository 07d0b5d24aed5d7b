"""Checkpoints of families whose layers keep states, for llama.cpp's own converter."""

from __future__ import annotations

from collections.abc import Mapping

from tests.gpu_worker.quantization.gguf.converted import FALCON, GRANITE, HALF, LFM2, PLAIN, Converted

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
