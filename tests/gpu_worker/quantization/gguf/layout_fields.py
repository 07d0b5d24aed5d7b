"""The metadata that llama.cpp's converter writes of the families in `layout_files`."""

from __future__ import annotations

from typing import Any

import gguf

from tests.gpu_worker.quantization.gguf.converted import Converted

_ATTENDING = ("attention", "full_attention")
_CENTERED = ("command-r", "nemotron", "phi2", "gptneox", "stablelm")


def add_fields(writer: Any, config: Any, case: Converted) -> None:
    """Add what all families have, then what some have."""
    writer.add_context_length(getattr(config, "max_position_embeddings", None) or 1 << 20)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    names = ("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_eps")
    eps = next(value for name in names if (value := getattr(config, name, None)) is not None)
    (writer.add_layer_norm_eps if case.architecture in _CENTERED else writer.add_layer_norm_rms_eps)(eps)
    if case.architecture == "mamba2":
        writer.add_head_count(0)
        writer.add_feed_forward_length(0)
    else:
        _add_attention(writer, config, case)
    if (state_size := _first(config, "ssm_state_size", "mamba_d_state", "state_size")) is not None:
        _add_states(writer, config, case, state_size)
    if (num_experts := _first(config, "n_routed_experts", "num_local_experts", "moe_num_experts", "num_experts")) and (
        case.architecture not in ("nemotron_h", "arcee")
    ):
        _add_experts(writer, config, case, num_experts)
    _add_factors(writer, config, case)


def _first(config: Any, *names: str) -> Any:
    return next((value for name in names if (value := getattr(config, name, None)) is not None), None)


def _layers(config: Any) -> list[str]:
    return list(getattr(config, "layers_block_type", None) or getattr(config, "layer_types", None) or [])


def _add_attention(writer: Any, config: Any, case: Converted) -> None:
    num_heads, kinds = config.num_attention_heads, _layers(config)
    num_kv_heads = getattr(config, "num_key_value_heads", None) or num_heads
    is_hybrid = case.architecture in ("granitehybrid", "nemotron_h", "nemotron_h_moe")
    writer.add_head_count(num_heads)
    if is_hybrid:
        writer.add_head_count_kv([num_kv_heads if kind in _ATTENDING else 0 for kind in kinds])
    elif case.architecture != "gptneox":
        writer.add_head_count_kv(num_kv_heads)
    if case.architecture.startswith("nemotron_h"):
        sizes = {"mlp": config.intermediate_size, "moe": config.moe_intermediate_size}
        writer.add_feed_forward_length([sizes.get(kind, 0) for kind in kinds])
    else:
        writer.add_feed_forward_length(_first(config, "intermediate_size_mlp", "intermediate_size"))
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // num_heads
    if head_dim * num_heads != config.hidden_size or is_hybrid:
        writer.add_key_length(head_dim)
        writer.add_value_length(head_dim)
    _add_rope(writer, getattr(config, "rope_parameters", None), head_dim)
    if case.architecture == "llama4":
        writer.add_key_length(head_dim)
        writer.add_value_length(head_dim)
    if case.architecture == "exaone-moe":
        writer.add_sliding_window(config.sliding_window)
        writer.add_sliding_window_pattern([kind == "sliding_attention" for kind in kinds])


def _add_rope(writer: Any, rope: Any, head_dim: int) -> None:
    if rope is None:
        return
    writer.add_rope_freq_base(rope["rope_theta"])
    writer.add_rope_dimension_count(int(head_dim * rope.get("partial_rotary_factor", 1.0)))
    if rope["rope_type"] == "yarn":
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(rope["factor"])
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    if "mscale_all_dim" in rope:
        writer.add_rope_scaling_yarn_log_mul(rope["mscale_all_dim"])
        writer.add_attn_temperature_scale(rope["llama_4_scaling_beta"])


def _add_states(writer: Any, config: Any, case: Converted, state_size: int) -> None:
    num_heads = _first(config, "mamba_num_heads", "mamba_n_heads", "num_heads")
    head_dim = _first(config, "mamba_head_dim", "mamba_d_head", "head_dim")
    writer.add_ssm_conv_kernel(_first(config, "conv_kernel", "mamba_d_conv"))
    writer.add_ssm_state_size(state_size)
    writer.add_ssm_group_count(_first(config, "n_groups", "mamba_n_groups"))
    writer.add_ssm_inner_size(num_heads * head_dim)
    writer.add_ssm_time_step_rank(num_heads)
    writer.add_rope_scaling_finetuned(case.family == "Bamba")


def _add_experts(writer: Any, config: Any, case: Converted, num_experts: int) -> None:
    top_k = _first(config, "moe_k", "moe_topk", "num_experts_per_tok")
    writer.add_expert_count(num_experts)
    writer.add_expert_used_count(top_k[0] if isinstance(top_k, list) else top_k)
    if case.architecture != "granitehybrid":
        size = getattr(config, "moe_intermediate_size", None) or config.intermediate_size
        writer.add_expert_feed_forward_length(size[0] if isinstance(size, list) else size)
    if getattr(config, "routed_scaling_factor", None) is not None:
        writer.add_expert_weights_scale(config.routed_scaling_factor)
        writer.add_expert_weights_norm(config.norm_topk_prob)
    if (num_groups := getattr(config, "n_group", None)) is not None:
        writer.add_expert_group_count(num_groups)
        writer.add_expert_group_used_count(config.topk_group)
    if case.architecture in ("dots1", "minimax-m2", "exaone-moe"):
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
    if getattr(config, "moe_latent_size", None):
        writer.add_moe_latent_size(config.moe_latent_size)
    if case.architecture == "llama4":
        writer.add_interleave_moe_layer_step(config.interleave_moe_layer_step)


def _add_factors(writer: Any, config: Any, case: Converted) -> None:
    if case.architecture == "command-r":
        writer.add_logit_scale(config.logit_scale)
    if case.architecture in ("gptneox", "stablelm"):
        writer.add_parallel_residual(config.use_parallel_residual)
    if case.family == "GraniteMoeHybrid":
        writer.add_attention_scale(config.attention_multiplier)
        writer.add_embedding_scale(config.embedding_multiplier)
        writer.add_residual_scale(config.residual_multiplier)
        writer.add_logit_scale(config.logits_scaling)
