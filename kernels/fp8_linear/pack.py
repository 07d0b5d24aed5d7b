"""Packs float8 matrices for the GPU's kernels, when weights are loaded."""

from __future__ import annotations

import torch

from kernels.fp8_linear.weight import SCALE_BLOCK, Fp8Weight
from kernels.gpu_config import has_float8, has_kernels
from kernels.linear.gpu_packed import PackedMatrix, pack_matrix
from kernels.linear.gpu_scaled import ScaledMatrix, scale_matrix


def pack_fp8(weight: Fp8Weight) -> Fp8Weight | PackedMatrix | ScaledMatrix:
    """Return the matrix in the form that is multiplied fastest on its device; the plain one can be freed afterwards.

    A GPU that cannot multiply float8 numbers leaves inputs as they are: its results are closer to exact ones.
    """
    device = weight.values.device
    if not has_kernels(device):
        return weight
    if weight.activation != "none" and has_float8(device):
        return scale_matrix(weight.values, weight.scales, weight.activation_scale, has_blocks=weight.has_blocks)
    rows, columns = weight.values.shape
    scales = weight.scales.repeat_interleave(SCALE_BLOCK, dim=0)[:rows] if weight.has_blocks else weight.scales
    group_size = SCALE_BLOCK if weight.has_blocks else columns
    return pack_matrix("fp8", weight.values.view(torch.uint8), scales.expand(rows, -1), None, group_size)
