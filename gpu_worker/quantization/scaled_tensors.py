"""Takes the tensors of layers whose weights are 8-bit numbers times scales."""

from __future__ import annotations

import torch

from gpu_worker.quantization.stored_tensors import take_exact, take_scales
from gpu_worker.quantization.tensor_source import TensorSource
from kernels.linear.forms import SCALE_BLOCK

# Bits of a float8_e4m3fn that are all set, the sign aside, in what is not a number.
_NAN_BITS = 0x7F


def take_float8(source: TensorSource, name: str, shape: tuple[int, int]) -> torch.Tensor:
    """Take a float8_e4m3fn matrix of numbers.

    Raises:
        Exception: What `source.error` makes.
    """
    values = take_exact(source, name, torch.float8_e4m3fn, shape)
    if ((values.view(torch.uint8) & _NAN_BITS) == _NAN_BITS).any():
        raise source.error(name, "holds values that are not numbers; the checkpoint is damaged")
    return values


def take_weight_scales(
    source: TensorSource, name: str, shape: tuple[int, int], *, has_blocks: bool = False
) -> torch.Tensor:
    """Take the scales of a matrix of this shape as `ScaledWeight` wants them: a block's, a row's or the tensor's.

    Raises:
        Exception: What `source.error` makes.
    """
    rows, columns = shape
    if has_blocks:
        return take_scales(source, name, (-(-rows // SCALE_BLOCK), -(-columns // SCALE_BLOCK)))
    scales = take_scales(source, name, (), (1,), (1, 1), (rows,), (rows, 1))
    return scales.reshape(-1, 1)


def take_activation_scale(source: TensorSource, name: str) -> torch.Tensor:
    """Take the one scale of a layer's inputs, which divides them: above zero.

    Raises:
        Exception: What `source.error` makes.
    """
    scale = take_scales(source, name, (), (1,), (1, 1)).reshape(())
    if scale <= 0:
        raise source.error(name, f"is {scale.item()}; a scale of inputs must be above 0")
    return scale
