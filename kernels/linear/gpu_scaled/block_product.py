"""cuBLAS's product of float8 matrices with a scale a block, which Hopper's GPUs have where torch brings it."""

from __future__ import annotations

import functools
import logging
from typing import Any

import torch
import torch.nn.functional as F

from kernels.linear.forms import SCALE_BLOCK
from kernels.linear.rounding import ROW_MULTIPLE

_TRIED = 256
# Sums of exact products in float32, rounded to bfloat16, may differ by their order.
_TOLERANCE = 1e-2
_log = logging.getLogger(__name__)


def multiply_blocks(
    values: torch.Tensor, scales: torch.Tensor, weight: torch.Tensor, weight_scales: torch.Tensor
) -> torch.Tensor:
    """Return `values @ weight.T`, scaled, in bfloat16.

    Source: the documentation of `cublasLtMatmulMatrixScale_t`, 1D and 2D block scaling.

    Shapes:
        values: `[num_rows, in_features]`, `num_rows` a multiple of `ROW_MULTIPLE`
        scales: `[num_rows, in_features / SCALE_BLOCK]` float32, those of a block of columns side by side
        weight: `[out_features, in_features]`
        weight_scales: `[out_features / SCALE_BLOCK, ...]` float32, a row padded to a multiple of `ROW_MULTIPLE`
    """
    recipes: Any = F.ScalingType
    product: Any = F.scaled_mm
    result: torch.Tensor = product(
        values,
        weight.t(),
        scales,
        recipes.BlockWise1x128,
        weight_scales.t(),
        recipes.BlockWise128x128,
        output_dtype=torch.bfloat16,
    )
    return result


def can_multiply(weight: torch.Tensor) -> bool:
    """Return True for matrices of whole blocks, on a device that has the product."""
    return all(size % SCALE_BLOCK == 0 for size in weight.shape) and has_block_product(weight.device)


@functools.cache
def has_block_product(device: torch.device) -> bool:
    """Return True where the product is there and right: it is tried once, on small numbers."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device)[0] != 9:
        return False
    return is_right(device)


def is_right(device: torch.device) -> bool:
    """Multiply small matrices whose scales all differ, and compare the result with the formula."""
    numbers = torch.arange(_TRIED * _TRIED, device=device).view(_TRIED, _TRIED)
    values, weight = ((numbers * step % 13 - 6).float() for step in (5, 7))
    num_blocks = _TRIED // SCALE_BLOCK
    scales = 1 + torch.arange(_TRIED * num_blocks, device=device).view(num_blocks, _TRIED).t() / _TRIED
    of_weight = 1 + torch.arange(num_blocks * ROW_MULTIPLE, device=device).view(num_blocks, ROW_MULTIPLE) / 8.0
    try:
        float8 = values.to(torch.float8_e4m3fn), weight.to(torch.float8_e4m3fn)
        result = multiply_blocks(float8[0], scales, float8[1], of_weight)
    except (RuntimeError, AttributeError, ValueError) as error:
        _log.info("products with a scale a block are left to our own kernel", extra={"reason": str(error)})
        return False
    wide = weight * of_weight[:, :num_blocks].repeat_interleave(SCALE_BLOCK, 0).repeat_interleave(SCALE_BLOCK, 1)
    expected = (values * scales.repeat_interleave(SCALE_BLOCK, 1)) @ wide.t()
    is_equal = bool((result.float() - expected).norm() <= _TOLERANCE * expected.norm())
    if not is_equal:
        _log.warning("torch's product with a scale a block is wrong here; our own kernel multiplies instead")
    return is_equal
