"""Packs 8-bit matrices for the GPU's kernels, when weights are loaded."""

from __future__ import annotations

import torch

from kernels.gpu_config import has_kernels
from kernels.int8_linear.weight import Int8GroupWeight, Int8Weight
from kernels.linear.gpu_packed import PackedMatrix, can_pack, pack_matrix
from kernels.linear.gpu_scaled import ScaledMatrix, scale_matrix

# From the bits of a signed byte to those of the unsigned one that is greater by 128.
_SIGN = 128


def pack_int8_groups(weight: Int8GroupWeight) -> Int8GroupWeight | PackedMatrix:
    """Return the matrix in the form that is multiplied fastest on its device; the plain one can be freed afterwards."""
    if not (has_kernels(weight.values.device) and can_pack(weight.group_size, weight.values.shape[1])):
        return weight
    return pack_matrix("int8", weight.values, weight.scales, weight.offsets, weight.group_size, weight.input_order)


def pack_int8(weight: Int8Weight) -> Int8Weight | PackedMatrix | ScaledMatrix:
    """Return the matrix in the form that is multiplied fastest on its device; the plain one can be freed afterwards."""
    if not has_kernels(weight.values.device):
        return weight
    if weight.activation != "none":
        return scale_matrix(weight.values, weight.scales, weight.activation_scale, has_blocks=False)
    rows, columns = weight.values.shape
    scales = weight.scales.expand(rows, 1)
    return pack_matrix("int8", weight.values.view(torch.uint8) ^ _SIGN, scales, -_SIGN * scales, columns)
