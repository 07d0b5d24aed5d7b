"""The structures that the compiled CPU functions take, field by field; loading the library compares them."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from types import MappingProxyType

import torch

_POINTER, _INT32, _INT64, _FLOAT = ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64, ctypes.c_float

# Of a projection: `kMaxParts` of decoder_stack/stack.h.
MAX_PARTS = 3


class MatrixStructure(ctypes.Structure):
    """`Matrix`: `PackedLinear` of linear/dense/packed.h, or the address of a `QuantizedLinear`."""

    _fields_ = (
        ("weight", _POINTER),
        ("bias", _POINTER),
        ("num_inputs", _INT32),
        ("num_outputs", _INT32),
        ("dtype", _INT32),
        ("quantized", _POINTER),
    )


class LayerStructure(ctypes.Structure):
    """`Layer`."""

    _fields_ = (
        ("attention_norm", _POINTER),
        ("mlp_norm", _POINTER),
        ("query_norm", _POINTER),
        ("key_norm", _POINTER),
        ("qkv", MatrixStructure * MAX_PARTS),
        ("gate_up", MatrixStructure * 2),
        ("output", MatrixStructure),
        ("down", MatrixStructure),
        ("key_cache", _POINTER),
        ("value_cache", _POINTER),
        ("kv_scales", _POINTER),
        ("router", MatrixStructure),
        ("routing", _POINTER),
        ("mixture", _POINTER),
        ("sliding_window", _INT32),
        ("num_qkv", _INT32),
        ("num_gate_up", _INT32),
        ("qkv_adapters", _POINTER * MAX_PARTS),
        ("gate_up_adapters", _POINTER * 2),
        ("output_adapters", _POINTER),
        ("down_adapters", _POINTER),
        ("router_adapters", _POINTER),
    )


class StridesStructure(ctypes.Structure):
    """`CacheStrides` of cache_strides.h."""

    _fields_ = (("block", _INT64), ("token", _INT64), ("head", _INT64), ("element", _INT64))


class StackStructure(ctypes.Structure):
    """`Stack`."""

    _fields_ = (
        ("embedding", _POINTER),
        ("cos_sin", _POINTER),
        ("final_norm", _POINTER),
        ("layers", _POINTER),
        ("tapped_layers", _POINTER),
        ("num_tapped", _INT32),
        ("num_layers", _INT32),
        ("vocab_size", _INT32),
        ("max_positions", _INT32),
        ("hidden_size", _INT32),
        ("intermediate_size", _INT32),
        ("num_heads", _INT32),
        ("num_kv_heads", _INT32),
        ("head_dim", _INT32),
        ("rotated_dim", _INT32),
        ("dtype", _INT32),
        ("embedding_dtype", _INT32),
        ("cache_dtype", _INT32),
        ("eps", _FLOAT),
        ("scale", _FLOAT),
        ("key_strides", StridesStructure),
        ("value_strides", StridesStructure),
        ("exchange", _POINTER),
        ("first_token", _INT32),
        ("num_own_tokens", _INT32),
        ("embedding_adapters", _POINTER),
        ("interrupt", _POINTER),
    )


class ExchangeStructure(ctypes.Structure):
    """`Exchange` of collectives/exchange.h."""

    _fields_ = (
        ("ended", _POINTER),
        ("counters", _POINTER),
        ("slots", _POINTER),
        ("capacity", _INT64),
        ("rank", _INT32),
        ("size", _INT32),
    )


class StepStructure(ctypes.Structure):
    """`Step`."""

    _fields_ = (
        ("token_ids", _POINTER),
        ("positions", _POINTER),
        ("slots", _POINTER),
        ("block_tables", _POINTER),
        ("query_starts", _POINTER),
        ("context_lens", _POINTER),
        ("adapters", _POINTER),
        ("query_rows", _POINTER),
        ("queries", _POINTER),
        ("num_query_rows", _INT32),
        ("num_tokens", _INT32),
        ("num_seqs", _INT32),
        ("max_blocks", _INT32),
        ("block_size", _INT32),
    )


class QuantizedStructure(ctypes.Structure):
    """`QuantizedLinear` of linear/cpu/weight.h."""

    _fields_ = (
        ("weight", _POINTER),
        ("scales", _POINTER),
        ("offsets", _POINTER),
        ("bias", _POINTER),
        ("input_order", _POINTER),
        ("num_inputs", _INT32),
        ("num_outputs", _INT32),
        ("group_size", _INT32),
        ("number", _INT32),
        ("scale_dtype", _INT32),
        ("offset", _INT32),
        ("zero_point", _FLOAT),
        ("rounding", _INT32),
        ("activation_scale", _FLOAT),
    )


def address_of(tensor: torch.Tensor | None) -> int | None:
    """Return where a tensor's numbers begin; None, a null pointer, where there is no tensor."""
    return None if tensor is None else tensor.data_ptr()


def strides_of(cache: torch.Tensor) -> StridesStructure:
    """Return where the parts of a cache `[num_blocks, block_size, num_kv_heads, head_dim]` lie."""
    return StridesStructure(*cache.stride())


class AttentionStructure(ctypes.Structure):
    """`AttentionArguments` of paged_attention/attention.h."""

    _fields_ = (
        ("query", _POINTER),
        ("result", _POINTER),
        ("key_cache", _POINTER),
        ("value_cache", _POINTER),
        ("kv_scales", _POINTER),
        ("block_tables", _POINTER),
        ("query_starts", _POINTER),
        ("context_lens", _POINTER),
        ("sinks", _POINTER),
        ("lse", _POINTER),
        ("query_stride", _INT64),
        ("key_strides", StridesStructure),
        ("value_strides", StridesStructure),
        ("num_seqs", _INT32),
        ("max_blocks", _INT32),
        ("num_heads", _INT32),
        ("num_kv_heads", _INT32),
        ("head_dim", _INT32),
        ("value_dim", _INT32),
        ("block_size", _INT32),
        ("sliding_window", _INT32),
        ("chunk_size", _INT32),
        ("first", _INT32),
        ("step", _INT32),
        ("scale", _FLOAT),
        ("soft_cap", _FLOAT),
    )


class RotationStructure(ctypes.Structure):
    """`RotationArguments` of rope_kv_write/cpu.cpp."""

    _fields_ = (
        ("qkv", _POINTER),
        ("values", _POINTER),
        ("positions", _POINTER),
        ("cos_sin", _POINTER),
        ("key_cache", _POINTER),
        ("value_cache", _POINTER),
        ("kv_scales", _POINTER),
        ("slots", _POINTER),
        ("query_norm", _POINTER),
        ("key_norm", _POINTER),
        ("qkv_stride", _INT64),
        ("values_stride", _INT64),
        ("key_strides", StridesStructure),
        ("value_strides", StridesStructure),
        ("num_heads", _INT32),
        ("num_kv_heads", _INT32),
        ("head_dim", _INT32),
        ("rotated_dim", _INT32),
        ("first_rotated", _INT32),
        ("is_interleaved", _INT32),
        ("value_dim", _INT32),
        ("num_tokens", _INT32),
        ("block_size", _INT32),
        ("eps", _FLOAT),
    )


class RoutingStructure(ctypes.Structure):
    """`Routing` of moe/routing.h."""

    _fields_ = (
        ("bias", _POINTER),
        ("num_experts", _INT32),
        ("top_k", _INT32),
        ("score", _INT32),
        ("is_renormalized", _INT32),
        ("num_groups", _INT32),
        ("top_k_groups", _INT32),
        ("num_best", _INT32),
        ("scale", _FLOAT),
    )


class MixtureStructure(ctypes.Structure):
    """`Mixture` of moe/mixture.h."""

    _fields_ = (
        ("gate_up", _POINTER),
        ("down", _POINTER),
        ("tokens_per_expert", _POINTER),
        ("num_experts", _INT32),
        ("first_expert", _INT32),
        ("hidden_size", _INT32),
        ("intermediate_size", _INT32),
        ("slope", _FLOAT),
        ("cubic", _FLOAT),
        ("limit", _FLOAT),
        ("up_shift", _FLOAT),
        ("has_gate", _INT32),
        ("gate_up_adapters", _POINTER),
        ("down_adapters", _POINTER),
    )


class StateRowsStructure(ctypes.Structure):
    """`StateRows` of state_rows.h."""

    _fields_ = (
        ("slots", _POINTER),
        ("query_starts", _POINTER),
        ("context_lens", _POINTER),
        ("num_kept", _POINTER),
        ("save_starts", _POINTER),
        ("save_tokens", _POINTER),
        ("save_slots", _POINTER),
        ("num_seqs", _INT32),
    )


class LowRankHalfStructure(ctypes.Structure):
    """`LowRankHalf` of low_rank/product.h."""

    _fields_ = (("offset", _INT64), ("first", _INT32), ("count", _INT32))


class LowRankStructure(ctypes.Structure):
    """`LowRank` of low_rank/product.h."""

    _fields_ = (
        ("down", _POINTER),
        ("up", _POINTER),
        ("scales", _POINTER),
        ("halves", _POINTER),
        ("rank", _INT32),
        ("num_inputs", _INT32),
        ("dtype", _INT32),
    )


class AdapterRowsStructure(ctypes.Structure):
    """`AdapterRows` of low_rank/product.h."""

    _fields_ = (
        ("rows", _POINTER),
        ("slots", _POINTER),
        ("places", _POINTER),
        ("products", _POINTER),
        ("num_rows", _INT32),
        ("stride", _INT32),
    )


STRUCTURES: Mapping[str, type[ctypes.Structure]] = MappingProxyType(
    {
        "Matrix": MatrixStructure,
        "Layer": LayerStructure,
        "Stack": StackStructure,
        "Exchange": ExchangeStructure,
        "Step": StepStructure,
        "QuantizedLinear": QuantizedStructure,
        "AttentionArguments": AttentionStructure,
        "RotationArguments": RotationStructure,
        "StateRows": StateRowsStructure,
        "Routing": RoutingStructure,
        "Mixture": MixtureStructure,
        "LowRankHalf": LowRankHalfStructure,
        "LowRank": LowRankStructure,
        "AdapterRows": AdapterRowsStructure,
    }
)
"""By the names that `EXPORT_STRUCTURE` has for them."""
