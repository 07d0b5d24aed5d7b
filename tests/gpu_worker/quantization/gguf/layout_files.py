"""The files that llama.cpp's converter makes of small random models, written by formula with the `gguf` package.

`test_llama_cpp_files` shows that the converter writes what is read; these need only the package.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt

from tests.gpu_worker.quantization.gguf.converted import Converted, random_model
from tests.gpu_worker.quantization.gguf.converted_dense import DENSE
from tests.gpu_worker.quantization.gguf.converted_hybrids import HYBRIDS
from tests.gpu_worker.quantization.gguf.converted_mixtures import MIXTURES
from tests.gpu_worker.quantization.gguf.written_file import names_of, written

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


Array = npt.NDArray[np.float32]
Parts = Iterator[tuple[str, Array]]

# A checkpoint of every family that GGUF files are read of, for llama.cpp's own converter.
CASES: Mapping[str, Converted] = MappingProxyType({**DENSE, **MIXTURES, **HYBRIDS})

# Architectures whose queries and keys are reordered for a rotation of neighbours.
_NEIGHBOURS = ("arcee", "mistral3", "granitehybrid")
_MAMBA = {"A_log": "ssm_a", "D": "ssm_d", "dt_bias": "ssm_dt.bias"}


def write_layout(path: Path, case: Converted) -> Any:
    """Write a random model in float32, and return it."""
    oracle = random_model(case)
    config = oracle.config
    stored = names_of(case.architecture, config.num_hidden_layers)
    biases = [(name, buffer) for name, buffer in oracle.named_buffers() if name.endswith("correction_bias")]
    with written(path, case.architecture) as writer:
        add_fields(writer, config, case)
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre("gpt-2")
        writer.add_token_list([f"t{index}" for index in range(config.vocab_size)])
        writer.add_token_merges([])
        for name, tensor in [*oracle.named_parameters(), *biases]:
            for own, array in _transformed(name, tensor.detach().float().numpy(), config, case):
                writer.add_tensor(stored(own), np.ascontiguousarray(array))
    return oracle


def _transformed(name: str, array: Array, config: Any, case: Converted) -> Parts:
    """Return a tensor as its family's converter writes it, under names that the package's table knows."""
    parts = name.split(".")
    layer = f"blk.{parts[2]}." if parts[1] == "layers" else ""
    if case.architecture.startswith(("nemotron_h", "mamba2")):
        name = name.replace("model.", "backbone.", 1)
    if name.endswith("e_score_correction_bias"):
        yield f"{layer}exp_probs_b.bias", array
    elif ".experts." in name:
        yield from _experts(name, layer, array, case)
    elif "shared_mlp." in name and "_linear" in name:
        yield from _granite_shared(name, layer, array, config)
    elif parts[-1] in _MAMBA or ".conv1d." in name or name.endswith(("mixer.norm.weight", "mamba.norm.weight")):
        yield from _mamba(name, layer, array, config)
    else:
        if case.architecture == "nemotron" and name.endswith("norm.weight"):
            array = array + 1
        if parts[-2] in ("q_proj", "k_proj") and case.architecture in _NEIGHBOURS:
            array = _by_neighbours(array, config.num_attention_heads, config.num_key_value_heads, parts[-2])
        if "query_key_value" in name:
            array = _by_kind(array, config.num_attention_heads)
        yield name.replace(".router.weight", ".router.layer.weight") if "sparse" in name else name, array


def _by_neighbours(array: Array, num_heads: int, num_kv_heads: int, part: str) -> Array:
    halves = array.reshape(num_heads if part == "q_proj" else num_kv_heads, 2, -1, *array.shape[1:])
    return halves.swapaxes(1, 2).reshape(array.shape)


def _by_kind(array: Array, num_heads: int) -> Array:
    """Put all queries before all keys before all values, which lie by heads."""
    return array.reshape(num_heads, 3, -1, *array.shape[1:]).swapaxes(0, 1).reshape(array.shape)


def _experts(name: str, layer: str, array: Array, case: Converted) -> Parts:
    """Write gates and up projections apart; Llama 4's checkpoints have all matrices transposed."""
    if case.architecture == "llama4":
        array = array.swapaxes(1, 2)
    if "gate_up_proj" in name:
        gate, up = np.split(array, 2, axis=1)
        yield f"{layer}ffn_gate_exps.weight", gate
        yield f"{layer}ffn_up_exps.weight", up
    else:
        yield f"{layer}ffn_{'down' if 'down_proj' in name else 'up'}_exps.weight", array


def _granite_shared(name: str, layer: str, array: Array, config: Any) -> Parts:
    end = "_shexp" if config.num_local_experts else ""
    if "output_linear" in name:
        yield f"{layer}ffn_down{end}.weight", array
        return
    gate, up = np.split(array, 2)
    yield f"{layer}ffn_gate{end}.weight", gate
    yield f"{layer}ffn_up{end}.weight", up


def _mamba(name: str, layer: str, array: Array, config: Any) -> Parts:
    """Return a tensor of a mixer: rates are negative, vectors of heads and of groups have rows."""
    part = name.split(".")[-1]
    if part == "A_log":
        array = -np.exp(array)
    if part in ("A_log", "D"):
        array = array[:, None]
    if part in _MAMBA:
        yield f"{layer}{_MAMBA[part]}", array
    elif ".conv1d." in name:
        yield f"{layer}ssm_conv1d.{part}", array.squeeze()
    else:
        groups = getattr(config, "n_groups", None) or config.mamba_n_groups
        yield f"{layer}ssm_norm.weight", array.reshape(groups, -1)
