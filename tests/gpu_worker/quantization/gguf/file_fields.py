"""The metadata that llama.cpp's converter writes of a model of `transformers`, by the `gguf` package."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import gguf
import numpy as np

from tests.gpu_worker.quantization.gguf.converted import Converted

_ATTENDING = ("attention", "full_attention")
_CENTERED = ("command-r", "cohere2", "nemotron", "phi2", "gptneox", "stablelm", "starcoder2")
_SIGMOID = ("dots1", "minimax_m2", "exaone_moe", "glm4_moe", "deepseek_v3", "lfm2_moe")
_FACTORS = ("granite", "granitemoe")


def add_fields(writer: Any, config: Any, case: Converted) -> None:
    """Add what all families have, then what some have."""
    writer.add_context_length(getattr(config, "max_position_embeddings", None) or 1 << 20)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers + case.num_drafting)
    if case.num_drafting:
        writer.add_nextn_predict_layers(case.num_drafting)
    eps = _first(config, "rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_epsilon", "norm_eps")
    (writer.add_layer_norm_eps if case.architecture in _CENTERED else writer.add_layer_norm_rms_eps)(eps)
    if case.architecture == "mamba2":
        writer.add_head_count(0)
        writer.add_feed_forward_length(0)
    elif case.architecture == "gemma4":
        _add_gemma4(writer, config, case.options)
    else:
        _add_attention(writer, config, case)
    if (state_size := _first(config, "ssm_state_size", "mamba_d_state", "state_size")) is not None:
        _add_states(writer, config, case, state_size)
    if case.architecture in ("qwen3next", "qwen35", "qwen35moe"):
        _add_delta_net(writer, config)
    num_experts = _first(config, "n_routed_experts", "num_local_experts", "moe_num_experts", "num_experts")
    if num_experts and getattr(config, "enable_moe_block", True) and case.architecture not in ("nemotron_h", "arcee"):
        _add_experts(writer, config, case, num_experts)
    _add_own(writer, config, case)


def _first(config: Any, *names: str) -> Any:
    return next((value for name in names if (value := getattr(config, name, None)) is not None), None)


def _layers(config: Any) -> list[str]:
    return list(getattr(config, "layers_block_type", None) or getattr(config, "layer_types", None) or [])


def _add_attention(writer: Any, config: Any, case: Converted) -> None:
    num_heads, kinds = config.num_attention_heads, _layers(config)
    num_kv_heads = getattr(config, "num_key_value_heads", None) or num_heads
    is_hybrid = case.architecture in ("granitehybrid", "nemotron_h", "nemotron_h_moe")
    writer.add_head_count(num_heads)
    if is_hybrid or case.architecture.startswith("lfm2"):
        writer.add_head_count_kv([num_kv_heads if kind in _ATTENDING else 0 for kind in kinds])
    elif case.architecture != "gptneox":
        writer.add_head_count_kv(num_kv_heads)
    if case.architecture.startswith("nemotron_h"):
        sizes = {"mlp": config.intermediate_size, "moe": config.moe_intermediate_size}
        writer.add_feed_forward_length([sizes.get(kind, 0) for kind in kinds])
    elif (inner_size := _first(config, "intermediate_size_mlp", "intermediate_size")) is not None:
        writer.add_feed_forward_length(inner_size)
    if case.architecture == "deepseek2":
        _add_latent(writer, config, case)
        return
    own_dim = getattr(config, "head_dim", None)
    head_dim = own_dim or config.hidden_size // num_heads
    if own_dim is not None or is_hybrid:
        writer.add_key_length(head_dim)
        writer.add_value_length(head_dim)
    if (rope := getattr(config, "rope_parameters", None)) is not None:
        rope = rope.get("full_attention", rope)
        writer.add_rope_dimension_count(int(head_dim * rope.get("partial_rotary_factor", 1.0)))
        _add_rope(writer, rope)
        if rope["rope_type"] == "llama3":
            writer.add_tensor("rope_freqs.weight", _llama3_divisors(rope, head_dim))
        if "mscale_all_dim" in rope:
            writer.add_rope_scaling_yarn_log_mul(rope["mscale_all_dim"])
            writer.add_attn_temperature_scale(rope["llama_4_scaling_beta"])


def _add_rope(writer: Any, rope: Mapping[str, Any]) -> None:
    writer.add_rope_freq_base(rope["rope_theta"])
    if rope["rope_type"] in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(rope["rope_type"]))
        writer.add_rope_scaling_factor(rope["factor"])
    if rope["rope_type"] == "yarn":
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])


def _llama3_divisors(rope: dict[str, Any], head_dim: int) -> Any:
    """How much longer Llama 3's scaling makes each wavelength, as converters of such models write it."""
    wavelengths = 2 * np.pi * rope["rope_theta"] ** (np.arange(0, head_dim, 2) / head_dim)
    turns = rope["original_max_position_embeddings"] / wavelengths
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    kept = np.clip((turns - low) / (high - low), 0, 1)
    return (1 / (kept + (1 - kept) / rope["factor"])).astype(np.float32)


def _add_latent(writer: Any, config: Any, case: Converted) -> None:
    """Newer files name the sizes of kept vectors, older ones those of heads alone."""
    head_dim = config.qk_nope_head_dim + config.qk_rope_head_dim
    if config.q_lora_rank is not None:
        writer.add_q_lora_rank(config.q_lora_rank)
    writer.add_kv_lora_rank(config.kv_lora_rank)
    writer.add_rope_dimension_count(config.qk_rope_head_dim)
    if case.whole_up:
        writer.add_key_length(head_dim)
        writer.add_value_length(config.v_head_dim)
    else:
        writer.add_key_length(config.kv_lora_rank + config.qk_rope_head_dim)
        writer.add_value_length(config.kv_lora_rank)
        writer.add_key_length_mla(head_dim)
        writer.add_value_length_mla(config.v_head_dim)
    _add_rope(writer, config.rope_parameters)
    if config.rope_parameters.get("mscale_all_dim"):
        writer.add_rope_scaling_yarn_log_mul(0.1 * config.rope_parameters["mscale_all_dim"])


def _add_gemma4(writer: Any, config: Any, options: Mapping[str, Any]) -> None:
    """Take what layers differ in from the options: the configuration has it by layer."""
    full_dim, dim = options["global_head_dim"], options["head_dim"]
    heads = options.get("num_key_value_heads", 2)
    slides = [kind == "sliding_attention" for kind in config.layer_types]
    shared, inner = config.num_kv_shared_layers, config.intermediate_size
    first = config.num_hidden_layers - shared if config.use_double_wide_mlp else config.num_hidden_layers
    writer.add_head_count(config.num_attention_heads)
    writer.add_feed_forward_length([inner if index < first else 2 * inner for index in range(len(slides))])
    full = options.get("num_global_key_value_heads", heads)
    writer.add_head_count_kv([heads if is_sliding else full for is_sliding in slides])
    writer.add_shared_kv_layers(shared)
    writer.add_embedding_length_per_layer_input(config.hidden_size_per_layer_input or 0)
    writer.add_sliding_window(config.sliding_window)
    writer.add_sliding_window_pattern(slides)
    writer.add_key_length(full_dim)
    writer.add_value_length(full_dim)
    writer.add_key_length_swa(dim)
    writer.add_value_length_swa(dim)
    writer.add_rope_dimension_count(full_dim)
    writer.add_rope_dimension_count_swa(dim)
    ropes = config.rope_parameters
    writer.add_rope_freq_base(ropes["full_attention"]["rope_theta"])
    writer.add_rope_freq_base_swa(ropes["sliding_attention"]["rope_theta"])
    # Dimensions that do not turn are divided by more than any number.
    half, turning = full_dim // 2, int(full_dim * ropes["full_attention"]["partial_rotary_factor"] / 2)
    writer.add_tensor("rope_freqs.weight", np.array([1.0] * turning + [1e30] * (half - turning), np.float32))


def _add_states(writer: Any, config: Any, case: Converted, state_size: int) -> None:
    num_heads = _first(config, "mamba_num_heads", "mamba_n_heads", "num_heads")
    head_dim = _first(config, "mamba_head_dim", "mamba_d_head", "head_dim")
    writer.add_ssm_conv_kernel(_first(config, "conv_kernel", "mamba_d_conv"))
    writer.add_ssm_state_size(state_size)
    writer.add_ssm_group_count(_first(config, "n_groups", "mamba_n_groups"))
    writer.add_ssm_inner_size(num_heads * head_dim)
    writer.add_ssm_time_step_rank(num_heads)
    writer.add_rope_scaling_finetuned(case.family == "Bamba")


def _add_delta_net(writer: Any, config: Any) -> None:
    writer.add_ssm_conv_kernel(config.linear_conv_kernel_dim)
    writer.add_ssm_state_size(config.linear_key_head_dim)
    writer.add_ssm_group_count(config.linear_num_key_heads)
    writer.add_ssm_time_step_rank(config.linear_num_value_heads)
    writer.add_ssm_inner_size(config.linear_value_head_dim * config.linear_num_value_heads)
    writer.add_full_attention_interval(config.layer_types.index("full_attention") + 1)
    if "qwen3_5" in config.model_type:
        writer.add_rope_dimension_sections([11, 11, 10, 0])
    if getattr(config, "shared_expert_intermediate_size", None):
        writer.add_expert_shared_feed_forward_length(config.shared_expert_intermediate_size)


def _add_experts(writer: Any, config: Any, case: Converted, num_experts: int) -> None:
    top_k = _first(config, "moe_k", "moe_topk", "top_k_experts", "num_experts_per_tok")
    writer.add_expert_count(num_experts)
    writer.add_expert_used_count(top_k[0] if isinstance(top_k, list) else top_k)
    if case.architecture != "granitehybrid":
        size = getattr(config, "moe_intermediate_size", None) or config.intermediate_size
        writer.add_expert_feed_forward_length(size[0] if isinstance(size, list) else size)
    if getattr(config, "routed_scaling_factor", None) is not None:
        writer.add_expert_weights_scale(config.routed_scaling_factor)
        writer.add_expert_weights_norm(getattr(config, "norm_topk_prob", False))
    if (num_groups := getattr(config, "n_group", None)) is not None:
        writer.add_expert_group_count(num_groups)
        writer.add_expert_group_used_count(config.topk_group)
    if config.model_type in (*_SIGMOID, "deepseek_v2"):
        kinds = gguf.ExpertGatingFuncType
        writer.add_expert_gating_func(kinds.SIGMOID if config.model_type in _SIGMOID else kinds.SOFTMAX)
    if getattr(config, "moe_latent_size", None):
        writer.add_moe_latent_size(config.moe_latent_size)
    if case.architecture == "llama4":
        writer.add_interleave_moe_layer_step(config.interleave_moe_layer_step)


def _add_own(writer: Any, config: Any, case: Converted) -> None:
    """Add windows, factors and bounds, where files of the architecture have them."""
    _add_windows(writer, config, case.architecture)
    architecture = case.architecture
    for name, add in (
        ("attn_logit_softcapping", writer.add_attn_logit_softcapping),
        ("final_logit_softcapping", writer.add_final_logit_softcapping),
    ):
        if getattr(config, name, None):
            add(getattr(config, name))
    if architecture in ("command-r", "cohere2"):
        writer.add_logit_scale(config.logit_scale)
    if architecture in ("gptneox", "stablelm"):
        writer.add_parallel_residual(config.use_parallel_residual)
    if architecture in _FACTORS or case.family == "GraniteMoeHybrid":
        writer.add_attention_scale(config.attention_multiplier)
        writer.add_embedding_scale(config.embedding_multiplier)
        writer.add_residual_scale(config.residual_multiplier)
        writer.add_logit_scale(config.logits_scaling)
    if architecture.startswith("lfm2"):
        writer.add_vocab_size(config.vocab_size)
        writer.add_shortconv_l_cache(config.conv_L_cache)
        if hasattr(config, "num_dense_layers"):
            writer.add_leading_dense_block_count(config.num_dense_layers)


def _add_windows(writer: Any, config: Any, architecture: str) -> None:
    if architecture in ("gemma2", "gemma3", "cohere2", "gpt-oss"):
        writer.add_sliding_window(config.sliding_window)
    elif architecture in ("olmo2", "exaone4", "exaone-moe") and getattr(config, "sliding_window", None) is not None:
        writer.add_sliding_window(config.sliding_window)
        writer.add_sliding_window_pattern([kind == "sliding_attention" for kind in config.layer_types])
    elif architecture == "phi3":
        _add_phi3(writer, config)


def _add_phi3(writer: Any, config: Any) -> None:
    original, rope = config.original_max_position_embeddings, config.rope_parameters
    writer.add_sliding_window(config.sliding_window or 0)
    writer.add_rope_scaling_orig_ctx_len(original)
    if rope["rope_type"] == "longrope":
        growth = np.log(config.max_position_embeddings / original) / np.log(original)
        writer.add_rope_scaling_attn_factors(float(np.sqrt(1 + growth)))
        for name in ("short", "long"):
            writer.add_tensor(f"rope_factors_{name}.weight", np.array(rope[f"{name}_factor"], np.float32))
