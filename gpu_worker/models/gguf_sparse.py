"""What GGUF metadata say about mixtures whose layers differ: Llama 4, MiMo V2, HY3 and AFMoE.

What they do not say, llama.cpp knows by the architecture, as published.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from gpu_worker.models.gguf_fields import (
    MAX_HEADS,
    Fields,
    GGUFFamily,
    by_layer,
    finish_mixtures,
    has_qkv_bias,
    layer_parts,
    num_layers,
)
from gpu_worker.quantization.gguf.file import GGUFFile

# Of Llama 4 Maverick, whose queries and keys are not normalised; Scout's, with fewer experts, are.
_MAVERICK_EXPERTS = 128
_CHUNK = 8192
# Of Llama 4, one layer of so many does not rotate; of AFMoE, one has no window.
_STILL_PERIOD = _FULL_PERIOD = 4


def _llama4_fields(file: GGUFFile, prefix: str) -> Fields:
    metadata, parts = file.metadata, layer_parts(file)
    window = f"{prefix}.attention.sliding_window"
    # Zero is written where all layers rotate and see everything.
    is_plain = window in metadata and metadata.integer(window, minimum=0) == 0
    num_experts = metadata.integer(f"{prefix}.expert_count")
    return {
        "num_key_value_heads": metadata.integer(f"{prefix}.attention.head_count_kv", maximum=MAX_HEADS),
        "head_dim": metadata.integer(f"{prefix}.attention.key_length"),
        "attention_bias": has_qkv_bias(parts),
        "use_qk_norm": num_experts != _MAVERICK_EXPERTS,
        "attention_chunk_size": None if is_plain else _CHUNK,
        # An interval of more than there are layers.
        "no_rope_layer_interval": 1025 if is_plain else _STILL_PERIOD,
        "floor_scale": _CHUNK,
        "attn_scale": 0.1,
        "intermediate_size_mlp": metadata.integer(f"{prefix}.feed_forward_length"),
        "intermediate_size": metadata.integer(f"{prefix}.expert_feed_forward_length"),
        "num_local_experts": num_experts,
        "num_experts_per_tok": metadata.integer(f"{prefix}.expert_used_count"),
        "interleave_moe_layer_step": metadata.integer(f"{prefix}.interleave_moe_layer_step"),
        "rope_theta": metadata.number(f"{prefix}.rope.freq_base", 500_000.0),
    }


def _mimo_fields(file: GGUFFile, prefix: str) -> Fields:
    """Read the fields as published configurations name them; layers that draft, behind the last one, are left out."""
    metadata, attention, count = file.metadata, f"{prefix}.attention", num_layers(file, prefix)
    head_dim = metadata.integer(f"{attention}.key_length", maximum=MAX_HEADS)
    slides = by_layer(file, f"{attention}.sliding_window_pattern")
    kv_heads = by_layer(file, f"{attention}.head_count_kv")
    scale, rotary = f"{attention}.value_scale", metadata.integer(f"{prefix}.rope.dimension_count", head_dim)
    sinks = [f"blk.{layer}.attn_sinks.weight" in file.tensors for layer in range(count)]
    return {
        # All layers of a kind have one number; of a kind that no layer is, nothing is read.
        "num_key_value_heads": max(kv_heads[i] for i in range(count) if not slides[i] or all(slides)),
        "swa_num_key_value_heads": max(kv_heads[i] for i in range(count) if slides[i] or not any(slides)),
        "head_dim": head_dim,
        "v_head_dim": metadata.integer(f"{attention}.value_length", head_dim),
        "attention_value_scale": metadata.number(scale) if scale in metadata else None,
        "attention_bias": has_qkv_bias(layer_parts(file)),
        "add_full_attention_sink_bias": any(sinks[i] for i in range(count) if not slides[i]),
        "add_swa_attention_sink_bias": any(sinks[i] for i in range(count) if slides[i]),
        "hybrid_layer_pattern": slides,
        # The published number is of the tokens before a query: its reference implementation sees itself besides.
        "sliding_window_size": metadata.integer(f"{attention}.sliding_window"),
        # Half a dimension more, so that the product is not rounded below the number.
        "partial_rotary_factor": min(1.0, (rotary + 0.5) / head_dim),
        "rope_theta": metadata.number(f"{prefix}.rope.freq_base", 5e6),
        "swa_rope_theta": metadata.number(f"{prefix}.rope.freq_base_swa", 1e4),
        "intermediate_size": metadata.integer(f"{prefix}.feed_forward_length"),
        "moe_layer_freq": [int(f"blk.{layer}.ffn_gate_inp.weight" in file.tensors) for layer in range(count)],
        **_mimo_experts(file, prefix),
    }


def _mimo_experts(file: GGUFFile, prefix: str) -> Fields:
    metadata = file.metadata
    return {
        "n_routed_experts": metadata.integer(f"{prefix}.expert_count"),
        "num_experts_per_tok": metadata.integer(f"{prefix}.expert_used_count"),
        "moe_intermediate_size": metadata.integer(f"{prefix}.expert_feed_forward_length"),
        "n_group": metadata.integer(f"{prefix}.expert_group_count", 1),
        "topk_group": metadata.integer(f"{prefix}.expert_group_used_count", 1),
        "norm_topk_prob": metadata.boolean(f"{prefix}.expert_weights_norm", True),
        "routed_scaling_factor": metadata.number(f"{prefix}.expert_weights_scale", 1.0),
    }


def _sigmoid_fields(file: GGUFFile, prefix: str) -> Fields:
    """Read what HY3 and AFMoE have."""
    metadata = file.metadata
    return {
        "num_key_value_heads": metadata.integer(f"{prefix}.attention.head_count_kv", maximum=MAX_HEADS),
        "head_dim": metadata.integer(f"{prefix}.attention.key_length"),
        "intermediate_size": metadata.integer(f"{prefix}.feed_forward_length"),
        "num_experts": metadata.integer(f"{prefix}.expert_count"),
        "num_experts_per_tok": metadata.integer(f"{prefix}.expert_used_count"),
        "moe_intermediate_size": metadata.integer(f"{prefix}.expert_feed_forward_length"),
        "rope_theta": metadata.number(f"{prefix}.rope.freq_base", 10_000.0),
    }


def _hy_v3_fields(file: GGUFFile, prefix: str) -> Fields:
    """Read HY3; which layers have experts is seen by their routers."""
    fields, metadata, count = _sigmoid_fields(file, prefix), file.metadata, num_layers(file, prefix)
    shared = metadata.integer(f"{prefix}.expert_shared_feed_forward_length", fields["moe_intermediate_size"])
    return {
        **fields,
        "attention_bias": has_qkv_bias(layer_parts(file)),
        "router_scaling_factor": metadata.number(f"{prefix}.expert_weights_scale", 1.0),
        "num_shared_experts": max(1, shared // int(fields["moe_intermediate_size"])),
        "mlp_layer_types": [
            "sparse" if f"blk.{layer}.ffn_gate_inp.weight" in file.tensors else "dense" for layer in range(count)
        ],
    }


def _afmoe_fields(file: GGUFFile, prefix: str) -> Fields:
    """Read AFMoE, whose published models all scale their embeddings."""
    metadata = file.metadata
    return {
        **_sigmoid_fields(file, prefix),
        "num_shared_experts": metadata.integer(f"{prefix}.expert_shared_count", 1),
        "num_dense_layers": metadata.integer(f"{prefix}.leading_dense_block_count", 0, minimum=0),
        "route_scale": metadata.number(f"{prefix}.expert_weights_scale", 1.0),
        "sliding_window": metadata.integer(f"{prefix}.attention.sliding_window"),
        "global_attn_every_n_layers": _FULL_PERIOD,
        "mup_enabled": True,
    }


SPARSE_FAMILIES: Mapping[str, GGUFFamily] = MappingProxyType(
    {
        "llama4": GGUFFamily(_llama4_fields, finish_mixtures),
        "mimo2": GGUFFamily(_mimo_fields, finish_mixtures),
        "hy_v3": GGUFFamily(_hy_v3_fields, finish_mixtures),
        "afmoe": GGUFFamily(_afmoe_fields, finish_mixtures),
    }
)
"""Files of these architectures."""
