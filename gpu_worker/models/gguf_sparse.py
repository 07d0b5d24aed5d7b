"""What GGUF metadata say about mixtures whose layers differ: Llama 4, MiMo V2, HY3 and AFMoE.

What they do not say, llama.cpp knows by the architecture, as published.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from gpu_worker.models.config import ModelConfig
from gpu_worker.models.gguf_fields import MAX_HEADS, Fields, GGUFFamily, ModelFields, with_plain_names
from gpu_worker.models.gguf_rope import with_rope

# Of Llama 4 Maverick, whose queries and keys are not normalised; Scout's, with fewer experts, are.
_MAVERICK_EXPERTS = 128
_CHUNK = 8192
# Of Llama 4, the last one of this many layers does not rotate; of AFMoE, it has no window.
_STILL_PERIOD = _FULL_PERIOD = 4


def _llama4_fields(gguf: ModelFields) -> Fields:
    # Zero is written where all layers rotate and see everything.
    is_plain = "attention.sliding_window" in gguf and gguf.integer("attention.sliding_window", minimum=0) == 0
    num_experts = gguf.integer("expert_count")
    return {
        **gguf.attention(500_000.0),
        "attention_bias": gguf.has_qkv_bias,
        "use_qk_norm": num_experts != _MAVERICK_EXPERTS,
        "attention_chunk_size": None if is_plain else _CHUNK,
        # An interval of more than there are layers.
        "no_rope_layer_interval": 1025 if is_plain else _STILL_PERIOD,
        "floor_scale": _CHUNK,
        "attn_scale": 0.1,
        "intermediate_size_mlp": gguf.integer("feed_forward_length"),
        "intermediate_size": gguf.integer("expert_feed_forward_length"),
        "num_local_experts": num_experts,
        "num_experts_per_tok": gguf.integer("expert_used_count"),
        "interleave_moe_layer_step": gguf.integer("interleave_moe_layer_step"),
    }


def _mimo_fields(gguf: ModelFields) -> Fields:
    """Read the fields as published configurations name them; layers that draft, behind the last one, are left out."""
    head_dim, layers = gguf.integer("attention.key_length", maximum=MAX_HEADS), range(gguf.num_layers)
    slides = gguf.by_layer("attention.sliding_window_pattern")
    kv_heads = gguf.by_layer("attention.head_count_kv")
    sinks = [f"blk.{layer}.attn_sinks.weight" in gguf.tensors for layer in layers]
    return {
        # All layers of a kind have one number; of a kind that no layer is, nothing is read.
        "num_key_value_heads": max(kv_heads[i] for i in layers if not slides[i] or all(slides)),
        "swa_num_key_value_heads": max(kv_heads[i] for i in layers if slides[i] or not any(slides)),
        "head_dim": head_dim,
        "v_head_dim": gguf.integer("attention.value_length", head_dim),
        "attention_value_scale": gguf.optional_number("attention.value_scale"),
        "attention_bias": gguf.has_qkv_bias,
        "add_full_attention_sink_bias": any(sinks[i] for i in layers if not slides[i]),
        "add_swa_attention_sink_bias": any(sinks[i] for i in layers if slides[i]),
        "hybrid_layer_pattern": slides,
        # The published number is of the tokens before a query: its reference implementation sees itself besides.
        "sliding_window_size": gguf.integer("attention.sliding_window"),
        "partial_rotary_factor": gguf.turning_share(head_dim),
        "rope_theta": gguf.number("rope.freq_base", 5e6),
        "swa_rope_theta": gguf.number("rope.freq_base_swa", 1e4),
        "intermediate_size": gguf.integer("feed_forward_length"),
        "moe_layer_freq": list(map(int, gguf.has_router)),
        **gguf.experts("n_routed_experts"),
        "n_group": gguf.integer("expert_group_count", 1),
        "topk_group": gguf.integer("expert_group_used_count", 1),
        "norm_topk_prob": gguf.boolean("expert_weights_norm", True),
        "routed_scaling_factor": gguf.number("expert_weights_scale", 1.0),
    }


def _hy_v3_fields(gguf: ModelFields) -> Fields:
    """Read HY3; which layers have experts is seen by their routers."""
    experts = gguf.experts()
    size: int = experts["moe_intermediate_size"]
    return {
        **gguf.attention(),
        **experts,
        "intermediate_size": gguf.integer("feed_forward_length"),
        "attention_bias": gguf.has_qkv_bias,
        "router_scaling_factor": gguf.number("expert_weights_scale", 1.0),
        "num_shared_experts": max(1, gguf.integer("expert_shared_feed_forward_length", size) // size),
        "mlp_layer_types": ["sparse" if is_mixture else "dense" for is_mixture in gguf.has_router],
    }


def _afmoe_fields(gguf: ModelFields) -> Fields:
    """Read AFMoE, whose published models all scale their embeddings."""
    return {
        **gguf.attention(),
        **gguf.experts(),
        "intermediate_size": gguf.integer("feed_forward_length"),
        "num_shared_experts": gguf.integer("expert_shared_count", 1),
        "num_dense_layers": gguf.integer("leading_dense_block_count", 0, minimum=0),
        "route_scale": gguf.number("expert_weights_scale", 1.0),
        "sliding_window": gguf.integer("attention.sliding_window"),
        "global_attn_every_n_layers": _FULL_PERIOD,
        "mup_enabled": True,
    }


def _finish(gguf: ModelFields, config: ModelConfig) -> ModelConfig:
    """Return the model with the names and the rotation that files with mixtures have, whatever family it is."""
    return with_rope(gguf, with_plain_names(config))


SPARSE_FAMILIES: Mapping[str, GGUFFamily] = MappingProxyType(
    {
        "llama4": GGUFFamily(_llama4_fields, _finish),
        "mimo2": GGUFFamily(_mimo_fields, _finish),
        "hy_v3": GGUFFamily(_hy_v3_fields, _finish),
        "afmoe": GGUFFamily(_afmoe_fields, _finish),
    }
)
"""Files of these architectures."""
