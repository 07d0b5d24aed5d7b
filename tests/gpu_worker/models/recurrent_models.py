"""Small random models with recurrent layers, made by `transformers`, which is the oracle."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from tests.gpu_worker.models.families.random_models import case
from tests.gpu_worker.models.variants import SIZES, new_model, randomize

DELTA = {
    "head_dim": 32, "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 12,
    "linear_value_head_dim": 20, "num_hidden_layers": 4,
}  # fmt: skip

EXPERTS = {
    **DELTA, "num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 40,
}  # fmt: skip

MAMBA2 = {
    "mamba_n_heads": 6, "mamba_d_head": 12, "mamba_d_ssm": 72, "mamba_n_groups": 3, "mamba_d_state": 20,
    "mamba_chunk_size": 16, "num_hidden_layers": 3,
}  # fmt: skip
NEMOTRON = {
    "layers_block_type": ["linear_attention", "mlp", "full_attention", "linear_attention", "mlp"],
    "num_hidden_layers": 5, "mamba_num_heads": 6, "mamba_head_dim": 12, "n_groups": 3, "ssm_state_size": 20,
    "chunk_size": 16, "head_dim": 20,
    # `transformers` bounds the steps of prompts by it, but not those of decodes; others do neither.
    "time_step_min": 1e-9,
}  # fmt: skip
BAMBA = {name: value for name, value in MAMBA2.items() if name != "mamba_d_ssm"} | {"mamba_d_head": "auto"}
GRANITE = {
    **BAMBA, "mamba_n_heads": 4, "mamba_n_groups": 2,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"], "shared_intermediate_size": 40,
    "num_experts_per_tok": 2, "attention_multiplier": 0.2, "residual_multiplier": 0.7, "embedding_multiplier": 3.0,
    "logits_scaling": 0.8,
}  # fmt: skip
FACTORS = {
    "lm_head_multiplier": 0.7, "embedding_multiplier": 3.1, "mlp_multipliers": [0.8, 1.3], "key_multiplier": 0.6,
    "attention_in_multiplier": 1.4, "attention_out_multiplier": 0.7, "ssm_multipliers": [0.6, 1.3, 0.9, 1.1, 0.8],
    "ssm_in_multiplier": 1.2, "ssm_out_multiplier": 0.5,
}  # fmt: skip

CASES = {
    "nemotron_h": case("NemotronH", NEMOTRON),
    "nemotron_h-biases": case("NemotronH", NEMOTRON, use_bias=True, mlp_bias=True, use_conv_bias=False),
    "nemotron_h-experts": case(
        "NemotronH", NEMOTRON, layers_block_type=["linear_attention", "moe", "full_attention", "moe", "mlp"],
        n_routed_experts=6, num_experts_per_tok=2, n_group=2, moe_intermediate_size=24,
        moe_shared_expert_intermediate_size=40, moe_latent_size=36, routed_scaling_factor=1.7,
    ),
    "bamba": case("Bamba", BAMBA, mamba_n_heads=4, mamba_n_groups=1, attn_layer_indices=[1]),
    "granite_moe_hybrid": case("GraniteMoeHybrid", GRANITE, num_local_experts=5),
    "granite_moe_hybrid-dense": case("GraniteMoeHybrid", GRANITE, num_local_experts=0, position_embedding_type="rope"),
    "mamba2": case("Mamba2", num_heads=4, head_dim=32, state_size=20, n_groups=2, chunk_size=16, use_bias=True),
    "falcon_h1": case("FalconH1", MAMBA2, FACTORS, mamba_rms_norm=True),
    "falcon_h1-options": case(
        "FalconH1", MAMBA2, mamba_rms_norm=False, mamba_proj_bias=True, projectors_bias=True, attention_bias=True,
        mlp_bias=True, mamba_conv_bias=False, mamba_d_conv=3, time_step_limit=(0.1, 0.9),
        ssm_multipliers=[0.6, 1.3, 0.9, 1.1, 0.8], key_multiplier=0.5, ssm_out_multiplier=0.5,
        attention_out_multiplier=0.7, num_key_value_heads=1, tie_word_embeddings=True,
    ),
    "lfm2": case("Lfm2", layer_types=["conv", "full_attention", "conv"], block_multiple_of=8, conv_bias=True),
    "qwen3_next": case("Qwen3Next", EXPERTS, mlp_only_layers=[1]),
    "qwen3_5_moe": case("Qwen3_5MoeText", EXPERTS, model="Qwen3_5Moe"),
    "qwen3_5": case("Qwen3_5Text", DELTA, model="Qwen3_5"),
    "qwen3_5-options": case(
        "Qwen3_5Text", DELTA, linear_num_value_heads=2, linear_conv_kernel_dim=3,
        layer_types=["full_attention", "linear_attention", "linear_attention"], num_hidden_layers=3,
        num_key_value_heads=1, tie_word_embeddings=True, attention_bias=True,
        rope_parameters={"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.5}, model="Qwen3_5",
    ),
}  # fmt: skip


def save_case(name: str, directory: Path, **options: Any) -> Any:
    """Save a random model of a case, and return it."""
    case = CASES[name]
    model = new_model(case.family, {**SIZES, **case.options, **options}, seed=sum(name.encode()), model=case.model)
    randomize(model)
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if ".experts." in parameter_name:
                parameter.normal_(0, 1.0 / parameter.shape[-1] ** 0.5)
            elif parameter_name == "lm_head.weight":
                # Rounding grows with the logits, which need not be large.
                parameter.mul_(0.35)
            # These families store weights less one.
            if case.family.startswith("Qwen3") and "norm" in parameter_name and "linear_attn" not in parameter_name:
                parameter.sub_(1)
    model.save_pretrained(directory)
    return model
