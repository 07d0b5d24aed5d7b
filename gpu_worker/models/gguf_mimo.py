"""What GGUF metadata say about MiMo V2: layers with a window have key heads and a rotation of their own."""

from __future__ import annotations

from gpu_worker.models.families import mimo_v2_flash
from gpu_worker.models.gguf_fields import (
    MAX_HEADS,
    Fields,
    TranslatedFamily,
    by_layer,
    finish_mixtures,
    has_qkv_bias,
    layer_parts,
)
from gpu_worker.models.gguf_layers import num_layers
from gpu_worker.quantization.gguf.file import GGUFFile


def _fields(file: GGUFFile, prefix: str) -> Fields:
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
        **_experts(file, prefix),
    }


def _experts(file: GGUFFile, prefix: str) -> Fields:
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


MIMO = TranslatedFamily(mimo_v2_flash.read_config, _fields, finish_mixtures)
"""Files of this architecture."""
