"""Takes one layer of a compressed-tensors checkpoint, whose scheme is known."""

from __future__ import annotations

import torch

from gpu_worker.quantization.bit_packing import unpack_words
from gpu_worker.quantization.compressed_scheme import Layout, Scheme
from gpu_worker.quantization.group_weight import columns_of_a_group, group_weight
from gpu_worker.quantization.scaled_tensors import take_activation_scale, take_float8, take_weight_scales
from gpu_worker.quantization.stored_tensors import take_exact, take_input_order, take_scales
from gpu_worker.quantization.tensor_source import TensorSource
from kernels.linear.forms import GroupQuantizedWeight, ScaledWeight, WeightForm

# From the signed 8-bit integers of a checkpoint to the unsigned ones of the engine: the highest bit turned round.
_SIGN_BIT = 0x80


def take_layer(source: TensorSource, name: str, shape: tuple[int, int], scheme: Scheme) -> WeightForm:
    """Take a layer's weights.

    Raises:
        Exception: What `source.error` makes.
    """
    if scheme.is_symmetric and source.has(f"{name}.weight_zero_point"):
        # Some versions store the zeros that symmetry implies.
        source.take_raw(f"{name}.weight_zero_point")
    if scheme.layout is Layout.PACKED:
        return _take_packed(source, name, shape, scheme)
    if scheme.layout is Layout.INT8 and (scheme.strategy == "group" or not scheme.is_symmetric):
        return _take_int8_groups(source, name, shape, scheme)
    if scheme.layout is Layout.INT8:
        values = take_exact(source, f"{name}.weight", torch.int8, shape)
    else:
        values = take_float8(source, f"{name}.weight", shape)
    scales = take_weight_scales(source, f"{name}.weight_scale", shape, has_blocks=scheme.strategy == "block")
    scale = take_activation_scale(source, f"{name}.input_scale") if scheme.activation == "static" else None
    return ScaledWeight(values, scales, scheme.activation, scale)


def _take_packed(source: TensorSource, name: str, shape: tuple[int, int], scheme: Scheme) -> GroupQuantizedWeight:
    rows, columns = shape
    bits, per_word = scheme.bits, 32 // scheme.bits
    if bits == 4 and columns % 2:
        raise source.error(f"{name}.weight_packed", f"is of a layer {list(shape)}; inputs must be even in number")
    words = take_exact(source, f"{name}.weight_packed", torch.int32, (rows, -(-columns // per_word)))
    if source.has(f"{name}.weight_shape"):
        stored = source.take_raw(f"{name}.weight_shape").tolist()
        if stored != list(shape):
            raise source.error(f"{name}.weight_shape", f"is {stored}; config.json calls for {list(shape)}")
    # Words hold neighbours along the input, so that their bytes are what the engine packs; the last may have too many.
    values = words.contiguous().view(torch.uint8)[:, : columns * bits // 8]
    scales = _take_group_scales(source, name, shape, scheme)
    zeros: torch.Tensor | int = 1 << (bits - 1)
    if not scheme.is_symmetric:
        num_words = -(-rows // per_word)
        packed = take_exact(source, f"{name}.weight_zero_point", torch.int32, (num_words, scales.shape[1]))
        zeros = unpack_words(packed.T, bits)[:, :rows].T.int()
    return group_weight(
        values, bits, _group_size(scheme, columns), scales, zeros, _take_order(source, name, scheme, columns)
    )


def _take_int8_groups(source: TensorSource, name: str, shape: tuple[int, int], scheme: Scheme) -> GroupQuantizedWeight:
    values = take_exact(source, f"{name}.weight", torch.int8, shape).view(torch.uint8) ^ _SIGN_BIT
    scales = _take_group_scales(source, name, shape, scheme)
    zeros: torch.Tensor | int = _SIGN_BIT
    if not scheme.is_symmetric:
        stored = take_exact(source, f"{name}.weight_zero_point", torch.int8, (shape[0], scales.shape[1]))
        zeros = stored.int() + _SIGN_BIT
    order = _take_order(source, name, scheme, shape[1])
    return group_weight(values, 8, _group_size(scheme, shape[1]), scales, zeros, order)


def _take_group_scales(source: TensorSource, name: str, shape: tuple[int, int], scheme: Scheme) -> torch.Tensor:
    """Take scales as groups have them, `[out_features, num_groups]`."""
    rows, columns = shape
    if scheme.strategy == "group":
        return take_scales(source, f"{name}.weight_scale", (rows, -(-columns // _group_size(scheme, columns))))
    return take_weight_scales(source, f"{name}.weight_scale", shape).expand(rows, 1).contiguous()


def _take_order(source: TensorSource, name: str, scheme: Scheme, columns: int) -> torch.Tensor | None:
    if not scheme.has_input_order:
        return None
    return take_input_order(source, f"{name}.weight_g_idx", columns, _group_size(scheme, columns))


def _group_size(scheme: Scheme, columns: int) -> int:
    return columns_of_a_group(scheme.group_size or -1, columns)
