"""What GGUF metadata say about HY3 and AFMoE: mixtures by sigmoid, whose first layers have none."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from gpu_worker.models.families import afmoe, hy_v3
from gpu_worker.models.gguf_fields import (
    MAX_HEADS,
    Fields,
    TranslatedFamily,
    finish_mixtures,
    has_qkv_bias,
    layer_parts,
)
from gpu_worker.models.gguf_layers import num_layers
from gpu_worker.quantization.gguf.file import GGUFFile

# Of AFMoE, one layer of so many has no window; llama.cpp knows it by the architecture.
_FULL_PERIOD = 4


def _fields(file: GGUFFile, prefix: str) -> Fields:
    """Read what both have."""
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
    fields, metadata, count = _fields(file, prefix), file.metadata, num_layers(file, prefix)
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
        **_fields(file, prefix),
        "num_shared_experts": metadata.integer(f"{prefix}.expert_shared_count", 1),
        "num_dense_layers": metadata.integer(f"{prefix}.leading_dense_block_count", 0, minimum=0),
        "route_scale": metadata.number(f"{prefix}.expert_weights_scale", 1.0),
        "sliding_window": metadata.integer(f"{prefix}.attention.sliding_window"),
        "global_attn_every_n_layers": _FULL_PERIOD,
        "mup_enabled": True,
    }


SIGMOID_FAMILIES: Mapping[str, TranslatedFamily] = MappingProxyType(
    {
        "hy_v3": TranslatedFamily(hy_v3.read_config, _hy_v3_fields, finish_mixtures),
        "afmoe": TranslatedFamily(afmoe.read_config, _afmoe_fields, finish_mixtures),
    }
)
"""Files of these architectures."""
