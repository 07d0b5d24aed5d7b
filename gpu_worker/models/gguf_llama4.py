"""What GGUF metadata say about Llama 4. What they do not say, llama.cpp knows by the architecture, as published."""

from __future__ import annotations

from gpu_worker.models.families import llama4
from gpu_worker.models.gguf_fields import (
    MAX_HEADS,
    Fields,
    TranslatedFamily,
    finish_mixtures,
    has_qkv_bias,
    layer_parts,
)
from gpu_worker.quantization.gguf.file import GGUFFile

# Of Maverick, whose queries and keys are not normalised; Scout's, with fewer experts, are.
_MAVERICK_EXPERTS = 128
_CHUNK = 8192
# Every so many layers, one does not rotate.
_STILL_PERIOD = 4


def _fields(file: GGUFFile, prefix: str) -> Fields:
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


LLAMA4 = TranslatedFamily(llama4.read_config, _fields, finish_mixtures)
"""Files of this architecture."""
