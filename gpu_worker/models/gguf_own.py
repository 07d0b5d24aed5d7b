"""What GGUF metadata say about families with fields of their own: Qwen's hybrids, Gemma 4, LFM2, Apertus and GPT-2."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType

import numpy as np

from gpu_worker.layers.block_traits import NormKind
from gpu_worker.layers.gated_delta_net import GatedDeltaShape
from gpu_worker.layers.layer import LayerTraits, MixerShape
from gpu_worker.layers.plain_mlp import PlainShape
from gpu_worker.models.config import ModelConfig
from gpu_worker.models.gguf_fields import (
    MAX_HEADS,
    Fields,
    GGUFFamily,
    by_layer,
    has_qkv_bias,
    layer_parts,
    num_layers,
    read_eps,
    state_heads,
    with_rope,
)
from gpu_worker.models.gguf_rope import proportional_share
from gpu_worker.quantization.gguf.errors import GGUFError
from gpu_worker.quantization.gguf.file import GGUFFile
from kernels.activation import Xielu

_FULL, _SLIDING, _CONV = "full_attention", "sliding_attention", "conv"
# In the order of `Xielu.learned`. These fields have no architecture before their names.
_LEARNED = ("alpha_p", "alpha_n", "beta", "eps")


def _qwen_fields(file: GGUFFile, prefix: str) -> Fields:
    """Read Qwen's hybrids: every so many layers one attends."""
    metadata, (num_heads, value_dim) = file.metadata, state_heads(file, prefix)
    head_dim = metadata.integer(f"{prefix}.attention.key_length")
    experts = metadata.integer(f"{prefix}.expert_count", 0, minimum=0)
    rotary_dim = metadata.integer(f"{prefix}.rope.dimension_count", head_dim)
    return {
        "num_key_value_heads": metadata.integer(f"{prefix}.attention.head_count_kv", maximum=MAX_HEADS),
        "head_dim": head_dim,
        # Those of experts alone need not say how large a dense block would be.
        "intermediate_size": metadata.integer(f"{prefix}.feed_forward_length", 1 if experts else None),
        "full_attention_interval": metadata.integer(f"{prefix}.full_attention_interval", 4),
        # Half a dimension more, so that the product is not rounded below the number.
        "partial_rotary_factor": min(1.0, (rotary_dim + 0.5) / head_dim),
        "rope_theta": metadata.number(f"{prefix}.rope.freq_base", 10_000.0),
        "linear_conv_kernel_dim": metadata.integer(f"{prefix}.ssm.conv_kernel"),
        "linear_key_head_dim": metadata.integer(f"{prefix}.ssm.state_size"),
        "linear_value_head_dim": value_dim,
        "linear_num_key_heads": metadata.integer(f"{prefix}.ssm.group_count"),
        "linear_num_value_heads": num_heads,
        **(_qwen_experts(file, prefix, experts) if experts else {}),
    }


def _qwen_experts(file: GGUFFile, prefix: str, num_experts: int) -> Fields:
    metadata, count = file.metadata, num_layers(file, prefix)
    sparse = [f"blk.{index}.ffn_gate_inp.weight" in file.tensors for index in range(count)]
    shared = file.tensors.get(f"blk.{sparse.index(True) if True in sparse else 0}.ffn_gate_shexp.weight")
    if shared is None:
        raise GGUFError(file.path, "tensor 'ffn_gate_shexp.weight'", "is missing in a layer with experts")
    return {
        "num_experts": num_experts,
        "num_experts_per_tok": metadata.integer(f"{prefix}.expert_used_count"),
        "moe_intermediate_size": metadata.integer(f"{prefix}.expert_feed_forward_length"),
        "shared_expert_intermediate_size": shared.shape[0],
        "norm_topk_prob": metadata.boolean(f"{prefix}.expert_weights_norm", True),
        "mlp_only_layers": [index for index, is_sparse in enumerate(sparse) if not is_sparse],
    }


def _finish_qwen(file: GGUFFile, prefix: str, config: ModelConfig) -> ModelConfig:
    """Normalisations are whole here; queries of states may be in order, and value heads stand by turns."""
    by_key_head = any(name.endswith(".ssm_in.weight") for name in file.tensors)
    gates_by_key_head = any(name.endswith(".ssm_ba.weight") for name in file.tensors)

    def states(mixer: MixerShape | None) -> MixerShape | None:
        if not isinstance(mixer, GatedDeltaShape):
            return mixer
        is_turning = prefix != "qwen3next" and mixer.sizes.num_value_heads != mixer.sizes.num_key_heads
        return replace(mixer, by_key_head=by_key_head, gates_by_key_head=gates_by_key_head, values_by_turns=is_turning)

    layers = tuple(replace(layer, mixer=states(layer.mixer)) for layer in config.layers)
    config = replace(config, layers=layers, block=replace(config.block, norm=NormKind()))
    return with_rope(file, prefix, config)


def _gemma4_fields(file: GGUFFile, prefix: str) -> Fields:
    """Read Gemma 4: layers with a window have heads of their own, and some layers read others' keys."""
    metadata, attention = file.metadata, f"{prefix}.attention"
    pattern = metadata.numbers(f"{attention}.sliding_window_pattern", num_layers(file, prefix))
    slides = [bool(is_sliding) for is_sliding in pattern]
    kv_heads, inner = by_layer(file, f"{attention}.head_count_kv"), by_layer(file, f"{prefix}.feed_forward_length")
    num_shared = metadata.integer(f"{attention}.shared_kv_layers", 0, minimum=0)
    first_full = slides.index(False) if False in slides else 0
    head_dim, experts = metadata.integer(f"{attention}.key_length"), f"{prefix}.expert_count"
    cap, table = f"{prefix}.final_logit_softcapping", file.tensors.get("per_layer_token_embd.weight")
    return {
        "num_key_value_heads": kv_heads[slides.index(True)] if True in slides else kv_heads[0],
        "num_global_key_value_heads": kv_heads[first_full],
        "head_dim": metadata.integer(f"{attention}.key_length_swa", head_dim),
        "global_head_dim": head_dim,
        "attention_k_eq_v": f"blk.{first_full}.attn_v.weight" not in file.tensors,
        "layer_types": [_SLIDING if is_sliding else _FULL for is_sliding in slides],
        "sliding_window": metadata.integer(f"{attention}.sliding_window"),
        "num_kv_shared_layers": num_shared,
        "intermediate_size": inner[0],
        "use_double_wide_mlp": num_shared > 0 and inner[-1] == 2 * inner[0],
        "hidden_size_per_layer_input": metadata.integer(f"{prefix}.embedding_length_per_layer_input", 0, minimum=0),
        "vocab_size_per_layer_input": 0 if table is None else table.shape[0],
        "final_logit_softcapping": metadata.number(cap) if cap in metadata else None,
        "rope_parameters": _gemma4_ropes(file, prefix, head_dim),
        **(_gemma4_experts(file, prefix) if metadata.integer(experts, 0, minimum=0) else {"enable_moe_block": False}),
    }


def _gemma4_ropes(file: GGUFFile, prefix: str, head_dim: int) -> Fields:
    metadata = file.metadata
    full = {
        "rope_type": "proportional",
        "rope_theta": metadata.number(f"{prefix}.rope.freq_base", 1e6),
        "partial_rotary_factor": proportional_share(file, head_dim),
    }
    theta = metadata.number(f"{prefix}.rope.freq_base_swa", 1e4)
    return {_FULL: full, _SLIDING: {"rope_type": "default", "rope_theta": theta}}


def _gemma4_experts(file: GGUFFile, prefix: str) -> Fields:
    metadata = file.metadata
    return {
        "enable_moe_block": True,
        "num_experts": metadata.integer(f"{prefix}.expert_count"),
        "top_k_experts": metadata.integer(f"{prefix}.expert_used_count"),
        "moe_intermediate_size": metadata.integer(f"{prefix}.expert_feed_forward_length"),
    }


def _lfm2_fields(file: GGUFFile, prefix: str) -> Fields:
    """Read LFM2: layers without key heads are convolutions."""
    metadata = file.metadata
    kv_heads = by_layer(file, f"{prefix}.attention.head_count_kv")
    return {
        "num_key_value_heads": max(kv_heads, default=1) or 1,
        "layer_types": [_FULL if count else _CONV for count in kv_heads],
        "intermediate_size": metadata.integer(f"{prefix}.feed_forward_length"),
        "block_auto_adjust_ff_dim": False,
        "conv_L_cache": metadata.integer(f"{prefix}.shortconv.l_cache"),
        "conv_bias": any(name.endswith(".shortconv.conv.bias") for name in file.tensors),
        "norm_eps": metadata.number(f"{prefix}.attention.layer_norm_rms_epsilon"),
        "rope_theta": metadata.number(f"{prefix}.rope.freq_base", 1e6),
    }


def _lfm2_moe_fields(file: GGUFFile, prefix: str) -> Fields:
    metadata = file.metadata
    return {
        **_lfm2_fields(file, prefix),
        "num_experts": metadata.integer(f"{prefix}.expert_count"),
        "num_experts_per_tok": metadata.integer(f"{prefix}.expert_used_count"),
        "moe_intermediate_size": metadata.integer(f"{prefix}.expert_feed_forward_length"),
        "num_dense_layers": metadata.integer(f"{prefix}.leading_dense_block_count", 0, minimum=0),
        "routed_scaling_factor": metadata.number(f"{prefix}.expert_weights_scale", 1.0),
        "use_expert_bias": any(name.endswith(".exp_probs_b.bias") for name in file.tensors),
    }


def _apertus_fields(file: GGUFFile, prefix: str) -> Fields:
    metadata = file.metadata
    return {
        "num_key_value_heads": metadata.integer(f"{prefix}.attention.head_count_kv", maximum=MAX_HEADS),
        "attention_bias": has_qkv_bias(layer_parts(file)),
        "intermediate_size": metadata.integer(f"{prefix}.feed_forward_length"),
        "rope_theta": metadata.number(f"{prefix}.rope.freq_base", 10_000.0),
    }


def _finish_apertus(file: GGUFFile, prefix: str, config: ModelConfig) -> ModelConfig:
    """Give each layer its function; the rotation's scaling is a tensor."""
    numbers = zip(*(_numbers_by_layer(file, prefix, f"xielu.{name}") for name in _LEARNED), strict=True)
    layers = tuple(
        _with_function(layer, Xielu.learned(*learned)) for layer, learned in zip(config.layers, numbers, strict=True)
    )
    return with_rope(file, prefix, replace(config, layers=layers))


def _with_function(layer: LayerTraits, activation: Xielu) -> LayerTraits:
    assert isinstance(layer.feed_forward, PlainShape)
    return replace(layer, feed_forward=replace(layer.feed_forward, activation=activation))


def _numbers_by_layer(file: GGUFFile, prefix: str, field: str) -> list[float]:
    """Read a number of each layer, or one that all layers have."""
    metadata, count = file.metadata, num_layers(file, prefix)
    value = metadata.fields.get(field)
    if isinstance(value, float) and np.isfinite(value):
        return [value] * count
    return [float(number) for number in metadata.numbers(field, count)]


def _gpt2_fields(file: GGUFFile, prefix: str) -> Fields:
    metadata = file.metadata
    return {
        "n_embd": metadata.integer(f"{prefix}.embedding_length"),
        "n_head": metadata.integer(f"{prefix}.attention.head_count", maximum=MAX_HEADS),
        "n_layer": num_layers(file, prefix),
        "n_positions": metadata.integer(f"{prefix}.context_length"),
        "n_inner": metadata.integer(f"{prefix}.feed_forward_length"),
        "layer_norm_epsilon": read_eps(file, prefix),
    }


def _finish_gpt2(file: GGUFFile, prefix: str, config: ModelConfig) -> ModelConfig:
    """Matrices stand upright here."""
    names = replace(config.block.names, is_transposed=False)
    return replace(config, block=replace(config.block, names=names))


OWN_FAMILIES: Mapping[str, GGUFFamily] = MappingProxyType(
    {
        "qwen3next": GGUFFamily(_qwen_fields, _finish_qwen),
        "qwen35": GGUFFamily(_qwen_fields, _finish_qwen),
        "qwen35moe": GGUFFamily(_qwen_fields, _finish_qwen),
        "gemma4": GGUFFamily(_gemma4_fields),
        "apertus": GGUFFamily(_apertus_fields, _finish_apertus),
        "gpt2": GGUFFamily(_gpt2_fields, _finish_gpt2),
        "lfm2": GGUFFamily(_lfm2_fields, with_rope),
        "lfm2moe": GGUFFamily(_lfm2_moe_fields, with_rope),
    }
)
"""Files of these architectures."""
