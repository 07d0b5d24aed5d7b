"""Packs 4-bit matrices for the GPU's kernels, when weights are loaded."""

from __future__ import annotations

import torch

from kernels.gpu_config import has_kernels
from kernels.int4_linear.weight import Int4Weight
from kernels.linear.gpu_packed import PackedMatrix, can_pack, pack_matrix


def pack_int4(weight: Int4Weight) -> Int4Weight | PackedMatrix:
    """Return the matrix in the form that is multiplied fastest on its device; the plain one can be freed afterwards."""
    in_features = 2 * weight.values.shape[1]
    if not (has_kernels(weight.values.device) and can_pack(weight.group_size, in_features)):
        return weight
    values = torch.stack((weight.values & 15, weight.values >> 4), dim=2).flatten(1)
    return pack_matrix("int4", values, weight.scales, weight.offsets, weight.group_size, weight.input_order)
