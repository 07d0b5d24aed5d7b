"""Takes the tensors of layers whose weights are 8-bit numbers times scales.

A tensor of another dtype or shape, or with values that cannot be, raises what `TensorSource.error` makes.
"""

from __future__ import annotations

import torch

from gpu_worker.quantization.stored_tensors import check_exact, check_scales
from gpu_worker.quantization.tensor_source import TensorSource
from kernels.linear.forms import SCALE_BLOCK

# Bits of a float8_e4m3fn that are all set, the sign aside, in what is not a number.
_NAN_BITS = 0x7F


def take_float8(source: TensorSource, name: str, shape: tuple[int, int]) -> torch.Tensor:
    """Take a float8_e4m3fn matrix of numbers."""
    return check_float8(source, name, source.take_raw(name), shape)


def check_float8(source: TensorSource, name: str, values: torch.Tensor, shape: tuple[int, int]) -> torch.Tensor:
    """Return a matrix, or one of a stack, which must be float8_e4m3fn numbers of this shape."""
    check_exact(source, name, values, torch.float8_e4m3fn, shape)
    if ((values.view(torch.uint8) & _NAN_BITS) == _NAN_BITS).any():
        raise source.error(name, "holds values that are not numbers; the checkpoint is damaged")
    return values


def take_weight_scales(
    source: TensorSource, name: str, shape: tuple[int, int], *, has_blocks: bool = False
) -> torch.Tensor:
    """Take the scales of a matrix of this shape as `ScaledWeight` wants them: a block's, a row's or the tensor's."""
    return check_weight_scales(source, name, source.take_raw(name), shape, has_blocks=has_blocks)


def check_weight_scales(
    source: TensorSource, name: str, scales: torch.Tensor, shape: tuple[int, int], *, has_blocks: bool = False
) -> torch.Tensor:
    """Return the scales of a matrix, or of one of a stack, which were taken already, in the same form."""
    rows, columns = shape
    if has_blocks:
        return check_scales(source, name, scales, (-(-rows // SCALE_BLOCK), -(-columns // SCALE_BLOCK)))
    return check_scales(source, name, scales, (), (1,), (1, 1), (rows,), (rows, 1)).reshape(-1, 1)


def take_activation_scale(source: TensorSource, name: str, index: int | None = None) -> torch.Tensor:
    """Take the one scale of a layer's inputs, above zero, which divides them; of a stack, that of matrix `index`."""
    raw = source.take_raw(name) if index is None else source.take_raw_item(name, index)
    scale = check_scales(source, name, raw, (), (1,), (1, 1)).reshape(())
    if scale <= 0:
        raise source.error(name, f"is {scale.item()}; a scale of inputs must be above 0")
    return scale
