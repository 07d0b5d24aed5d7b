"""What GGUF metadata say about families with fields of their own: Qwen's hybrids, Gemma 4, LFM2, Apertus and GPT-2."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from gpu_worker.layers.block_traits import NormKind
from gpu_worker.layers.gated_delta_net import GatedDeltaShape
from gpu_worker.layers.layer import LayerTraits, MixerShape
from gpu_worker.layers.mlp import PlainShape
from gpu_worker.models.config import ModelConfig
from gpu_worker.models.gguf_fields import MAX_HEADS, Fields, GGUFFamily, ModelFields, proportional_share, with_rope
from gpu_worker.models.layer_types import FULL, SLIDING
from kernels.activation import Xielu

_CONV = "conv"
# In the order of `Xielu.learned`.
_LEARNED = ("alpha_p", "alpha_n", "beta", "eps")


def _qwen_fields(gguf: ModelFields) -> Fields:
    num_heads, value_dim = gguf.state_heads()
    experts = gguf.integer("expert_count", 0, minimum=0)
    return {
        **gguf.attention(),
        # Those of experts alone need not say how large a dense block would be.
        "intermediate_size": gguf.integer("feed_forward_length", 1 if experts else None),
        "full_attention_interval": gguf.integer("full_attention_interval", 4),
        "partial_rotary_factor": gguf.turning_share(gguf.integer("attention.key_length")),
        "linear_conv_kernel_dim": gguf.integer("ssm.conv_kernel"),
        "linear_key_head_dim": gguf.integer("ssm.state_size"),
        "linear_value_head_dim": value_dim,
        "linear_num_key_heads": gguf.integer("ssm.group_count"),
        "linear_num_value_heads": num_heads,
        **(_qwen_experts(gguf) if experts else {}),
    }


def _qwen_experts(gguf: ModelFields) -> Fields:
    sparse = gguf.has_router
    shared = gguf.tensors.get(f"blk.{sparse.index(True) if True in sparse else 0}.ffn_gate_shexp.weight")
    if shared is None:
        raise gguf.tensor_error("tensor 'ffn_gate_shexp.weight'", "is missing in a layer with experts")
    return {
        **gguf.experts(),
        "shared_expert_intermediate_size": shared.shape[0],
        "norm_topk_prob": gguf.boolean("expert_weights_norm", True),
        "mlp_only_layers": [index for index, is_sparse in enumerate(sparse) if not is_sparse],
    }


def _finish_qwen(gguf: ModelFields, config: ModelConfig) -> ModelConfig:
    """Normalisations are whole here; queries of states may be in order, and value heads stand by turns."""
    by_key_head = any(name.endswith(".ssm_in.weight") for name in gguf.tensors)
    gates_by_key_head = any(name.endswith(".ssm_ba.weight") for name in gguf.tensors)

    def states(mixer: MixerShape | None) -> MixerShape | None:
        if not isinstance(mixer, GatedDeltaShape):
            return mixer
        is_turning = gguf.prefix != "qwen3next" and mixer.sizes.num_value_heads != mixer.sizes.num_key_heads
        return replace(mixer, by_key_head=by_key_head, gates_by_key_head=gates_by_key_head, values_by_turns=is_turning)

    layers = tuple(replace(layer, mixer=states(layer.mixer)) for layer in config.layers)
    config = replace(config, layers=layers, block=replace(config.block, norm=NormKind()))
    return with_rope(gguf, config)


def _gemma4_fields(gguf: ModelFields) -> Fields:
    """Read Gemma 4: layers with a window have heads of their own, and some layers read others' keys."""
    slides = [bool(flag) for flag in gguf.numbers("attention.sliding_window_pattern", gguf.num_layers)]
    kv_heads, inner = gguf.by_layer("attention.head_count_kv"), gguf.by_layer("feed_forward_length")
    num_shared = gguf.integer("attention.shared_kv_layers", 0, minimum=0)
    first_full = slides.index(False) if False in slides else 0
    head_dim, table = gguf.integer("attention.key_length"), gguf.tensors.get("per_layer_token_embd.weight")
    has_experts = gguf.integer("expert_count", 0, minimum=0) > 0
    return {
        "num_key_value_heads": kv_heads[slides.index(True)] if True in slides else kv_heads[0],
        "num_global_key_value_heads": kv_heads[first_full],
        "head_dim": gguf.integer("attention.key_length_swa", head_dim),
        "global_head_dim": head_dim,
        "attention_k_eq_v": f"blk.{first_full}.attn_v.weight" not in gguf.tensors,
        "layer_types": [SLIDING if is_sliding else FULL for is_sliding in slides],
        "sliding_window": gguf.integer("attention.sliding_window"),
        "num_kv_shared_layers": num_shared,
        "intermediate_size": inner[0],
        "use_double_wide_mlp": num_shared > 0 and inner[-1] == 2 * inner[0],
        "hidden_size_per_layer_input": gguf.integer("embedding_length_per_layer_input", 0, minimum=0),
        "vocab_size_per_layer_input": 0 if table is None else table.shape[0],
        "final_logit_softcapping": gguf.optional_number("final_logit_softcapping"),
        "rope_parameters": _gemma4_ropes(gguf, head_dim),
        "enable_moe_block": has_experts,
        **(gguf.experts(top_k="top_k_experts") if has_experts else {}),
    }


def _gemma4_ropes(gguf: ModelFields, head_dim: int) -> Fields:
    full = {
        "rope_type": "proportional",
        "rope_theta": gguf.number("rope.freq_base", 1e6),
        "partial_rotary_factor": proportional_share(gguf, head_dim),
    }
    return {FULL: full, SLIDING: {"rope_type": "default", "rope_theta": gguf.number("rope.freq_base_swa", 1e4)}}


def _lfm2_fields(gguf: ModelFields) -> Fields:
    """Read LFM2: layers without key heads are convolutions."""
    kv_heads = gguf.by_layer("attention.head_count_kv")
    return {
        "num_key_value_heads": max(kv_heads, default=1) or 1,
        "layer_types": [FULL if count else _CONV for count in kv_heads],
        "intermediate_size": gguf.integer("feed_forward_length"),
        "block_auto_adjust_ff_dim": False,
        "conv_L_cache": gguf.integer("shortconv.l_cache"),
        "conv_bias": any(name.endswith(".shortconv.conv.bias") for name in gguf.tensors),
        "norm_eps": gguf.number("attention.layer_norm_rms_epsilon"),
        "rope_theta": gguf.number("rope.freq_base", 1e6),
    }


def _lfm2_moe_fields(gguf: ModelFields) -> Fields:
    return {
        **_lfm2_fields(gguf),
        **gguf.experts(),
        "num_dense_layers": gguf.integer("leading_dense_block_count", 0, minimum=0),
        "routed_scaling_factor": gguf.number("expert_weights_scale", 1.0),
        "use_expert_bias": any(name.endswith(".exp_probs_b.bias") for name in gguf.tensors),
    }


def _apertus_fields(gguf: ModelFields) -> Fields:
    return {
        "num_key_value_heads": gguf.integer("attention.head_count_kv", maximum=MAX_HEADS),
        "attention_bias": gguf.has_qkv_bias,
        "intermediate_size": gguf.integer("feed_forward_length"),
        "rope_theta": gguf.number("rope.freq_base", 10_000.0),
    }


def _finish_apertus(gguf: ModelFields, config: ModelConfig) -> ModelConfig:
    """Give each layer its function; the rotation's scaling is a tensor."""
    numbers = zip(*(_numbers_by_layer(gguf, f"xielu.{name}") for name in _LEARNED), strict=True)
    layers = tuple(
        _with_function(layer, Xielu.learned(*learned)) for layer, learned in zip(config.layers, numbers, strict=True)
    )
    return with_rope(gguf, replace(config, layers=layers))


def _with_function(layer: LayerTraits, activation: Xielu) -> LayerTraits:
    assert isinstance(layer.feed_forward, PlainShape)
    return replace(layer, feed_forward=replace(layer.feed_forward, activation=activation))


def _numbers_by_layer(gguf: ModelFields, field: str) -> list[float]:
    metadata, count = gguf.file.metadata, gguf.num_layers
    value = metadata.fields.get(field)
    if isinstance(value, float) and np.isfinite(value):
        return [value] * count
    return [float(number) for number in metadata.numbers(field, count)]


def _gpt2_fields(gguf: ModelFields) -> Fields:
    return {
        "n_embd": gguf.integer("embedding_length"),
        "n_head": gguf.integer("attention.head_count", maximum=MAX_HEADS),
        "n_layer": gguf.num_layers,
        "n_positions": gguf.integer("context_length"),
        "n_inner": gguf.integer("feed_forward_length"),
        "layer_norm_epsilon": gguf.eps,
    }


def _finish_gpt2(gguf: ModelFields, config: ModelConfig) -> ModelConfig:
    """Matrices stand upright here."""
    names = replace(config.block.names, is_transposed=False)
    return replace(config, block=replace(config.block, names=names))


OWN_FAMILIES: Mapping[str, GGUFFamily] = {
    "qwen3next": GGUFFamily(_qwen_fields, _finish_qwen),
    "qwen35": GGUFFamily(_qwen_fields, _finish_qwen),
    "qwen35moe": GGUFFamily(_qwen_fields, _finish_qwen),
    "gemma4": GGUFFamily(_gemma4_fields),
    "apertus": GGUFFamily(_apertus_fields, _finish_apertus),
    "gpt2": GGUFFamily(_gpt2_fields, _finish_gpt2),
    "lfm2": GGUFFamily(_lfm2_fields, with_rope),
    "lfm2moe": GGUFFamily(_lfm2_moe_fields, with_rope),
}
"""Files of these architectures."""
