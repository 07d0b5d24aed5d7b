"""What a linear layer is made of whose inputs are rounded to eight bits, and how its kernel is launched."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from kernels.gpu_config import Gpu, GpuGeneration, Rows, by_generation, has_float8, has_kernels
from kernels.linear.forms import QuantizedWeight, ScaledWeight
from kernels.linear.gpu_scaled.block_product import can_multiply
from kernels.linear.product_launch import (
    MAX_SPLIT_ROWS,
    MIN_BLOCK_N,
    ProductLaunch,
    launch_for,
    read_launches,
    splits_of,
)
from kernels.linear.rounding import ROW_MULTIPLE, InputRounding

# By GPU generation and rows of the batch. Reasoned, not measured yet: `python -m ops.bench.gpu.tune` compares others.
FIELDS = "block_n block_k num_warps num_stages programs_per_multiprocessor"
SCALED_LINEAR: dict[str, Rows] = {
    "HOPPER": {16: (64, 256, 4, 5, 2), 32: (64, 256, 4, 4, 2), 64: (64, 256, 4, 3, 2), 128: (128, 128, 8, 4, 1)},
    "AMPERE": {16: (64, 128, 4, 6, 2), 32: (64, 128, 4, 5, 2), 64: (64, 128, 4, 4, 2), 128: (128, 128, 8, 3, 1)},
    "ADA": {16: (64, 128, 4, 4, 2), 32: (64, 128, 4, 3, 2), 64: (64, 128, 4, 3, 2), 128: (128, 128, 8, 3, 1)},
}
KERNEL_ROWS: dict[str, int] = {"HOPPER": 64, "AMPERE": 64, "ADA": 64}


@dataclass(frozen=True, slots=True, eq=False)
class ScaledMatrix:
    """A matrix `scale * value`.

    Attributes:
        values: `[out_features, in_features]` int8 or float8_e4m3fn, contiguous.
        scales: float32: `[out_features]`, or one a block:
            `[ceil(out_features / SCALE_BLOCK), ceil(in_features / SCALE_BLOCK)]`, a row padded for `block_product`.
        activation_scale: Of all inputs, `[]` float32; None gives each token its own (and each block of its columns,
            where the matrix has blocks).
        counters: Zero whenever no product is running; int32, one a block of features.
        has_block_product: Whether `block_product` multiplies it.
    """

    values: torch.Tensor
    scales: torch.Tensor
    activation_scale: torch.Tensor | None
    counters: torch.Tensor
    has_block_product: bool = False

    @property
    def has_blocks(self) -> bool:
        """Whether scales are those of blocks."""
        return self.scales.dim() == 2

    @property
    def rounding(self) -> InputRounding:
        """How its inputs are rounded."""
        return InputRounding(self.values.dtype, self.activation_scale, self.has_blocks)


def scale_for_gpu(form: QuantizedWeight) -> ScaledMatrix | None:
    """Return a matrix whose inputs are rounded as the kernels of its device take it, or None where there are none."""
    device = form.values.device
    if not isinstance(form, ScaledWeight) or form.activation == "none" or not has_kernels(device):
        return None
    can_multiply = form.has_row_scales if form.values.dtype is torch.int8 else has_float8(device)
    return scale_matrix(form) if can_multiply else None


def scale_matrix(form: ScaledWeight) -> ScaledMatrix:
    """Take a matrix as it is, with a scale for each row or block."""
    rows = form.shape[0]
    counters = torch.zeros(-(-rows // MIN_BLOCK_N), dtype=torch.int32, device=form.values.device)
    values, scales = form.values.contiguous(), form.scales
    if form.has_row_scales:
        return ScaledMatrix(values, scales.flatten().expand(rows).contiguous(), form.activation_scale, counters)
    padded = F.pad(scales, (0, -scales.shape[1] % ROW_MULTIPLE))
    can_scale = form.activation == "dynamic" and can_multiply(values)
    return ScaledMatrix(values, padded.contiguous(), form.activation_scale, counters, can_scale)


_LAUNCHES = read_launches(FIELDS, SCALED_LINEAR)
# Up to how many rows the kernel is preferred where cuBLAS has the product too.
_KERNEL_ROWS = by_generation(KERNEL_ROWS)


def scaled_linear_launch(generation: GpuGeneration, num_rows: int) -> ProductLaunch:
    """Return the launch for a number of rows."""
    return launch_for(_LAUNCHES[generation], num_rows)


def is_kernel_preferred(generation: GpuGeneration, num_rows: int) -> bool:
    """Return True where the kernel is expected to be ahead of cuBLAS."""
    return num_rows <= _KERNEL_ROWS[generation]


def scaled_linear_splits(launch: ProductLaunch, gpu: Gpu, num_rows: int, out_features: int, in_features: int) -> int:
    """Return into how many parts the input features are divided."""
    if num_rows > MAX_SPLIT_ROWS:
        return 1
    return splits_of(launch, gpu, out_features, -(-in_features // launch.block_k), out_features * in_features)
