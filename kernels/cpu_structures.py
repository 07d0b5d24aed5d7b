"""The structures that the compiled CPU functions take, field by field; loading the library compares them."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from types import MappingProxyType

import torch

_POINTER, _INT32, _INT64, _FLOAT = ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64, ctypes.c_float

# Of a projection: `kMaxParts` of decoder_stack/stack.h.
MAX_PARTS = 3


def _all(kind: type, names: str) -> list[tuple[str, type]]:
    """Return fields of one type."""
    return [(name, kind) for name in names.split()]


class MatrixStructure(ctypes.Structure):
    """`Matrix`: `PackedLinear` of linear/dense/packed.h, or the address of a `QuantizedLinear`."""

    _fields_ = (
        *_all(_POINTER, "weight bias"),
        *_all(_INT32, "num_inputs num_outputs dtype"),
        ("quantized", _POINTER),
    )


class LayerStructure(ctypes.Structure):
    """`Layer`."""

    _fields_ = (
        *_all(_POINTER, "attention_norm mlp_norm query_norm key_norm"),
        ("qkv", MatrixStructure * MAX_PARTS),
        ("gate_up", MatrixStructure * 2),
        ("output", MatrixStructure),
        ("down", MatrixStructure),
        *_all(_POINTER, "key_cache value_cache kv_scales"),
        ("router", MatrixStructure),
        *_all(_POINTER, "routing mixture"),
        *_all(_INT32, "sliding_window num_qkv num_gate_up"),
        ("qkv_adapters", _POINTER * MAX_PARTS),
        ("gate_up_adapters", _POINTER * 2),
        *_all(_POINTER, "output_adapters down_adapters router_adapters"),
    )


class StridesStructure(ctypes.Structure):
    """`CacheStrides` of cache_strides.h."""

    _fields_ = (("block", _INT64), ("token", _INT64), ("head", _INT64), ("element", _INT64))


class StackStructure(ctypes.Structure):
    """`Stack`."""

    _fields_ = (
        *_all(_POINTER, "embedding cos_sin final_norm layers tapped_layers"),
        *_all(_INT32, "num_tapped num_layers vocab_size max_positions hidden_size intermediate_size num_heads"),
        *_all(_INT32, "num_kv_heads head_dim rotated_dim dtype embedding_dtype cache_dtype"),
        *_all(_FLOAT, "eps scale"),
        ("key_strides", StridesStructure),
        ("value_strides", StridesStructure),
        ("exchange", _POINTER),
        *_all(_INT32, "first_token num_own_tokens"),
        *_all(_POINTER, "embedding_adapters interrupt"),
    )


class ExchangeStructure(ctypes.Structure):
    """`Exchange` of collectives/exchange.h."""

    _fields_ = (
        *_all(_POINTER, "ended counters slots"),
        ("capacity", _INT64),
        *_all(_INT32, "rank size"),
    )


class StepStructure(ctypes.Structure):
    """`Step`."""

    _fields_ = (
        *_all(_POINTER, "token_ids positions slots block_tables query_starts context_lens adapters query_rows"),
        ("queries", _POINTER),
        *_all(_INT32, "num_query_rows num_tokens num_seqs max_blocks block_size"),
    )


class QuantizedStructure(ctypes.Structure):
    """`QuantizedLinear` of linear/cpu/weight.h."""

    _fields_ = (
        *_all(_POINTER, "weight scales offsets bias input_order"),
        *_all(_INT32, "num_inputs num_outputs group_size number scale_dtype offset"),
        ("zero_point", _FLOAT),
        ("rounding", _INT32),
        ("activation_scale", _FLOAT),
    )


def address_of(tensor: torch.Tensor | None) -> int | None:
    """Return where a tensor's numbers begin; None, a null pointer, where there is no tensor."""
    return None if tensor is None else tensor.data_ptr()


def addresses_of(*tensors: torch.Tensor | None) -> list[int | None]:
    """Return the addresses of several tensors, in this order."""
    return [None if tensor is None else tensor.data_ptr() for tensor in tensors]


def strides_of(cache: torch.Tensor) -> StridesStructure:
    """Return where the parts of a cache `[num_blocks, block_size, num_kv_heads, head_dim]` lie."""
    return StridesStructure(*cache.stride())


class AttentionStructure(ctypes.Structure):
    """`AttentionArguments` of paged_attention/attention.h."""

    _fields_ = (
        *_all(_POINTER, "query result key_cache value_cache kv_scales block_tables query_starts context_lens sinks"),
        ("lse", _POINTER),
        ("query_stride", _INT64),
        ("key_strides", StridesStructure),
        ("value_strides", StridesStructure),
        *_all(_INT32, "num_seqs max_blocks num_heads num_kv_heads head_dim value_dim block_size sliding_window"),
        *_all(_INT32, "chunk_size first step"),
        *_all(_FLOAT, "scale soft_cap"),
    )


class RotationStructure(ctypes.Structure):
    """`RotationArguments` of rope_kv_write/cpu.cpp."""

    _fields_ = (
        *_all(_POINTER, "qkv values positions cos_sin key_cache value_cache kv_scales slots query_norm key_norm"),
        *_all(_INT64, "qkv_stride values_stride"),
        ("key_strides", StridesStructure),
        ("value_strides", StridesStructure),
        *_all(_INT32, "num_heads num_kv_heads head_dim rotated_dim first_rotated is_interleaved value_dim"),
        *_all(_INT32, "num_tokens block_size"),
        ("eps", _FLOAT),
    )


class RoutingStructure(ctypes.Structure):
    """`Routing` of moe/routing.h."""

    _fields_ = (
        ("bias", _POINTER),
        *_all(_INT32, "num_experts top_k score is_renormalized num_groups top_k_groups num_best"),
        ("scale", _FLOAT),
    )


class MixtureStructure(ctypes.Structure):
    """`Mixture` of moe/mixture.h."""

    _fields_ = (
        *_all(_POINTER, "gate_up down tokens_per_expert"),
        *_all(_INT32, "num_experts first_expert hidden_size intermediate_size"),
        *_all(_FLOAT, "slope cubic limit up_shift"),
        ("has_gate", _INT32),
        *_all(_POINTER, "gate_up_adapters down_adapters"),
    )


class StateRowsStructure(ctypes.Structure):
    """`StateRows` of state_rows.h."""

    _fields_ = (
        *_all(_POINTER, "slots query_starts context_lens num_kept save_starts save_tokens save_slots"),
        ("num_seqs", _INT32),
    )


class LowRankHalfStructure(ctypes.Structure):
    """`LowRankHalf` of low_rank/product.h."""

    _fields_ = (("offset", _INT32), ("first", ctypes.c_int16), ("count", ctypes.c_int16))


class LowRankStructure(ctypes.Structure):
    """`LowRank` of low_rank/product.h."""

    _fields_ = (
        *_all(_POINTER, "halves scales down up"),
        *_all(_INT32, "rank num_inputs dtype"),
    )


class AdapterRowsStructure(ctypes.Structure):
    """`AdapterRows` of low_rank/product.h."""

    _fields_ = (
        *_all(_POINTER, "rows slots places products"),
        *_all(_INT32, "num_rows stride"),
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
    },
)
"""By the names that `EXPORT_STRUCTURE` has for them."""
