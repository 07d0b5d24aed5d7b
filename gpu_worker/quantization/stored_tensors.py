"""Takes the tensors of quantized layers, each checked for dtype, shape and range: a checkpoint is untrusted input.

A tensor that fails a check raises what `TensorSource.error` makes.
"""

from __future__ import annotations

import torch

from gpu_worker.quantization.tensor_source import TensorSource

# The last has exponents alone: scales that are powers of two.
_SCALES = (torch.float32, torch.float16, torch.bfloat16, torch.float8_e8m0fnu)


def take_exact(source: TensorSource, name: str, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    """Take a tensor of exactly this dtype and shape."""
    return check_exact(source, name, source.take_raw(name), dtype, shape)


def check_exact(
    source: TensorSource, name: str, tensor: torch.Tensor, dtype: torch.dtype, shape: tuple[int, ...]
) -> torch.Tensor:
    """Return a tensor, or an item of it, which must be of exactly this dtype and shape."""
    if tensor.dtype is not dtype:
        raise source.error(name, f"is stored as {tensor.dtype}; its quantization needs {dtype}")
    if tuple(tensor.shape) != shape:
        raise source.error(name, f"has shape {list(tensor.shape)}; config.json calls for {list(shape)}")
    return tensor


def take_scales(source: TensorSource, name: str, *shapes: tuple[int, ...]) -> torch.Tensor:
    """Take finite numbers of one of these shapes, as float32."""
    return check_scales(source, name, source.take_raw(name), *shapes)


def check_scales(source: TensorSource, name: str, tensor: torch.Tensor, *shapes: tuple[int, ...]) -> torch.Tensor:
    """Return a tensor, or an item of it, as float32: it must be finite numbers of one of these shapes."""
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
