"""Takes the tensors of quantized layers, each checked for dtype, shape and range: a checkpoint is untrusted input.

A tensor that fails a check raises what `TensorSource.error` makes.
"""

from __future__ import annotations

import torch

from gpu_worker.quantization.quantization_method import TensorSource
from kernels.linear.forms import SCALE_BLOCK, GroupQuantizedWeight, integers

# The last has exponents alone: scales that are powers of two.
_SCALES = (torch.float32, torch.float16, torch.bfloat16, torch.float8_e8m0fnu)


def _raw(source: TensorSource, name: str, index: int | None) -> torch.Tensor:
    return source.take_raw(name) if index is None else source.take_raw_item(name, index)


def take_exact(
    source: TensorSource, name: str, dtype: torch.dtype, shape: tuple[int, ...], index: int | None = None
) -> torch.Tensor:
    """Take a tensor of exactly this dtype and shape; of a stack, here and below, item `index`."""
    tensor = _raw(source, name, index)
    if tensor.dtype is not dtype:
        raise source.error(name, f"is stored as {tensor.dtype}; its quantization needs {dtype}")
    if tuple(tensor.shape) != shape:
        raise source.error(name, f"has shape {list(tensor.shape)}; config.json calls for {list(shape)}")
    return tensor


def take_scales(source: TensorSource, name: str, *shapes: tuple[int, ...], index: int | None = None) -> torch.Tensor:
    """Take finite numbers of one of these shapes, as float32."""
    tensor = _raw(source, name, index)
    if tensor.dtype not in _SCALES:
        allowed = "float32, float16, bfloat16 or float8_e8m0fnu"
        raise source.error(name, f"is stored as {tensor.dtype}; scales must be {allowed}")
    if tuple(tensor.shape) not in shapes:
        allowed = " or ".join(str(list(shape)) for shape in shapes)
        raise source.error(name, f"has shape {list(tensor.shape)}; config.json calls for {allowed}")
    scales = tensor.float()
    if not scales.isfinite().all():
        raise source.error(name, "holds numbers that are not finite; the checkpoint is damaged")
    return scales


def take_input_order(source: TensorSource, name: str, in_features: int, group_size: int) -> torch.Tensor | None:
    """Take each input's group, `[in_features]` int32; return the int64 order that sorts by group, None if sorted."""
    groups = take_exact(source, name, torch.int32, (in_features,)).long()
    in_order = torch.arange(in_features, device=groups.device) // group_size
    if torch.equal(groups, in_order):
        return None
    last = int(in_order[-1])
    if int(groups.min()) < 0 or int(groups.max()) > last:
        raise source.error(name, f"names groups from {int(groups.min())} to {int(groups.max())}; there are 0 to {last}")
    order = groups.argsort(stable=True)
    if not torch.equal(groups[order], in_order):
        raise source.error(name, f"has groups of unequal size; each must have group_size ({group_size}) input features")
    return order


# Bits of a float8_e4m3fn, without the sign, that are all set in a NaN.
_NAN_BITS = 0x7F


def take_float8(source: TensorSource, name: str, shape: tuple[int, int], index: int | None = None) -> torch.Tensor:
    """Take a float8_e4m3fn matrix of numbers."""
    values = take_exact(source, name, torch.float8_e4m3fn, shape, index)
    if ((values.view(torch.uint8) & _NAN_BITS) == _NAN_BITS).any():
        raise source.error(name, "holds values that are not numbers; the checkpoint is damaged")
    return values


def take_weight_scales(
    source: TensorSource, name: str, shape: tuple[int, int], *, has_blocks: bool = False, index: int | None = None
) -> torch.Tensor:
    """Take the scales of a matrix of this shape as `ScaledWeight` wants them: a block's, a row's or the tensor's."""
    rows, columns = shape
    if has_blocks:
        return take_scales(source, name, (-(-rows // SCALE_BLOCK), -(-columns // SCALE_BLOCK)), index=index)
    return take_scales(source, name, (), (1,), (1, 1), (rows,), (rows, 1), index=index).reshape(-1, 1)


def take_activation_scale(source: TensorSource, name: str, index: int | None = None) -> torch.Tensor:
    """Take the one scale of a layer's inputs, above zero, which divides them."""
    scale = take_scales(source, name, (), (1,), (1, 1), index=index).reshape(())
    if scale <= 0:
        raise source.error(name, f"is {scale.item()}; a scale of inputs must be above 0")
    return scale


def unpack_words(words: torch.Tensor, bits: int) -> torch.Tensor:
    """Return the values, lowest bits first: `[rows, columns * 32 / bits]` uint8, of `words: [rows, columns]` int32."""
    return integers(bits).unpack(words.contiguous().view(torch.uint8))


def group_weight(
    values: torch.Tensor,
    bits: int,
    group_size: int,
    scales: torch.Tensor,
    zeros: torch.Tensor | int,
    input_order: torch.Tensor | None = None,
) -> GroupQuantizedWeight:
    """Put a matrix into the engine's form.

    Shapes:
        values: `[out_features, in_features * bits / 8]` uint8, packed as in `GroupQuantizedWeight`, in input order
        scales, zeros: `[out_features, num_groups]`; zeros may be one integer for all
        input_order: `[in_features]` int64, puts columns of a group beside one another
    """
    number = integers(bits)
    if input_order is not None:
        values = number.pack(number.unpack(values)[:, input_order])
    # Subtracted from zero, not negated: a zero point of zero must not become a negative zero.
    offsets = 0 - scales * zeros
    return GroupQuantizedWeight(values.contiguous(), number, group_size, scales, offsets, input_order)


def columns_of_a_group(group_size: int, in_features: int) -> int:
    """Return how many columns share a scale, where a `group_size` of -1 means all."""
    return in_features if group_size == -1 else min(group_size, in_features)
